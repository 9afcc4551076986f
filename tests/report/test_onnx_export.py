"""An ONNX file answers as the run does, on any batch size, and says what is not in it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from test_saved_run import some, train, trained
from torch import nn
from typer.testing import CliRunner

import tacit
from tacit.cli import app
from tacit.data import Categorical, Numeric, PublicScaler, RangeScaler, Schema
from tacit.losses import Huber, MultiLabelCrossEntropy
from tacit.models import Architecture

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


def answers(file, x: np.ndarray) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return session.run(None, {"inputs": x})


def metadata(file) -> dict[str, str]:
    return {entry.key: entry.value for entry in onnx.load(file).metadata_props}


@pytest.mark.parametrize(
    ("name", "adapted"),
    [("default", "trainable"), ("lipschitz-mixer", "as-built")],
)
def test_images_with_their_scaling_answer_alike(name, adapted, tmp_path) -> None:
    records = some((1, 8, 8), count=12, classes=3, class_names=("a", "b", "c"))
    model = Architecture(name, (1, 8, 8), 3, adapted=adapted).build().model
    query = tacit.Clipless() if adapted == "as-built" else None
    scalers = [RangeScaler(-2.0, 2.0), PublicScaler(0.1, 0.7)]
    tacit.save_run(trained(model, records, query=query), tmp_path, records, preprocessing=scalers)
    run = tacit.load_run(tmp_path)
    facts = run.export_onnx(tmp_path / "m.onnx")
    assert facts["largest_difference"] < 1e-5
    assert facts["not_in_the_graph"] == []
    for count in (1, 5, 12):
        x = records.inputs[:count]
        outputs, chances = answers(tmp_path / "m.onnx", x.numpy())
        assert np.allclose(outputs, run.outputs(x), atol=1e-5)
        assert np.allclose(chances, run.predict_proba(x), atol=1e-5)
    told = metadata(tmp_path / "m.onnx")
    assert told["class_names"].split("\n") == ["a", "b", "c"]
    assert told["privacy"] == run.statement["text"]
    assert float(told["epsilon"]) == run.epsilon


def test_batch_norm_with_released_statistics_answers_alike(tmp_path) -> None:
    train(
        tmp_path, "--query", "batch-clip", "--model", "convnet", "--statistics", "released",
        "--statistics-noise", "5", "--mini-set-size", "8", "--mini-sets", "20",
    )  # fmt: skip
    run = tacit.load_run(tmp_path)
    assert run.export_onnx(tmp_path / "m.onnx")["largest_difference"] < 1e-5
    _, raw = tacit.load("digits", scale=None)
    outputs, _ = answers(tmp_path / "m.onnx", raw.inputs.numpy())
    assert (outputs.argmax(1) == run.predict(raw)).all()


@pytest.mark.parametrize("task", ["regression", "multi-label"])
def test_a_table_answers_in_its_own_units_after_its_encoding(task, tmp_path) -> None:
    target = Numeric("t", range=(100.0, 300.0))
    colour = Categorical("c", categories=("red", "blue"))
    schema = Schema((Numeric("x", range=(0.0, 9.0)), colour, target), "t")
    table = {"x": np.arange(9.0), "c": ["red", "blue", "red"] * 3, "t": 100 + 20 * np.arange(9.0)}
    inputs = schema.inputs(table)
    labels = task == "multi-label"
    targets = (torch.arange(18).view(9, 2) % 3 > 0).float() if labels else schema.targets(table)
    records = tacit.Records(inputs, targets, public_size=9)
    model = tacit.models.mlp((inputs.shape[1],), 2 if labels else 1)
    run = trained(model, records, loss=MultiLabelCrossEntropy() if labels else Huber())
    tacit.save_run(run, tmp_path, records, schema=None if labels else schema)
    saved = tacit.load_run(tmp_path)
    facts = saved.export_onnx(tmp_path / "m.onnx")
    found = answers(tmp_path / "m.onnx", inputs.numpy())
    if labels:
        assert np.allclose(found[1], saved.predict_proba(inputs), atol=1e-5)
    else:
        assert np.allclose(found[0].squeeze(1), saved.predict(table), rtol=1e-5)
        assert "the encoding of the table" in facts["not_in_the_graph"][0]
        assert "the encoding of the table" in metadata(tmp_path / "m.onnx")["not_in_the_graph"]


def test_scattering_features_are_said_to_be_missing(tmp_path) -> None:
    arguments = ["--features", "scattering", "--scale-noise", "3", "--model", "linear"]
    train(tmp_path / "run", *arguments)
    result = CliRunner().invoke(app, ["export", str(tmp_path / "run"), "--json"])
    assert result.exit_code == 0, result.exception
    facts = json.loads(result.stdout)
    assert facts["inputs"] == ["batch", 81, 2, 2]
    assert "scattering" in facts["not_in_the_graph"][0]
    assert (tmp_path / "run" / "model.onnx").exists()
    again = CliRunner().invoke(app, ["export", str(tmp_path / "run")])
    assert "exists already" in str(again.exception)


class Unpredictable(nn.Module):
    """Depends on the values of its input, which a graph cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 2)

    def forward(self, x):
        return self.last(x) if float(x.detach().sum()) < 1e9 else self.last(-x)


def test_what_cannot_be_exported_leaves_no_file(tmp_path) -> None:
    records = some()
    tacit.save_run(trained(tacit.models.mlp((3,), 2), records), tmp_path, records)
    run = tacit.load_run(tmp_path)
    run.model = Unpredictable()
    with pytest.raises(ValueError, match="cannot be exported to ONNX"):
        run.export_onnx(tmp_path / "m.onnx")
    assert not list(tmp_path.glob("*.onnx*"))
    for arguments, words in (
        (["--format", "tflite"], "give onnx"),
        (["--out", str(tmp_path / "m.txt")], r"ends in \.onnx"),
    ):
        result = CliRunner().invoke(app, ["export", str(tmp_path), *arguments])
        assert isinstance(result.exception, ValueError)
        assert words.replace("\\", "") in str(result.exception)
