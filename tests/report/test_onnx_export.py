"""An ONNX file answers as the run does, on any batch size, from a table's columns as they are."""

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
from tacit.data import Boolean, Categorical, Date, Numeric, PublicScaler, RangeScaler, Schema
from tacit.data.scattering import ScatteringMap
from tacit.losses import Huber, MultiLabelCrossEntropy
from tacit.models import Architecture
from tacit.report import onnx_table

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


def answers(file, x: np.ndarray | dict[str, np.ndarray]) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return session.run(None, x if isinstance(x, dict) else {"inputs": x})


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
    assert facts["inputs"] == ["batch", 1, 8, 8]
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
    saved.export_onnx(tmp_path / "m.onnx")
    if labels:
        found = answers(tmp_path / "m.onnx", inputs.numpy())
        assert np.allclose(found[1], saved.predict_proba(inputs), atol=1e-5)
    else:
        columns = {"x": table["x"], "c": np.array(table["c"], object)}
        found = answers(tmp_path / "m.onnx", columns)
        assert np.allclose(found[0].squeeze(1), saved.predict(table), rtol=1e-5)


# ---- the columns of a table ----------------------------------------------------------------------

SCHEMA = Schema(
    (
        Numeric("x", (0.0, 9.0), missing=True),
        Numeric("outputs", (-1e6, 1e6 + 1)),  # an output of the graph has that name
        Numeric("released", missing=True),
        Categorical("c", ("red", "NA", "very good", "03"), missing=True),
        Categorical("grade", ("1", "2.5"), unknown="error"),
        Categorical("code", ("1", "2"), missing=True),
        Date("day", ("2010-01-01", "2030-01-01"), missing=True),
        Boolean("table/1", missing=True),
        Boolean("b"),
        Categorical("y", ("no", "yes")),
    ),
    "y",
)
ROWS = {
    "x": [1.5, None, 20.0, 9.0],
    "outputs": [0.0, -2e6, 3.25, 1e6],
    "released": [None, 12345.678, -7e8, 0.1],
    "c": ["NA", "red ", "", "very bad"],
    "grade": ["1", "2.5", "01", "1.0"],
    "code": ["2", "", "7", "seven"],
    "day": ["2020-02-29", "", "1950-01-01", "2029-12-31T18:00"],
    "table/1": ["yes", "F", "na", "1"],
    "b": [True, False, False, True],
    "y": ["no", "yes", "no", "yes"],
}
# The same records by hand: what somebody feeds who has no Tacit.
FED = {
    "x": np.array([1.5, np.nan, 20.0, 9.0]),
    "column outputs": np.array(ROWS["outputs"]),
    "released": np.array([np.nan, 12345.678, -7e8, 0.1]),
    "c": np.array(["NA", "red", "", "very bad"], object),
    "grade": np.array([1.0, 2.5, 1.0, 1.0]),
    "code": np.array([2.0, np.nan, 7.0, 8.0]),
    "day": np.array([18321.0, np.nan, -7305.0, 21914.75]),
    "table/1": np.array([1.0, 0.0, np.nan, 1.0]),
    "b": np.array([1.0, 0.0, 0.0, 1.0]),
}


@pytest.fixture(scope="module")
def table_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[tacit.SavedRun, dict]:
    """A run on such a table with a released range, and what its export says."""
    folder = tmp_path_factory.mktemp("run")
    inputs = SCHEMA.inputs(ROWS)
    ranges, event = tacit.data.release_ranges(
        inputs, SCHEMA.released_entries, noise_multiplier=1, public_size=4, seed=0
    )
    inputs = ranges(inputs)
    merged, counts = tacit.data.release_category_counts(
        inputs, SCHEMA, noise_multiplier=1, public_size=4, seed=0, rare_below=2.5
    )
    assert len(merged.entries) >= 2
    records = tacit.Records(merged(inputs), SCHEMA.targets(ROWS), 2, public_size=4)
    model = tacit.models.mlp((inputs.shape[1],), 2)
    run = trained(model, records, ledger=tacit.LedgerRun(prelude=(event, counts)))
    tacit.save_run(run, folder, records, schema=SCHEMA, preprocessing=[ranges, merged])
    saved = tacit.load_run(folder)
    return saved, saved.export_onnx(folder / "m.onnx")


