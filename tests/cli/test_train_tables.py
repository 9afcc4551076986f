"""`tacit train --data`: a table as it is, with a schema or scaled by the default recipe."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import tacit
from tacit.accounting.pld import gaussian_epsilon
from tacit.budget import Relation
from tacit.cli import app
from tacit.cli.build_data import run_data, usual_range_noise
from tacit.cli.settings import TrainSettings
from tacit.data import ColumnRanges, MergedCategories, Schema, load_preprocessing

FAST = ["--noise-multiplier", "8", "--steps", "3", "--batch-size", "100", "--quiet", "--seed", "0"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """500 patients: numbers of three sizes, a category, a date, blanks."""
    r = np.random.default_rng(0)
    lines = ["age;income;city;since;ill"]
    for _ in range(500):
        ill = r.random() < 0.5
        age = "" if r.random() < 0.1 else f"{40 + 20 * ill + 5 * r.normal():.1f}"
        income = f"{np.exp(10 + r.normal()):.2f}"
        city = r.choice(["Paris", "Rome", "Oslo"])
        lines.append(f"{age};{income};{city};20{r.integers(10, 25)}-01-01;{'yes' if ill else 'no'}")
    (tmp_path / "own.csv").write_text("\n".join(lines))
    return tmp_path


SCHEMA = """\
format = 1
target = "ill"
[[columns]]
name = "age"
kind = "numeric"
range = [0, 100]
missing = true
[[columns]]
name = "income"
kind = "numeric"
range = "release"
[[columns]]
name = "city"
kind = "categorical"
categories = ["Paris", "Rome"]
[[columns]]
name = "since"
kind = "date"
range = ["2000-01-01", "2030-01-01"]
[[columns]]
name = "ill"
kind = "boolean"
"""


def train(folder: Path, *more: str, schema: str | None = SCHEMA, out: str = "run"):
    command = ["train", "--data", str(folder / "own.csv"), "--out", str(folder / out), *FAST]
    if schema is not None:
        (folder / "schema.toml").write_text(schema)
        command += ["--schema", str(folder / "schema.toml")]
    return CliRunner().invoke(app, [*command, *more])


def facts(folder: Path, out: str = "run") -> dict:
    return json.loads((folder / out / "run.json").read_text())


def test_a_mixed_table(folder: Path) -> None:
    result = train(folder)
    assert result.exit_code == 0, result.exception
    stored = facts(folder)
    z = usual_range_noise(3.0, 1e-5)
    assert stored["plan"]["prelude"] == [z]  # charged before it was drawn
    assert f"multiplier {z:g}" in " ".join(stored["notes"])
    assert "is charged" in " ".join(stored["notes"])
    assert "not declared" not in " ".join(stored["notes"])
    (stage,) = load_preprocessing(folder / "run").stages
    assert isinstance(stage, ColumnRanges)
    assert stage.entries.tolist() == [2]
    inputs = stage(Schema.read(folder / "schema.toml").inputs(folder / "own.csv"))
    assert inputs.shape == (500, 7)
    assert inputs.abs().max() <= 1
    assert inputs[:, 2].std() > 0.1


def test_the_rows_that_were_held_out_are_told(folder: Path) -> None:
    file = folder / "held_out.csv"
    result = train(folder, "--held-out", str(file))
    assert "held_out.csv lists the rows that were held out; it is for you alone" in result.stdout
    header, *rows = file.read_text().split()
    assert header == "row"
    rows = list(map(int, rows))
    assert rows == sorted(set(rows))
    assert 60 < len(rows) < 140
    table = pd.read_csv(folder / "own.csv", sep=";", dtype=str, keep_default_na=False)
    found = tacit.load_run(folder / "run").predict(table.iloc[rows])
    assert np.mean(found == np.where(table.ill == "yes", "true", "false")[rows]) == pytest.approx(
        facts(folder)["accuracy"]
    )
    assert not list((folder / "run").glob("held_out*"))  # a folder is given to others
    # What the guarantee compares: a training record, and another that falls to training too.
    lines = (folder / "own.csv").read_text().splitlines()
    target = next(i for i in range(500) if i not in rows)
    for age in range(99):
        changed = [*lines]
        changed[target + 1] = f"{age};1.00;Rome;2020-01-01;no"
        (folder / "own.csv").write_text("\n".join(changed))
        out = f"again-{age}"
        assert train(folder, "--held-out", str(file), out=out).exit_code == 0
        again = list(map(int, file.read_text().split()[1:]))
        if target not in again:
            break
    assert again == rows


def test_named_held_out_files_need_no_list(folder: Path) -> None:
    assert train(folder, "--test-data", str(folder / "own.csv")).exit_code != 0
    lines = (folder / "own.csv").read_text().splitlines()
    (folder / "test.csv").write_text("\n".join([lines[0], *lines[400:]]))
    (folder / "own.csv").write_text("\n".join(lines[:400]))
    named = ("--test-data", str(folder / "test.csv"))
    assert train(folder, *named, "--held-out", str(folder / "rows.csv")).exit_code != 0
    result = train(folder, *named)
    assert result.exit_code == 0, result.exception


def test_declared_ranges_cost_nothing(folder: Path) -> None:
    result = train(folder, schema=SCHEMA.replace('"release"', "[0, 100000]"))
    assert result.exit_code == 0, result.exception
    assert facts(folder)["plan"]["prelude"] == []
    again = train(
        folder, "--range-noise", "5", schema=SCHEMA.replace('"release"', "[0, 9]"), out="b"
    )
    assert "no column of this run has a range" in str(again.exception)


def test_statistics_may_be_released_too(folder: Path) -> None:
    result = train(folder, "--scale-noise", "20", "--range-noise", "20")
    assert result.exit_code == 0, result.exception
    assert facts(folder)["plan"]["prelude"] == [20, 20]
    assert len(load_preprocessing(folder / "run").stages) == 2


def test_rare_categories_are_merged_by_counts_that_are_charged(folder: Path) -> None:
    rows = (folder / "own.csv").read_text().splitlines()
    rows[3] = rows[3].replace("Paris", "Rome").replace("Oslo", "Rome")
    rows[1:3] = [row.replace("Paris", "Ulm").replace("Rome", "Ulm") for row in rows[1:3]]
    (folder / "own.csv").write_text("\n".join(rows))
    schema = SCHEMA.replace('["Paris", "Rome"]', '["Paris", "Rome", "Oslo", "Ulm"]')
    plain = train(folder, schema=schema, out="plain")
    assert plain.exit_code == 0, plain.exception
    result = train(folder, "--category-noise", "3", "--rare-below", "40", schema=schema)
    assert result.exit_code == 0, result.exception
    stored, ranges = facts(folder), usual_range_noise(3.0, 1e-5)
    assert stored["plan"]["prelude"] == [ranges, 3.0]
    assert stored["epsilon"] > facts(folder, "plain")["epsilon"]
    assert stored["statement"]["guarantee"]["epsilon"] == stored["epsilon"]
    told = [note for note in stored["notes"] if "1 of 4 categories" in note]
    assert len(told) == 1
    assert "its event is charged" in told[0]
    _, merged = load_preprocessing(folder / "run").stages
    assert isinstance(merged, MergedCategories)
    run = tacit.load_run(folder / "run")
    ulm = run.feature_names.index("city=Ulm")
    assert merged.entries.tolist() == [ulm]
    one = {"age": [50.0], "income": [2e4], "since": ["2015-01-01"]}
    ours, others = (run.outputs({**one, "city": [name]}) for name in ("Ulm", "elsewhere"))
    assert torch.equal(ours, others)  # one input for both
    assert CliRunner().invoke(app, ["report", str(folder / "run")]).exit_code == 0
    page = (folder / "run" / "report.html").read_text()
    assert "2 Gaussian releases from the training records" in page
    assert "1 of 4 categories" in page
    book = CliRunner().invoke(app, ["ledger", "show", str(folder / "run/ledger.sqlite"), "--json"])
    assert json.loads(book.stdout)["epsilon"] == stored["epsilon"]


@pytest.mark.parametrize(
    ("more", "schema", "words"),
    [
        (["--category-noise", "3"], None, "goes with --schema"),
        (["--rare-below", "3"], SCHEMA, "--rare-below goes with --category-noise"),
        (["--category-noise", "0"], SCHEMA, "give a finite number from 0.001"),
        (["--category-noise", "3", "--unit-norm"], SCHEMA.replace('"release"', "[0, 1]"), "before"),
        (
            ["--category-noise", "3", "--groups", "1", "--blocks", "layer", "--relation",
             "replace-one", "--sampling", "fixed-size"],
            SCHEMA.replace('"release"', "[0, 1]"),
            "public records would not be scaled",
        ),
        (
            ["--category-noise", "3"],
            SCHEMA.replace('"categorical"\ncategories = ["Paris", "Rome"]', '"ignored"'),
            "no categorical column",
        ),
    ],
)  # fmt: skip
def test_counts_that_cannot_be_released(folder: Path, more, schema, words) -> None:
    target = ["--target", "ill"] if schema is None else []
    result = train(folder, *more, *target, schema=schema)
    assert isinstance(result.exception, ValueError)
    assert words in str(result.exception)
    assert not (folder / "run").exists()


def test_a_release_is_made_once(folder: Path) -> None:
    more = ("--ledger", str(folder / "book.sqlite"), "--run-name", "r")
    assert train(folder, *more, out="a").exit_code == 0
    again = train(folder, *more, out="b")
    assert "column ranges" in str(again.exception)


def test_ranges_that_noise_would_drown_are_warned_about(folder: Path) -> None:
    result = train(folder, "--range-noise", "500")
    assert result.exit_code == 0, result.exception
    assert "released ranges may be far off" in result.stderr
    assert "released ranges may be far off" in " ".join(facts(folder)["notes"])


def numbers(folder: Path, size: int = 500) -> None:
    r = np.random.default_rng(1)
    table = np.stack([r.random(size), r.random(size), r.integers(0, 2, size)], axis=1)
    rows = [f"{1e-3 * (a + 3 * y)},{1e5 * b},{y:g}" for a, b, y in table]
    (folder / "own.csv").write_text("\n".join(["small,large,y", *rows]))


def test_a_table_without_a_range_is_scaled_column_by_column(folder: Path) -> None:
    numbers(folder)
    result = train(folder, "--target", "y", schema=None)
    assert result.exit_code == 0, result.exception
    stored = facts(folder)
    assert stored["plan"]["prelude"] == [usual_range_noise(3.0, 1e-5)]
    assert "not scaled" not in " ".join(stored["notes"])
    (stage,) = load_preprocessing(folder / "run").stages
    assert 0.002 < stage.upper[0] < 0.02
    assert 5e4 < stage.upper[1] < 3e5


@pytest.mark.parametrize(
    ("more", "size", "why"),
    [
        (["--range-noise", "0"], 500, "--range-noise is 0"),
        ([], 20, "16 records are too few for 2 columns"),
        (["--unit-norm"], 500, "--unit-norm would come before"),
    ],
)
def test_what_stays_unscaled_is_warned_about(folder: Path, more, size: int, why: str) -> None:
    numbers(folder, size)
    size_of = ["--public-size", str(size), "--batch-size", "5"]
    result = train(folder, "--target", "y", *size_of, *more, schema=None)
    assert result.exit_code == 0, result.exception
    (line,) = [line for line in result.stderr.splitlines() if "unscaled" in line]
    assert why in line
    stored = facts(folder)
    assert stored["plan"]["prelude"] == []
    assert any("inputs of --data are unscaled" in note for note in stored["notes"])


def test_images_of_ones_own_are_warned_about_too(folder: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (60, 1, 8, 8))
    np.savez(folder / "own.npz", X=pixels, y=np.arange(60) % 2)
    command = ["train", "--data", str(folder / "own.npz"), "--target", "y", *FAST]
    result = CliRunner().invoke(app, [*command, "--out", str(folder / "a"), "--batch-size", "9"])
    assert result.exit_code == 0, result.exception
    assert "inputs of --data are unscaled" in result.stderr
    declared = ["--out", str(folder / "b"), "--batch-size", "9", "--feature-range", "0,255"]
    assert "unscaled" not in CliRunner().invoke(app, [*command, *declared]).stderr


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--unit-norm"], "--unit-norm would come before the ranges"),
        (["--range-noise", "0"], "--range-noise is 0; declare"),
        (["--classes", "a,b"], "--classes is a,b and --schema"),
        (["--feature-range", "0,1"], "--feature-range is 0,1 and --schema"),
        (["--target", "nothing"], "no column 'nothing', which is to be the target"),
        (
            ["--query", "batch-clip", "--relation", "replace-one", "--statistics", "public"],
            "public rec",
        ),
    ],
)
def test_what_does_not_go_together(folder: Path, more, says: str) -> None:
    result = train(folder, *more)
    assert says in str(result.exception)
    assert not (folder / "run" / "run.json").exists()


@pytest.mark.parametrize(
    ("target", "task", "dtype"),
    [("ill", "classification", torch.int64), ("age", "regression", torch.float32)],
)
def test_what_the_rest_of_a_run_is_told(folder: Path, target: str, task: str, dtype) -> None:
    lines = (folder / "own.csv").read_text().splitlines()
    (folder / "own.csv").write_text("\n".join(line for line in lines if line[0] != ";"))
    (folder / "schema.toml").write_text(SCHEMA.replace("missing = true", ""))
    settings = TrainSettings(
        data=folder / "own.csv", schema=folder / "schema.toml", target=target, public_size=500
    )
    data = run_data(settings, Relation.ADD_OR_REMOVE_ONE, torch.device("cpu"))
    assert data.task == task
    assert data.schema is not None
    assert data.schema.target == (target,)
    assert data.private.targets.dtype == dtype
    assert data.private.feature_names == data.schema.feature_names
    assert (data.private.num_classes is None) == (task == "regression")


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-6), (3.0, 1e-5), (100.0, 1e-3)])
def test_the_usual_noise_takes_a_tenth_of_the_budget(epsilon: float, delta: float) -> None:
    z = usual_range_noise(epsilon, delta)
    assert gaussian_epsilon(z * 0.1**0.5, delta) == pytest.approx(epsilon, rel=0.02)


def test_the_page_about_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its table, its commands and its schema, as a reader would use them."""
    page = (Path(__file__).parents[2] / "docs" / "tables.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    table = next(text for language, text in blocks if language == "python")
    schema = next(text for language, text in blocks if language == "toml")
    describe, fit = (text.split() for language, text in blocks if language == "bash")
    monkeypatch.chdir(tmp_path)
    exec(table, {})
    described = CliRunner().invoke(app, describe[1 : describe.index(">")])
    Path("schema.toml").write_text(described.stdout)
    names = [column.name for column in Schema.read("schema.toml").columns]
    incomplete = CliRunner().invoke(app, fit[1:])
    assert "no categories for 'patient', 'ward'; fill in" in str(incomplete.exception)
    Path("schema.toml").write_text(schema)
    assert names == [column.name for column in Schema.read("schema.toml").columns]
    result = CliRunner().invoke(app, fit[1:])
    assert result.exit_code == 0, result.exception
    stored = json.loads(Path("runs/patients/run.json").read_text())
    assert stored["accuracy"] > 0.75
    assert stored["epsilon"] <= 3
