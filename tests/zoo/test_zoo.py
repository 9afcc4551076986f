"""Clipped sums of models that others wrote equal those of a plain loop of autograd.

Every case runs with its library's dropout in training mode. The engine and the loop begin from the
same random state, so they see the same dropout masks. The engine first meets a model with its
initial weights, whose zeros (a head, an adapter, a layer scale) hide what lies behind them. The
comparisons are made after all weights have moved.

A sum is compared at three constants. A huge one clips nobody. At the median norm half of the
records are clipped. At a tiny one every record is clipped, so a wrong norm moves the sum.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from models import CASES, HELD_OUT, LISTED, Case
from reference import RecordGradients, Start, record_gradients, record_losses
from torch import nn
from zoo_case import LENGTH, Tree

import tacit
from tacit.pytrees import map_tensors
from tacit.sampling.poisson import Poisson
from tacit.sampling.sampler import batch_of

HUGE, TINY = 1e6, 1e-3


def move_weights(model: nn.Module) -> None:
    """Change every trainable parameter by a tenth of its spread, or by 0.05 where it has none."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                spread = float(parameter.std()) if parameter.numel() > 1 else 0.0
                step = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.1 * (spread or 0.5) * step.to(parameter))


@dataclass
class Subject:
    """A model of the zoo with the queries that are put to it."""

    case: Case
    model: nn.Module
    dtype: torch.dtype = torch.float32
    queries: dict[float, tacit.PerSampleClip] = field(default_factory=dict)

    @classmethod
    def of(cls, case: Case, dtype: torch.dtype = torch.float32, count: int = LENGTH) -> Subject:
        """A model that an engine has met with its initial weights, and that has moved since."""
        subject = cls(case, case.model().to(dtype), dtype)
        subject.clipped(TINY, *case.batch(count, dtype), start=Start(subject.model, seed=0))
        move_weights(subject.model)
        return subject

    def clipped(
        self,
        max_norm: float,
        inputs: Tree,
        targets: Tree,
        *,
        start: Start,
        piece: int | None = None,
    ):
        """The engine's answer, from the state that `start` names."""
        query = self.queries.setdefault(max_norm, tacit.PerSampleClip(max_norm=max_norm))
        batch = batch_of(inputs, targets, divisor=1.0, scheme=Poisson(0.5), max_physical=piece)
        start.go_back()
        return query(self.model, self.case.loss, batch)

    def gradients(self, inputs: Tree, targets: Tree, *, start: Start, piece: int | None = None):
        """The loop's answer, from the same state."""
        return record_gradients(
            self.model, self.case.loss, inputs, targets, start=start, piece=piece
        )

    def compare(self, count: int, *, piece: int | None = None, all_constants: bool = False) -> None:
        """Compare the first records' sums with those of the loop, at one constant or at three."""
        inputs, targets = self.case.batch(count, self.dtype)
        start = Start(self.model, seed=count)
        expected = self.gradients(inputs, targets, start=start, piece=piece)
        median = float(expected.norms.median())
        for max_norm in (HUGE, median, TINY) if all_constants else (TINY,):
            # The first call on a new shape may look at the program before it runs it.
            self.clipped(max_norm, inputs, targets, start=start, piece=piece)
            found = self.clipped(max_norm, inputs, targets, start=start, piece=piece)
            require_same(found, expected, max_norm, self.tolerance)

    @property
    def tolerance(self) -> float:
        if self.dtype is torch.float32:
            return self.case.tolerance
        assert self.case.float64_tolerance is not None
        return self.case.float64_tolerance


