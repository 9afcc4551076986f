"""A finished run in a folder, made once, and copies of it with other facts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tacit
from tacit.diagnostics import ClippingAlignment, GradientNormHistory

CONFUSION = [[30, 2, 0], [1, 28, 3], [0, 4, 32]]


@pytest.fixture(scope="session")
def finished_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier with a certificate-free network, evaluated on its way, and its diagnostics."""
    torch.manual_seed(0)
    x = torch.randn(80, 6)
    y = x[:, :3].argmax(dim=1)
    train = tacit.Records(x[:60], y[:60], 3, public_size=60)
    test = tacit.Records(x[60:], y[60:], 3)
    model = nn.Linear(6, 3)
    measured = (GradientNormHistory(max_records=8), ClippingAlignment(max_records=16))
    run = tacit.Trainer(
        model,
        tacit.losses.CrossEntropy(),
        tacit.PerSampleClip(0.5),
        tacit.PoissonSampler(train, expected_batch_size=12, steps=20),
        torch.optim.SGD(model.parameters(), lr=0.5),
        tacit.Budget(3.0, 1e-3),
        evaluate_on=test,
        callbacks=measured,
    ).fit()
    folder = tmp_path_factory.mktemp("runs") / "first"
    tacit.save_run(run, folder, test)
    tacit.report.save_diagnostics(folder, *measured, max_norm=0.5)
    return folder


MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(finished_folder: Path, tmp_path: Path) -> MakeRun:
    """make_run(name, **facts): a copy of the run with some facts of run.json replaced."""

    def make(name: str = "run", *, without: tuple[str, ...] = (), **facts: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for file in ("run.json", "diagnostics.json"):
            shutil.copy(finished_folder / file, folder)
        stored = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        stored |= facts
        for key in without:
            del stored[key]
        (folder / "run.json").write_text(json.dumps(stored), encoding="utf-8")
        return folder

    return make
