"""`tacit train` for every task and route, and `tacit predict` with what it leaves."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import tacit
from tacit.cli import app
from tacit.data import Schema

TARGETS = {
    "regression": '"price"', "multi-label": '["old", "dear"]', "classification": '"kind"',
}  # fmt: skip
COLUMNS = {
    "age": 'kind = "numeric"\nrange = [18, 90]',
    "price": 'kind = "numeric"\nrange = [0, 100000]',
    "old": 'kind = "boolean"',
    "dear": 'kind = "boolean"',
    "kind": 'kind = "categorical"\ncategories = ["young", "middle", "old"]',
}
FAST = ["--steps", "4", "--noise-multiplier", "3", "--epsilon", "60", "--delta", "1e-3", "--quiet"]


def invoke(*arguments: object):
    return CliRunner().invoke(app, list(map(str, arguments)))


def facts_of(*arguments: object) -> dict:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    generator = np.random.default_rng(0)
    for name, count in (("train", 240), ("test", 80)):
        age = generator.uniform(18, 90, count).round(1)
        price = 1000 * age + generator.normal(0, 2000, count)
        kind = np.array(["young", "middle", "old"])[np.digitize(age, [40, 65])]
        rows = zip(age, price, age > 60, price > 40_000, kind, strict=True)
        lines = [f"{a},{p:.0f},{str(o).lower()},{str(d).lower()},{k}" for a, p, o, d, k in rows]
        (folder / f"{name}.csv").write_text("\n".join([",".join(COLUMNS), *lines]) + "\n")
    for task, target in TARGETS.items():
        parts = [f"format = 1\ntarget = {target}\n"]
        for column, about in COLUMNS.items():
            used = column == "age" or f'"{column}"' in target
            about = about if used else 'kind = "ignored"'
            parts.append(f'[[columns]]\nname = "{column}"\n{about}\n')
        (folder / f"{task}.toml").write_text("\n".join(parts))
    return folder


ROUTES = {
    "clip": [],
    "clipless": [],
    "batch-clip": ["--relation", "replace-one", "--mini-set-size", "4", "--mini-sets", "10"],
}


@pytest.mark.parametrize("query", ROUTES)
@pytest.mark.parametrize("task", TARGETS)
def test_every_task_trains_on_every_route_and_predicts(task, query, tables, tmp_path) -> None:
    arguments = ["--data", tables / "train.csv", "--test-data", tables / "test.csv"]
    arguments += ["--schema", tables / f"{task}.toml", "--public-size", 240, "--out", tmp_path]
    facts = facts_of("train", *FAST, *arguments, "--query", query, *ROUTES[query])
    assert facts["task"] == task
    assert facts["model"]["task"] == task
    test = tables / "test.csv"
    told = facts_of("predict", tmp_path, test, "--out", tmp_path / "predictions.csv")
    assert told["records"] == 80
    with (tmp_path / "predictions.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    with test.open() as stream:
        truth = list(csv.DictReader(stream))
    schema = Schema.read(tables / f"{task}.toml")
    found = tacit.load_run(tmp_path).predict(test)
    if task == "regression":
        predicted = np.array([float(row["prediction"]) for row in rows])
        assert np.array_equal(predicted, found)
        errors = predicted - np.array([float(row["price"]) for row in truth])
        root = np.sqrt(np.mean(errors**2))
        assert facts["root_mean_squared_error"] == pytest.approx(root, rel=1e-4)
        assert facts["baseline"]["root_mean_squared_error"] > 5000
        assert facts["history"][-1]["root_mean_squared_error"] == pytest.approx(root, rel=1e-4)
    elif task == "classification":
        right = [row["prediction"] == true["kind"] for row, true in zip(rows, truth, strict=True)]
        assert np.mean(right) == facts["accuracy"]
        chances = [float(rows[0][f"probability {name}"]) for name in schema.class_names]
        assert sum(chances) == pytest.approx(1)
    else:
        right = [
            (row[name] == "1") == (true[name] == "true")
            for row, true in zip(rows, truth, strict=True)
            for name in ("old", "dear")
        ]
        assert np.mean(right) == pytest.approx(facts["accuracy"], abs=1e-12)
        assert 0 < float(rows[0]["probability old"]) < 1


@pytest.mark.parametrize("task", ["multi-label", "regression"])
def test_only_one_decision_can_be_certified(task, tables, tmp_path) -> None:
    data = ["--data", tables / "train.csv", "--schema", tables / f"{task}.toml"]
    facts = facts_of(
        "train", *FAST, *data, "--public-size", 240, "--query", "clipless", "--out", tmp_path
    )
    assert facts["certificate"] is None
    error = invoke("certify", tmp_path).exception
    assert isinstance(error, ValueError)
    assert "one decision per record" in str(error) or "no certified accuracy" in str(error)


def test_a_loss_for_another_task_is_refused(tables, tmp_path) -> None:
    data = ["--data", tables / "train.csv", "--public-size", 240, "--out", tmp_path / "run"]
    for task, loss, words in (
        ("regression", "cross-entropy", "makes it regression; give --loss huber"),
        ("classification", "huber", "is for regression"),
        ("classification", "binary-cross-entropy", "is for two classes, and these records have 3"),
        ("multi-label", "cross-entropy", "give --loss multi-label-cross-entropy"),
        ("classification", "token-cross-entropy", "is for tokens"),
    ):  # fmt: skip
        schema = tables / f"{task}.toml"
        result = invoke("train", *FAST, *data, "--schema", schema, "--loss", loss)
        assert isinstance(result.exception, ValueError), result.output
        assert words in str(result.exception)
        assert not (tmp_path / "run").exists()


def test_two_classes_train_with_one_output(tmp_path) -> None:
    for name, numbers in (("two", range(60)), ("test", range(60, 120))):
        rows = "\n".join(f"{i},{i % 9},{'yes' if i % 9 > 4 else 'no'}" for i in numbers)
        (tmp_path / f"{name}.csv").write_text(f"a,b,y\n{rows}\n")
    data = ["--data", tmp_path / "two.csv", "--target", "y", "--public-size", 60]
    data += ["--feature-range", "0,120", "--test-data", tmp_path / "test.csv"]
    facts = facts_of(
        "train", *FAST, *data, "--loss", "binary-cross-entropy", "--out", tmp_path / "run"
    )
    assert facts["config"]["used"]["num_outputs"] == 1
    run = tacit.load_run(tmp_path / "run")
    found = run.predict(tmp_path / "test.csv")
    assert set(found) <= {"yes", "no"}
    truth = np.array(["yes" if i % 9 > 4 else "no" for i in range(60, 120)])
    assert np.mean(found == truth) == facts["accuracy"]


# ---- tacit predict -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    facts_of("train", *FAST, "--out", folder)
    return folder


def test_predictions_are_printed_or_written(digits, tmp_path) -> None:
    printed = invoke("predict", digits, "--dataset", "digits").stdout.splitlines()
    assert printed[0].startswith("prediction,probability 0,")
    assert len(printed) == 360
    as_json = facts_of("predict", digits, "--dataset", "digits")
    assert as_json["columns"]["prediction"] == [int(row.split(",")[0]) for row in printed[1:]]
    out = tmp_path / "p.npz"
    assert (
        "359 predictions written"
        in invoke("predict", digits, "--dataset", "digits", "--out", out).stdout
    )
    with np.load(out) as arrays:
        assert arrays["prediction"].tolist() == as_json["columns"]["prediction"]
    assert "exists already" in str(
        invoke("predict", digits, "--dataset", "digits", "--out", out).exception
    )


def test_a_mistake_is_named_and_nothing_is_written(digits, tmp_path) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text("a,b\n1,2\n")
    for arguments, words in (
        ([digits], "neither is given"),
        ([digits, bad, "--dataset", "digits"], "both are given"),
        ([digits, bad], "does not name its features"),
        ([tmp_path, bad], "no run.json"),
        ([digits, bad, "--out", tmp_path / "p.xlsx"], "ends in .csv or .npz"),
        ([digits, tmp_path / "nothing.npz"], "nothing.npz"),
        ([digits, "--dataset", "mnist-of-mine"], "mnist-of-mine"),
    ):
        result = invoke("predict", *arguments)
        assert isinstance(result.exception, ValueError), arguments
        assert words in str(result.exception)
    assert [file.name for file in tmp_path.iterdir()] == ["bad.csv"]


def test_the_help_waits_for_nothing() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from tacit.cli import app; "
        "r = CliRunner().invoke(app, ['predict', '--help']); assert r.exit_code == 0; "
        "assert 'torch' not in sys.modules and 'onnx' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
