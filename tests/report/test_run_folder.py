"""A run's folder is not lost to another run, and names what made it."""

import json
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch import nn

import tacit
from tacit.report.run_folder import environment, save_run, source


def finished(steps=2, test=None):
    model = nn.Linear(3, 2)
    x = torch.randn(20, 3)
    records = tacit.Records(x, (x[:, 0] > 0).long(), 2, public_size=20)
    return tacit.Trainer(
        model,
        tacit.losses.CrossEntropy(),
        tacit.PerSampleClip(1.0),
        tacit.PoissonSampler(records, 0.5, steps=steps),
        torch.optim.SGD(model.parameters(), lr=0.1),
        tacit.Budget(50.0, 1e-3),
        noise=tacit.Noise(1.0),
        evaluate_on=test,
        callbacks=(),
    ).fit()


def test_a_saved_run_is_kept_unless_it_may_be_overwritten(tmp_path):
    x = torch.randn(6, 3)
    save_run(finished(test=tacit.Records(x, (x[:, 0] > 0).long(), 2)), tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    names = {"run.json", "weights.safetensors", "statement.json", "progress.png"}
    assert set(before) == names
    other = finished(steps=3)
    with pytest.raises(ValueError, match=r"holds a run already.*overwrite=True"):
        save_run(other, tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    save_run(other, tmp_path, overwrite=True)
    assert json.loads((tmp_path / "run.json").read_text())["steps"] == 3
    assert not (tmp_path / "progress.png").exists()  # it was the other run's


@pytest.mark.parametrize(
    "name",
    ["run.json", "weights.safetensors", "statement.json", "progress.png", "preprocessing.json"],
)
def test_a_part_of_a_run_is_a_run(name, tmp_path):
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match="overwrite"):
        save_run(finished(), tmp_path)


def test_a_folder_with_a_ledger_has_room(tmp_path):
    (tmp_path / "ledger.sqlite").write_bytes(b"kept")
    save_run(finished(), tmp_path)
    assert (tmp_path / "ledger.sqlite").read_bytes() == b"kept"


def test_the_accountants_version_is_known():
    assert environment()["dp_accounting"] == version("dp-accounting")


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A package in a checkout of its own, from which the figures are taken to come."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    (tmp_path / "src" / "tacit").mkdir(parents=True)
    (tmp_path / "src" / "tacit" / "__init__.py").touch()
    git(tmp_path, "init", "-q")
    monkeypatch.setattr(tacit, "__file__", str(tmp_path / "src" / "tacit" / "__init__.py"))
    return tmp_path


def asked_anew() -> dict:
    return source.__wrapped__()


def test_the_commit_is_that_of_the_packages_own_checkout(checkout):
    # Installed below somebody else's checkout: not tracked there.
    assert asked_anew() == {"tacit": tacit.__version__, "commit": None, "dirty": None}
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "first")
    head = git(checkout, "rev-parse", "HEAD")
    assert asked_anew() == {"tacit": tacit.__version__, "commit": head, "dirty": False}
    (checkout / "results.json").touch()  # what a run writes does not change the code
    assert asked_anew()["dirty"] is False
    (checkout / "experiment.py").touch()
    assert asked_anew()["dirty"] is True


def test_a_run_names_its_commit(tmp_path):
    save_run(finished(), tmp_path)
    told = json.loads((tmp_path / "run.json").read_text())["environment"]
    assert {name: told[name] for name in source()} == source()