def require_same(found, expected: RecordGradients, max_norm: float, tolerance: float) -> None:
    """Compare all sums together, and each parameter's by its own size but less strictly.

    A parameter's share may be so small that it is rounding only: the bias of an attention's keys
    has no gradient in exact arithmetic. So a tenth of the whole's tolerance is allowed to each.
    """
    (block,) = found.blocks
    sums = dict(zip(map(id, block.parameters), block.sums, strict=True))
    assert len(sums) == len(expected.parameters), "the block lacks parameters, or has others"
    sizes = expected.clipped_sizes(max_norm)
    whole = sum(min(max_norm, norm) if norm == norm else 0.0 for norm in expected.norms.tolist())
    errors = [
        float((sums[id(parameter)].double() - total).norm())
        for parameter, total in zip(
            expected.parameters, expected.clipped_sums(max_norm), strict=True
        )
    ]
    names = dict(zip(map(id, block.parameters), block.names, strict=True))
    for parameter, error, size in zip(expected.parameters, errors, sizes, strict=True):
        allowed = tolerance * (100 * size + whole / 10)
        assert error <= allowed, f"{names[id(parameter)]}: off by {error / (size or whole):.1e}"
    error = sum(e * e for e in errors) ** 0.5
    assert error <= tolerance * whole, f"sums at C = {max_norm:.3g} off by {error / whole:.1e}"


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def case(request) -> Case:
    return request.param


@pytest.fixture(scope="module")
def subject(case: Case) -> Subject:
    """One model for all tests of a case; pytest runs them one after the other."""
    return Subject.of(case)


def test_the_zoo_is_large_enough():
    assert len(LISTED) >= 37
    assert len(HELD_OUT) >= 12


def test_the_case_keeps_records_apart(case):
    """Of the model itself: finite losses that repeat, and no change when another record does."""
    model = case.model()
    move_weights(model)
    inputs, targets = case.batch(LENGTH)
    start = Start(model, seed=0)

    def losses(*records: Tree) -> torch.Tensor:
        start.go_back()
        return record_losses(model, case.loss, *records).detach()

    def with_another_record_2(column: torch.Tensor) -> torch.Tensor:
        return torch.cat([column[:2], column[3:4], column[3:]])

    whole = losses(inputs, targets)
    assert whole.shape == (LENGTH,)
    assert whole.isfinite().all()
    assert torch.equal(whole, losses(inputs, targets))
    others = torch.tensor([i != 2 for i in range(LENGTH)])
    changed = losses(*map_tensors(with_another_record_2, (inputs, targets)))
    torch.testing.assert_close(changed[others], whole[others], rtol=1e-5, atol=1e-6)
    assert changed[2] != whole[2]


def test_three_constants(subject):
    """With as many records as a sequence has tokens."""
    subject.compare(LENGTH, all_constants=True)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_other_batch_sizes(subject, count):
    subject.compare(count)


def test_the_same_verdict_ten_times_in_a_row(subject):
    inputs, targets = subject.case.batch(2)
    for seed in range(10):
        found = subject.clipped(TINY, inputs, targets, start=Start(subject.model, seed))
        assert all(total.isfinite().all() for block in found.blocks for total in block.sums)


def test_in_pieces(subject):
    """The last piece is smaller than the others."""
    subject.compare(5, piece=2)


@pytest.mark.parametrize(
    "case64",
    [case for case in CASES.values() if case.float64_tolerance is not None],
    ids=lambda case: case.name,
)
def test_float64(case64):
    Subject.of(case64, torch.float64, count=2).compare(2)


@pytest.mark.parametrize("name", ["transformers/bert", "transformers/gpt2", "transformers/llama"])
def test_masks_with_and_without_padding(name):
    """These models leave the mask out when no record of the batch is padded.

    Whether one is padded is private. The sums must be right on both sides, in either order.
    """
    subject = Subject.of(CASES[name])
    inputs, targets = CASES[name].batch(LENGTH)
    for rows in ([1, 2], [0, 1, 2], [4, 5], [0, 3], [1, 2]):
        some_inputs, some_targets = map_tensors(lambda t, rows=rows: t[rows], (inputs, targets))
        start = Start(subject.model, seed=1)
        expected = subject.gradients(some_inputs, some_targets, start=start)
        found = subject.clipped(TINY, some_inputs, some_targets, start=start)
        require_same(found, expected, TINY, subject.tolerance)


def test_autocast_around_the_query():
    subject = Subject.of(CASES["torchvision/vit"])
    inputs, targets = subject.case.batch(5)
    start = Start(subject.model, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        expected = subject.gradients(inputs, targets, start=start)
        found = subject.clipped(TINY, inputs, targets, start=start)
    require_same(found, expected, TINY, CASES["modes/autocast_bert"].tolerance)