def test_columns_go_in_as_they_are(table_run) -> None:
    run, facts = table_run
    assert facts["largest_difference"] < 1e-5
    assert len(facts["inputs"]) == 9
    file = run.folder / "m.onnx"
    assert metadata(file)["inputs"].split("\n") == facts["inputs"]
    assert "days since 1970-01-01" in facts["inputs"][6]
    for rows in (slice(0, 4), slice(2, 3)):
        outputs, chances = answers(file, {name: column[rows] for name, column in FED.items()})
        table = {name: column[rows] for name, column in ROWS.items()}
        assert np.allclose(outputs, run.outputs(table), atol=1e-5)
        assert np.allclose(chances, run.predict_proba(table), atol=1e-5)


def test_the_arrays_for_a_table_are_those_that_one_makes_by_hand(table_run) -> None:
    run, _ = table_run
    fed = run.onnx_inputs(ROWS)
    assert fed.keys() == FED.keys()
    for name, column in FED.items():
        if name == "code":  # any number that is no category
            column = np.array([2.0, np.nan, np.inf, np.inf])
        if column.dtype == object:
            assert fed[name].tolist() == column.tolist()
        else:
            assert np.allclose(fed[name], column, rtol=1e-12, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("x", np.inf),
        ("column outputs", np.nan),
        ("released", -np.inf),
        ("grade", 7.0),
        ("grade", np.nan),
        ("day", np.inf),
        ("day", -9.2e18),  # what a missing date is in whole days
        ("b", np.nan),
        ("b", 2.0),
        ("table/1", 0.5),
    ],
)
def test_a_record_that_the_schema_refuses_gets_no_answer(name, cell, table_run) -> None:
    file = table_run[0].folder / "m.onnx"
    fed = {n: column.copy() for n, column in FED.items()}
    fed[name][1] = cell
    usual, found = answers(file, FED), answers(file, fed)
    for before, after in zip(usual, found, strict=True):
        assert np.isnan(after[1]).all()
        assert np.array_equal(np.delete(before, 1, 0), np.delete(after, 1, 0))


@pytest.mark.parametrize("blank", ["", "na", "NaN", "NULL", "Null"])
def test_blank_texts_are_missing_as_in_a_file(blank, table_run) -> None:
    run, _ = table_run
    fed = FED | {"c": np.array([blank] * 4, object)}
    table = ROWS | {"c": [blank] * 4}
    assert np.allclose(answers(run.folder / "m.onnx", fed)[0], run.outputs(table), atol=1e-5)


def test_columns_in_which_nothing_is_refused(tmp_path) -> None:
    schema = Schema((Categorical("c", ("a", "b"), missing=True), Categorical("y", ("u", "v"))), "y")
    table = {"c": ["a", "b", "", "else"], "y": ["u", "v", "u", "v"]}
    records = tacit.Records(schema.inputs(table), schema.targets(table), 2, public_size=4)
    run = trained(tacit.models.mlp((4,), 2), records)
    tacit.save_run(run, tmp_path, records, schema=schema)
    saved = tacit.load_run(tmp_path)
    saved.export_onnx(tmp_path / "m.onnx")
    _, chances = answers(tmp_path / "m.onnx", {"c": np.array(table["c"], object)})
    assert np.allclose(chances, saved.predict_proba(table), atol=1e-5)


def test_a_graph_that_answers_otherwise_is_not_kept(table_run, monkeypatch) -> None:
    run, _ = table_run
    scaled = onnx_table._Builder._scaled
    monkeypatch.setattr(
        onnx_table._Builder, "_scaled", lambda self, values, by: scaled(self, values, 1.01 * by)
    )
    with pytest.raises(ValueError, match="onnxruntime differs from PyTorch"):
        run.export_onnx(run.folder / "other.onnx")
    assert not (run.folder / "other.onnx").exists()


@pytest.mark.parametrize("mirror", [False, True])
def test_scattering_features_are_in_the_graph(mirror, tmp_path) -> None:
    images = some((1, 8, 8), count=9, classes=3)
    stage = ScatteringMap((1, 8, 8), order=1, mirror=mirror, groups=17)
    features = tacit.Records(stage(images.inputs), images.targets, 3, public_size=9)
    model = Architecture("linear", (17, 2, 2), 3).build().model
    tacit.save_run(trained(model, features), tmp_path, features, preprocessing=stage)
    result = CliRunner().invoke(app, ["export", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.exception
    facts = json.loads(result.stdout)
    assert facts["inputs"] == ["batch", 1, 8, 8]
    assert stage.describe() in facts["in_the_graph"]
    run = tacit.load_run(tmp_path)
    for count in (1, 7):
        x = images.inputs[:count]
        _, chances = answers(tmp_path / "model.onnx", x.numpy())
        assert np.allclose(chances, run.predict_proba(x), atol=1e-5)
    again = CliRunner().invoke(app, ["export", str(tmp_path)])
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
