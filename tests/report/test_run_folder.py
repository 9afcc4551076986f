"""A run's folder is not lost to another run, and names what made it."""

import json
from importlib.metadata import version

import pytest
import torch
from torch import nn

import tacit
from tacit.report import save_run
from tacit.report.run_folder import environment


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
        noise_multiplier=1.0,
        evaluate_on=test,
        progress=False,
    ).fit()


def test_a_saved_run_is_kept_unless_it_may_be_overwritten(tmp_path):
    x = torch.randn(6, 3)
    save_run(finished(test=tacit.Records(x, (x[:, 0] > 0).long(), 2)), tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert set(before) == {"run.json", "weights.safetensors", "progress.png"}
    other = finished(steps=3)
    with pytest.raises(ValueError, match=r"holds a run already.*overwrite=True"):
        save_run(other, tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    save_run(other, tmp_path, overwrite=True)
    assert json.loads((tmp_path / "run.json").read_text())["steps"] == 3
    assert not (tmp_path / "progress.png").exists()  # it was the other run's


@pytest.mark.parametrize("name", ["run.json", "weights.safetensors", "progress.png"])
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
