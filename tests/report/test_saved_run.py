"""A run's folder is a model: whatever was trained predicts the same from its folder alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from own_network import OwnNetwork, Tied
from torch import nn
from typer.testing import CliRunner

import tacit
from tacit.cli import app
from tacit.cli.settings import MODELS
from tacit.data import Boolean, Categorical, Numeric, PublicScaler, Schema
from tacit.data.scaling import Greyscale
from tacit.losses import BinaryCrossEntropy, CrossEntropy, Huber, MultiLabelCrossEntropy, Task
from tacit.models import Architecture

FAST = ["--steps", "2", "--noise-multiplier", "4", "--epsilon", "60", "--delta", "1e-3", "--quiet"]


def some(shape=(3,), count=30, classes=2, **more) -> tacit.Records:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, *shape, generator=generator)
    return tacit.Records(x, torch.arange(count) % classes, classes, public_size=count, **more)


def trained(model, records, loss=None, query=None, **more) -> tacit.Run:
    return tacit.Trainer(
        model, loss or CrossEntropy(), query or tacit.PerSampleClip(1.0),
        tacit.PoissonSampler(records, 0.5, steps=1), torch.optim.SGD(model.parameters(), lr=0.1),
        tacit.Budget(50.0, 1e-3), noise=tacit.Noise(1.0), callbacks=(), **more,
    ).fit()  # fmt: skip


def outputs_of(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(inputs)


def train(folder: Path, *arguments: str) -> dict:
    result = CliRunner().invoke(app, ["train", *FAST, "--json", "--out", str(folder), *arguments])
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout)


# ---- every network, every route ------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_every_registered_network_comes_back(name, tmp_path) -> None:
    shape = {"cifar-cnn": (3, 32, 32), "lenet5": (1, 28, 28), "mnist-cnn": (1, 28, 28)}
    shape = shape.get(name, (1, 12, 12))
    lipschitz = name.startswith("lipschitz-")
    model = Architecture(name, shape, 3, adapted="as-built" if lipschitz else "trainable").build()[
        0
    ]
    records = some(shape, count=6, classes=3)
    run = trained(model, records, query=tacit.Clipless() if lipschitz else None)
    tacit.save_run(run, tmp_path)
    found = tacit.load_run(tmp_path)
    assert torch.equal(found.outputs(records.inputs), outputs_of(model, records.inputs))
    assert found.task is Task.CLASSIFICATION


ROUTES = {
    "twin": ["--query", "clipless", "--model", "convnet"],
    "adaptive": ["--adaptive-quantile", "0.5", "--ema", "0.9"],
    "public statistics": [
        *("--query", "batch-clip", "--model", "convnet", "--statistics", "public"),
        *("--relation", "replace-one"),
    ],
    "released statistics": [
        *("--query", "batch-clip", "--model", "convnet", "--statistics", "released"),
        *("--statistics-noise", "5"),
    ],
    "released scaling": ["--features", "scattering", "--scale-noise", "3", "--model", "linear"],
}


@pytest.mark.parametrize("route", ROUTES)
def test_predictions_have_exactly_the_accuracy_that_was_reported(route, tmp_path) -> None:
    arguments = ROUTES[route]
    if "batch-clip" in arguments:
        arguments = [*arguments, "--mini-set-size", "8", "--mini-sets", "20"]
    facts = train(tmp_path, *arguments)
    _, raw = tacit.load("digits", scale=None)
    found = tacit.load_run(tmp_path)
    assert np.mean(found.predict(raw) == raw.targets.numpy()) == facts["accuracy"]
    chances = found.predict_proba(raw)
    assert chances.shape == (len(raw), 10)
    assert np.allclose(chances.sum(axis=1), 1)
    right = chances[np.arange(len(raw)), raw.targets.numpy()]
    assert -np.log(right).mean() == pytest.approx(facts["log_loss"])


def test_another_process_predicts_the_same(tmp_path) -> None:
    facts = train(tmp_path / "run", "--model", "mlp")
    code = (
        "import tacit; run = tacit.load_run('run'); _, raw = tacit.load('digits', scale=None); "
        "print((run.predict(raw) == raw.targets.numpy()).mean(), run, sep='|')"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert float(told.split("|")[0]) == facts["accuracy"]
    assert "classification" in told
    assert f"epsilon={facts['epsilon']:.4g} at delta=0.001" in told


# ---- what a folder holds -------------------------------------------------------------------------


def strings_in(value):
    if isinstance(value, dict):
        for key, part in value.items():
            yield key
            yield from strings_in(part)
    elif isinstance(value, list):
        for part in value:
            yield from strings_in(part)
    elif isinstance(value, str):
        yield value


def test_no_text_in_a_folder_is_json_again(tmp_path) -> None:
    from safetensors import safe_open

    train(tmp_path, "--query", "clipless", "--features", "scattering", "--scale-noise", "3")
    for file in tmp_path.glob("*.json"):
        for text in strings_in(json.loads(file.read_text())):
            assert not text.lstrip().startswith(("{", '["', "[[")), text
    with safe_open(tmp_path / "weights.safetensors", framework="pt") as weights:
        assert not weights.metadata()


def test_the_statement_and_the_ledgers_head_are_there(tmp_path) -> None:
    facts = train(tmp_path)
    found = tacit.load_run(tmp_path)
    assert found.statement == facts["statement"]
    with tacit.Ledger(tmp_path / "ledger.sqlite") as ledger:
        assert found.statement["ledger"]["head"] == ledger.head
    assert "differentially private" in found.statement["text"]
    assert found.statement == json.loads((tmp_path / "statement.json").read_text("utf-8"))
    assert found.facts["config"]["settings"]["data" if "data" in facts["config"] else "privacy"]


# ---- tasks and inputs ----------------------------------------------------------------------------


def test_names_of_classes_are_what_is_predicted(tmp_path) -> None:
    names = ("cat", "dog")
    records = some(class_names=names, feature_names=("a", "b", "c"))
    model = tacit.models.mlp((3,), 2, hidden=(4,))
    tacit.save_run(trained(model, records), tmp_path, records, preprocessing=PublicScaler(1.0, 2.0))
    found = tacit.load_run(tmp_path)
    x = records.inputs
    expected = np.array(names)[outputs_of(model, (x - 1) / 2).argmax(1)]
    frames = (
        *(x, x.numpy(), x.double().numpy(), x.tolist(), records),
        pd.DataFrame(x.numpy()[:, ::-1], columns=list("cba")),
        pl.DataFrame(
            {"other": ["?"] * len(x), **{n: x[:, i].numpy() for i, n in enumerate("abc")}}
        ),
    )
    for given in frames:
        assert (found.predict(given) == expected).all(), type(given)
    pd.DataFrame(x.numpy(), columns=list("abc")).to_csv(tmp_path / "new.csv", index=False)
    pd.DataFrame(x.numpy(), columns=list("abc")).to_parquet(tmp_path / "new.parquet")
    np.savez(tmp_path / "new.npz", X=x.numpy())
    for file in ("new.csv", "new.parquet", "new.npz"):
        assert (found.predict(tmp_path / file) == expected).all(), file
    assert found.class_names == names
    assert found.feature_names == ("a", "b", "c")


def test_what_is_no_record_of_the_run_is_refused(tmp_path) -> None:
    records = some(feature_names=("a", "b", "c"))
    scaler = PublicScaler(1.0, 2.0)
    model = tacit.models.mlp((3,), 2)
    tacit.save_run(trained(model, records), tmp_path, preprocessing=scaler)
    found = tacit.load_run(tmp_path)
    scaled = some(notes=(scaler.describe(),))
    refused = {
        r"give x\[None\] for a single record": records.inputs[0],
        "a row per record": torch.zeros(4, 5),
        "scaled already": scaled,
        "there is no record": records.inputs[:0],
        "no column 'b'": pd.DataFrame({"a": [1.0], "c": [2.0]}),
        "no file|there is no": tmp_path / "missing.csv",
        r"give \.csv": tmp_path / "table.xlsx",
        "complex": torch.zeros(2, 3, dtype=torch.complex64),
    }
    for words, given in refused.items():
        with pytest.raises(ValueError, match=words):
            found.predict(given)
    with pytest.raises(ValueError, match="device is 'cuda:77'"):
        tacit.load_run(tmp_path, device="cuda:77")


def test_batches_do_not_change_what_is_predicted(tmp_path) -> None:
    records = some(count=17)
    tacit.save_run(trained(tacit.models.mlp((3,), 2), records), tmp_path)
    found = tacit.load_run(tmp_path)
    whole, pieces = found.outputs(records), found.outputs(records, batch_size=4)
    assert torch.allclose(whole, pieces, atol=1e-6)
    assert not whole.requires_grad
    assert not found.model.training


def test_a_stage_that_changes_the_shape_takes_records_as_they_were(tmp_path) -> None:
    raw = torch.rand(20, 3, 8, 8)
    stages = [Greyscale(), PublicScaler(0.5, 0.2)]
    records = tacit.Records(stages[1](Greyscale()(raw)), torch.arange(20) % 2, 2, public_size=20)
    model = tacit.models.mlp((1, 8, 8), 2)
    tacit.save_run(trained(model, records), tmp_path, records, preprocessing=stages)
    found = tacit.load_run(tmp_path)
    assert found.record_shape == (3, 8, 8)
    assert torch.equal(found.outputs(raw), outputs_of(model, records.inputs))


SCHEMAS = {
    "regression": Schema((Numeric("x", range=(0.0, 1.0)), Numeric("y", range=(0.0, 500.0))), "y"),
    "multi-label": Schema(
        (Numeric("x", range=(0.0, 1.0)), Boolean("old"), Boolean("ill")), ("old", "ill")
    ),
    "classification": Schema(
        (Numeric("x", range=(0.0, 1.0)), Categorical("kind", categories=("a", "b", "c"))), "kind"
    ),
}


@pytest.mark.parametrize("task", SCHEMAS)
def test_a_schema_comes_back_and_its_table_is_predicted(task, tmp_path) -> None:
    schema = SCHEMAS[task]
    x = np.linspace(0, 1, 24)
    table = {"x": x, "y": 500 * x, "old": x > 0.5, "ill": x > 0.7, "kind": np.array(list("abc"))[
        (x * 2.99).astype(int)
    ]}  # fmt: skip
    inputs, targets = schema.inputs(table), schema.targets(table)
    outputs, loss = {
        "regression": (1, Huber()),
        "multi-label": (2, MultiLabelCrossEntropy(0.5)),
        "classification": (3, CrossEntropy(0.5)),
    }[task]
    records = tacit.Records(inputs, targets, 3 if outputs == 3 else None, public_size=24)
    model = tacit.models.mlp((1,), outputs)
    run = trained(model, records, loss=loss)
    facts = tacit.save_run(run, tmp_path, records, schema=schema)
    found = tacit.load_run(tmp_path)
    assert found.task == task
    h = outputs_of(model, inputs)
    if task == "regression":
        predicted = found.predict(table)
        assert np.allclose(predicted, 250 * h.squeeze(1).numpy() + 250)
        error = np.sqrt(np.mean((predicted - table["y"]) ** 2))
        assert facts["root_mean_squared_error"] == pytest.approx(error, rel=1e-4)
        with pytest.raises(ValueError, match="no probabilities"):
            found.predict_proba(table)
    elif task == "multi-label":
        assert (found.predict(table) == (h > 0).numpy()).all()
        assert np.allclose(found.predict_proba(table), torch.sigmoid(h.double() / 0.5))
        assert found.class_names == ("old", "ill")
    else:
        assert (found.predict(table) == np.array(list("abc"))[h.argmax(1)]).all()
        assert np.mean(found.predict(table) == table["kind"]) == facts["accuracy"]


def test_one_output_gives_both_probabilities(tmp_path) -> None:
    records = some(class_names=("no", "yes"))
    model = tacit.models.mlp((3,), 1)
    tacit.save_run(trained(model, records, loss=BinaryCrossEntropy(0.5)), tmp_path, records)
    found = tacit.load_run(tmp_path)
    p = torch.sigmoid(outputs_of(model, records.inputs).double() / 0.5).squeeze(1).numpy()
    assert found.task is Task.BINARY
    assert np.allclose(found.predict_proba(records), np.stack([1 - p, p], axis=1))
    assert (found.predict(records) == np.where(p > 0.5, "yes", "no")).all()


def test_without_a_task_there_are_outputs_alone(tmp_path) -> None:
    records = some()

    def own(outputs, targets):
        return (outputs[:, 0] - targets).square().mean()

    model = nn.Linear(3, 2)
    tacit.save_run(trained(model, records, loss=own), tmp_path)
    found = tacit.load_run(tmp_path, model=nn.Linear(3, 2))
    assert torch.equal(found.outputs(records), outputs_of(model, records.inputs))
    with pytest.raises(ValueError, match=r"declares no task.*\.outputs"):
        found.predict(records)


# ---- a module of the user's own ------------------------------------------------------------------


def test_an_own_module_is_imported_only_when_the_caller_says_so(tmp_path) -> None:
    records = some()
    model = OwnNetwork(width=7)
    tacit.save_run(trained(model, records), tmp_path, arguments={"width": 7})
    expected = outputs_of(model, records.inputs)
    with pytest.raises(ValueError, match=r"own_network\.OwnNetwork.*model=.*import_model=True"):
        tacit.load_run(tmp_path)
    for found in (
        tacit.load_run(tmp_path, import_model=True),
        tacit.load_run(tmp_path, model=OwnNetwork(7)),
    ):
        assert torch.equal(found.outputs(records), expected)
    with pytest.raises(ValueError, match="do not fit the network"):
        tacit.load_run(tmp_path, model=OwnNetwork(9))


def test_without_its_arguments_another_network_is_not_taken_for_it(tmp_path) -> None:
    model = OwnNetwork(width=7)
    tacit.save_run(trained(model, some()), tmp_path)
    with pytest.raises(ValueError, match=r"makes another network.*arguments="):
        tacit.load_run(tmp_path, import_model=True)
    with pytest.raises(ValueError, match="does not take"):
        tacit.save_run(
            trained(OwnNetwork(), some()), tmp_path, overwrite=True, arguments={"no_such": 1}
        )


def test_tied_weights_stay_tied(tmp_path) -> None:
    records, model = some(), Tied()
    tacit.save_run(trained(model, records), tmp_path)
    found = tacit.load_run(tmp_path, import_model=True)
    assert torch.equal(found.outputs(records), outputs_of(model, records.inputs))
    assert found.model.second.weight is found.model.first.weight


def test_weights_keep_their_type(tmp_path) -> None:
    records = some()
    records = tacit.Records(records.inputs.double(), records.targets, 2, public_size=30)
    model = tacit.models.mlp((3,), 2).double()
    tacit.save_run(trained(model, records), tmp_path)
    found = tacit.load_run(tmp_path).outputs(records)
    assert found.dtype == torch.float64
    assert torch.equal(found, outputs_of(model, records.inputs))


def test_a_network_that_was_changed_is_not_known_by_its_name(tmp_path) -> None:
    model = tacit.models.mlp((3,), 2)
    model[2] = nn.ReLU()
    tacit.save_run(trained(model, some()), tmp_path)
    with pytest.raises(ValueError, match=r"which a folder cannot hold; give .*model="):
        tacit.load_run(tmp_path)


def test_a_network_of_a_plugin_is_saved_by_its_name(tmp_path) -> None:
    plugin = tmp_path / "own.py"
    plugin.write_text(
        "from torch import nn\nimport tacit\n\n\n"
        "@tacit.models.register_model('test-two-layers')\n"
        "def two_layers(shape, num_outputs, width=6):\n"
        "    layers = nn.Linear(64, width), nn.Linear(width, num_outputs)\n"
        "    return nn.Sequential(nn.Flatten(), *layers)\n"
    )
    folder = tmp_path / "run"
    arguments = ["train", *FAST, "--model", "test-two-layers", "--out", str(folder)]
    result = CliRunner().invoke(app, ["--plugin", str(plugin), *arguments])
    assert result.exit_code == 0, result.exception
    assert tacit.load_run(folder).facts["model"]["architecture"]["name"] == "test-two-layers"
    file = folder / "run.json"
    file.write_text(file.read_text().replace('"test-two-layers"', '"test-three-layers"'))
    with pytest.raises(ValueError, match=r"test-three-layers.*import the module that does"):
        tacit.load_run(folder)
