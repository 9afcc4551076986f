"""One record among N identical ones moves a sum by at most its sensitivity, N up to 8,192.

Identical records round alike, so the errors of a sum in low precision add up instead of cancelling,
and one more record can move all of them at once. Tests with single records cannot see this.
`make test` runs a pairwise part of the matrix; `pytest -m full tests/contracts` runs all of it.
"""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from contract_checks import ROUNDING
from matrix_cases import CHANGES, CLIP, FACTORS, PAIRWISE, Setting, full, moves
from pairwise import Row

from tacit import PerSampleClip
from tacit.engines import PerRecord

CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


# Combinations that once passed their bound, by the factor beside them.
FOUND = [
    "half-frozen/book-keeping/ties/autocast/whole/1028/replace",  # 2.8
    "half-frozen/book-keeping/mlp/autocast/whole/1028/remove",  # 3.2
    "several-norms/book-keeping/tied-weights/autocast/whole/1028/add",  # 4.5
    "clipless-augmented/eager/lipschitz-mlp/bfloat16/whole/8192/add",  # 147
    "clipless-clipped/eager/lipschitz-mlp/bfloat16/one/7/replace",  # 1.01
    "clipless-clipped/eager/lipschitz-used-twice/bfloat16/whole/1028/add",  # 1.4
]


def name_of(row: Row) -> str:
    return "/".join(row.values())


def row_named(name: str) -> Row:
    return dict(zip(FACTORS, name.split("/"), strict=True))


def pytest_generate_tests(metafunc):
    """The full matrix is only listed where it is asked for."""
    if "row_of_all" in metafunc.fixturenames:
        asked = re.search(r"(?<!not )full", metafunc.config.getoption("markexpr"))
        metafunc.parametrize("row_of_all", list(full()) if asked else [], ids=name_of)


def check(row: Row, device: str) -> None:
    setting = Setting(row, device)
    model = setting.model()
    assert max(moves(setting, setting.query(model), model)) <= 1 + ROUNDING


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("row", PAIRWISE, ids=name_of)
def test_pairwise(row, device):
    check(row, device)


@pytest.mark.parametrize("row", [row_named(name) for name in FOUND], ids=name_of)
def test_found(row):
    check(row, "cpu")


@pytest.mark.full
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_full(row_of_all, device):
    check(row_of_all, device)


class RoundsSums(PerSampleClip):
    """Every record is clipped as it should be, and the sum is rounded to bfloat16."""

    def __call__(self, model, loss, batch):
        bounded = super().__call__(model, loss, batch)
        rounded = [
            dataclasses.replace(b, sums=tuple(s.bfloat16().double() for s in b.sums))
            for b in bounded.blocks
        ]
        return dataclasses.replace(bounded, blocks=tuple(rounded))


def rounding_sums() -> PerSampleClip:
    return RoundsSums(CLIP, engine=PerRecord())


def worst(query, model: str, size: int, change: str) -> float:
    row = {"route": "flat", "engine": "per-record", "model": model, "dtype": "float32"}
    setting = Setting({**row, "piece": "whole", "size": str(size), "change": change})
    return max(moves(setting, query, setting.model()))


@pytest.mark.parametrize("size", [1028, 4112])
@pytest.mark.parametrize("change", CHANGES)
def test_a_sum_rounded_to_bfloat16_is_caught(change, size):
    assert worst(rounding_sums(), "mlp", size, change) > 1.05
    assert worst(PerSampleClip(CLIP), "mlp", size, change) < 1.001


@pytest.mark.parametrize(("size", "jump"), [(1028, 7), (4112, 31)])
def test_at_a_tie_every_coordinate_jumps_at_once(size, jump):
    assert worst(rounding_sums(), "ties", size, "add") > jump


@pytest.mark.parametrize("change", CHANGES)
def test_a_single_record_does_not_show_it(change):
    """The reason for this file."""
    assert worst(rounding_sums(), "mlp", 1, change) < 1.01
