"""The clipless experiments run from the command line, at sizes that say nothing."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "experiments" / "clipless"


@pytest.fixture(autouse=True)
def in_the_folder(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.fixture(autouse=True)
def real_data() -> None:
    if not os.environ.get("TACIT_DATA"):
        pytest.skip("TACIT_DATA is not set: no real datasets to read")


@pytest.mark.parametrize("task", ["mnist/certified", "mnist/pixels"])
def test_figure_3b(task: str, tmp_path: Path) -> None:
    figure = importlib.import_module("figure_3b")
    report = figure.main(
        ["--task", task, "--trials", "1", "--seeds", "2", "--records", "400", "--device", "cpu",
         "--out", str(tmp_path / "out.json")]
    )  # fmt: skip
    (row,) = report["final"]
    assert 0 <= row["mean"] <= 1
    assert row["epsilon_pld"] <= 3.0
    assert len(row["accuracy"]) == 2
    assert (tmp_path / "out.json").exists()


def test_table_7() -> None:
    table = importlib.import_module("table_7")
    row = table.one_set("yeast", trials=2, seeds=2, seconds=60.0)
    assert 40 < row["mean"] < 90
    assert row["epsilon"] <= 1.0
    assert row["trials"] == 2
    sys.modules.pop("table_7")
