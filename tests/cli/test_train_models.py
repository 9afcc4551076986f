"""`tacit train --model`: every name builds a network for the data, or says why it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file as load_weights
from torch import nn
from typer.testing import CliRunner

import tacit
from tacit.cli import app
from tacit.cli.build_model import architecture_for
from tacit.cli.settings import MODELS as NETWORKS

FAST = ["--noise-multiplier", "5", "--delta", "1e-4", "--quiet", "--json", "--seed", "0"]


def run(folder: Path, *arguments: str):
    return CliRunner().invoke(app, ["train", *FAST, "--out", str(folder), *arguments])


def test_resnet18_from_end_to_end(tmp_path: Path) -> None:
    result = run(tmp_path, "--model", "resnet18", "--batch-size", "3", "--steps", "1")
    assert result.exit_code == 0, result.exception
    facts = json.loads(result.stdout)
    changes = facts["config"]["used"]["model_changes"]
    assert len(changes) == 20
    assert changes[0].startswith("layer '1': BatchNorm2d(64) → GroupNorm(16, 64)")
    assert all(change in result.stderr for change in changes)
    assert any("and 19 more" in note for note in facts["notes"])
    model = tacit.make_trainable(tacit.models.resnet18(channels=1)).model
    model.load_state_dict(load_weights(tmp_path / "weights.safetensors"))


def test_every_engine_takes_the_same_steps(tmp_path: Path) -> None:
    losses = []
    for engine in ("automatic", "book-keeping", "per-record"):
        folder = tmp_path / engine
        result = run(folder, "--steps", "2", "--batch-size", "50", "--engine", engine)
        assert result.exit_code == 0, result.exception
        facts = json.loads(result.stdout)
        assert facts["config"]["settings"]["query"]["engine"] == engine
        assert facts["config"]["used"]["model_changes"] == []
        losses.append(facts["loss"])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


FITTING = {
    (1, 28, 28): set(NETWORKS) - {"cifar-cnn"},
    (3, 32, 32): set(NETWORKS) - {"mnist-cnn"},
    (1, 8, 8): set(NETWORKS) - {"mnist-cnn", "cifar-cnn", "lenet5", "vgg"},
    (9,): {
        "default",
        "linear",
        "mlp",
        "lipschitz-linear",
        "lipschitz-mlp",
    },
}


@pytest.mark.parametrize("shape", FITTING, ids=str)
def test_every_name_fits_or_says_why_not(shape: tuple[int, ...]) -> None:
    for name in NETWORKS:
        if name not in FITTING[shape]:
            with pytest.raises(ValueError, match=r"takes (images|3 channels)"):
                architecture_for(name, shape, 7, "clip").build()
            continue
        model, changes = architecture_for(name, shape, 7, "clip").build()
        assert model(torch.zeros(2, *shape)).shape == (2, 7)
        assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
        has_norm = name in {"convnet", "lenet5", "resnet8", "resnet18"}
        assert bool(changes) == has_norm


CLIPLESS = ["default", "linear", "mnist-cnn", "lenet5", "vgg", "lipschitz-vgg", "lipschitz-mixer"]


@pytest.mark.parametrize("name", CLIPLESS)
def test_clipless_takes_a_network_by_its_twin(name: str) -> None:
    model, changes = architecture_for(name, (1, 28, 28), 7, "clipless").build()
    found = tacit.lipschitz.propagate(model, 1.0, (1, 28, 28))
    assert set(found.by_parameter) == {n for n, _ in model.named_parameters()}
    assert bool(changes) == (name in ("mnist-cnn", "lenet5", "vgg"))


def test_a_shape_that_does_not_fit_ends_the_command_in_words(tmp_path: Path) -> None:
    result = run(tmp_path, "--model", "vgg")
    assert result.exit_code != 0
    assert isinstance(result.exception, ValueError)
    assert "at least 12×12" in str(result.exception)
    assert "1×8×8" in str(result.exception)
