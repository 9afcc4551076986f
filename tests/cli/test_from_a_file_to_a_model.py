"""The path of a new user: a CSV file, its schema, a run, its page, predictions and ONNX.

Every step is a command, and every command speaks of the same run: one accuracy, one ε.
"""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from typer.testing import CliRunner

import tacit
from tacit.cli import app
from tacit.data import Schema
from tacit.errors import DataError

TRAINING = ["--noise-multiplier", "4", "--steps", "8", "--batch-size", "200", "--quiet"]
BUDGET = ["--epsilon", "5", "--delta", "1e-4"]


def tacit_command(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.exception
    return result.stdout


def people(count: int, seed: int) -> list[list[str]]:
    """Numbers, a category, a date, truth values, blanks; three outcomes that depend on them."""
    r = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        age, member = r.uniform(20, 90), r.random() < 0.5
        score = age / 70 + member + 0.2 * r.normal()
        rows.append(
            [
                "" if r.random() < 0.1 else f"{age:.1f}",
                f"{np.exp(9 + r.normal()):.2f}",
                str(r.choice(["Köln", 'Bad "Neu"', "Aix; Sud", "elsewhere"])),
                f"20{r.integers(10, 25)}-0{r.integers(1, 10)}-01",
                "" if r.random() < 0.05 else ("yes" if member else "no"),
                "größer, ja" if score > 1.3 else "kleiner",  # outcome
                f"{100 + 40 * score:.1f}",  # cost
                "true" if score > 1 else "false",  # late
                "true" if member else "false",  # renewed
            ]
        )
    return rows


HEADER = ["age", "income", "Ort", "since", "member", "outcome, 2024", "cost", "late", "renewed"]


def written(folder: Path, delimiter: str) -> Path:
    """A folder with train.csv and held-out.csv."""
    for name, count, seed in (("train", 600, 0), ("held-out", 150, 1)):
        with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, delimiter=delimiter).writerows([HEADER, *people(count, seed)])
    return folder


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("table"), ",")


def described(table: Path, target: str, leave_out: Sequence[str], public: dict[str, str]) -> Path:
    """The schema that `tacit data describe` writes, edited with a text editor."""
    text = tacit_command("data", "describe", table / "train.csv", "--target", target)
    top, *columns = text.split("[[columns]]\n")
    for i, column in enumerate(columns):
        (name,) = re.findall(r'^name = "(.*)"$', column, flags=re.M)
        if name in MAY_BE_EMPTY:
            assert "missing = false" in column
            columns[i] = column = column.replace("missing = false", "missing = true")
        if name in leave_out:
            columns[i] = f'name = "{name}"\nkind = "ignored"\n\n'
        elif name in public:
            field = public[name].partition(" ")[0]
            lines = [
                public[name] if line.startswith(f"{field} = ") else line
                for line in column.splitlines(keepends=False)
            ]
            assert public[name] in lines
            columns[i] = "\n".join(lines) + "\n"
    path = table / "schema.toml"
    path.write_text("[[columns]]\n".join([top, *columns]), encoding="utf-8")
    return path


MAY_BE_EMPTY = ("age", "member")
PUBLIC = {
    "age": "range = [0, 120]",
    "Ort": """categories = ["Köln", 'Bad "Neu"', "Aix; Sud"]""",
    "since": 'range = ["2010-01-01", "2025-01-01"]',
}


def train(table: Path, schema: Path, out: str, *more: str) -> tuple[Path, dict[str, str]]:
    """The run's folder, and the figures of the table that was printed."""
    folder = table / out
    printed = tacit_command(
        *("train", "--data", table / "train.csv", "--schema", schema, "--public-size", 600),
        *("--test-data", table / "held-out.csv", "--out", folder, *BUDGET, *TRAINING, *more),
    )
    rows = re.findall(r"^│ (\S.*?) +│ (.*?) *│$", printed, flags=re.M)
    return folder, {name: value for name, value in rows if name != "note"}


def predictions(table: Path, folder: Path) -> dict[str, list[str]]:
    out = folder / "predictions.csv"
    tacit_command("predict", folder, table / "held-out.csv", "--out", out)
    with out.open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    return {name: [row[i] for row in rows] for i, name in enumerate(header)}


def held_out(column: str) -> list[str]:
    return [row[HEADER.index(column)] for row in people(150, 1)]


def check_epsilon(folder: Path, printed: dict[str, str]) -> None:
    """The terminal, run.json, the page, the ledger and the loaded run say the same ε."""
    stored = json.loads((folder / "run.json").read_text(encoding="utf-8"))["epsilon"]
    assert float(printed["epsilon (PLD)"]) == pytest.approx(stored, rel=1e-3)
    tacit_command("report", folder)
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert f"ε = {stored}, δ = 0.0001" in page
    in_ledger = json.loads(tacit_command("ledger", "show", folder / "ledger.sqlite", "--json"))
    assert in_ledger["epsilon"] == in_ledger["epsilon_charged"] == stored
    assert tacit.load_run(folder).statement["guarantee"]["epsilon"] == stored


def graph_outputs(table: Path, folder: Path) -> list[np.ndarray]:
    """What onnxruntime computes of the held-out records with the exported file."""
    tacit_command("export", folder, "--format", "onnx", "--out", folder / "model.onnx")
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    columns = {
        "age": np.array([float(cell or "nan") for cell in held_out("age")]),
        "income": np.array(held_out("income"), float),
        "Ort": np.array(held_out("Ort"), object),
        "since": np.array(held_out("since"), "datetime64[D]").astype(float),
        "member": np.array([{"yes": 1.0, "no": 0.0, "": np.nan}[c] for c in held_out("member")]),
    }
    return session.run(None, columns)


@pytest.mark.parametrize("delimiter", [",", ";"])
def test_classes(delimiter: str, tmp_path: Path) -> None:
    table = written(tmp_path, delimiter)
    schema = described(
        table,
        "outcome, 2024",  # a comma of the name's own
        ["cost", "late", "renewed"],
        {**PUBLIC, "outcome, 2024": 'categories = ["kleiner", "größer, ja"]'},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of blanks, for which the schema provides
        folder, printed = train(table, schema, "classes")
    given = predictions(table, folder)
    right = np.mean(np.array(given["prediction"]) == held_out("outcome, 2024"))
    assert printed["accuracy (held out)"] == f"{right:.2%}"
    assert right > 0.7
    check_epsilon(folder, printed)
    assert f"{right:.2%}" in (folder / "report.html").read_text(encoding="utf-8")
    _, probabilities = graph_outputs(table, folder)
    columns = [given["probability kleiner"], given["probability größer, ja"]]
    assert np.allclose(probabilities.T, np.array(columns, dtype=float), atol=1e-5)

    other, _ = train(table, schema, "classes-again", "--lr", "0.5")
    out = table / "pages" / "both.html"
    tacit_command("compare", folder, other, "--out", out)
    page = out.read_text(encoding="utf-8")
    assert "classes-again" in page
    assert f"{right:.2%}" in page


def test_a_blank_that_the_schema_does_not_allow(table: Path, tmp_path: Path) -> None:
    schema = described(table, "cost", ["outcome, 2024", "late", "renewed"], {
        **PUBLIC, "cost": "range = [50, 250]"})  # fmt: skip
    strict = tmp_path / "strict.toml"
    strict.write_text(schema.read_text().replace("missing = true", "missing = false"))
    given = ("--data", table / "train.csv", "--schema", strict, "--out", tmp_path / "run")
    result = CliRunner().invoke(app, ["train", *map(str, given)])
    assert isinstance(result.exception, DataError)
    assert "has an empty cell in column 'age'" in str(result.exception)
    assert 'write missing = true below name = "age" in the schema' in str(result.exception)
    assert not (tmp_path / "run").exists()


def test_numbers(table: Path) -> None:
    schema = described(
        table,
        "cost",
        ["outcome, 2024", "late", "renewed"],
        {**PUBLIC, "cost": "range = [50, 250]"},
    )
    folder, printed = train(table, schema, "numbers", "--lr", "0.5")
    predicted = np.array(predictions(table, folder)["prediction"], dtype=float)
    error = np.sqrt(np.mean((predicted - np.array(held_out("cost"), dtype=float)) ** 2))
    assert float(printed["RMSE (held out)"]) == pytest.approx(error, rel=1e-3)
    check_epsilon(folder, printed)
    (values,) = graph_outputs(table, folder)
    assert np.allclose(values.ravel(), predicted, rtol=1e-4)


def test_several_labels(table: Path) -> None:
    schema = described(table, "late, renewed", ["outcome, 2024", "cost"], PUBLIC)
    folder, printed = train(table, schema, "labels")
    given = predictions(table, folder)
    right = [
        (np.array(given[name]) == "1") == (np.array(held_out(name)) == "true")
        for name in ("late", "renewed")
    ]
    assert printed["accuracy (held out)"] == f"{np.mean(right):.2%}"
    check_epsilon(folder, printed)
    _, probabilities = graph_outputs(table, folder)
    columns = [given["probability late"], given["probability renewed"]]
    assert np.allclose(probabilities.T, np.array(columns, dtype=float), atol=1e-5)


def test_as_a_process(table: Path) -> None:
    """Standard output holds the schema alone; a mistake is one line of standard error."""
    command = [sys.executable, "-m", "tacit", "data", "describe", str(table / "train.csv")]
    done = subprocess.run(
        [*command, "--target", "cost"], capture_output=True, check=True, encoding="utf-8"
    )
    assert done.stderr == ""
    assert Schema.from_dict(tomllib.loads(done.stdout)).target == ("cost",)
    wrong = subprocess.run(
        [*command, "--target", "costs"], capture_output=True, check=False, encoding="utf-8"
    )
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "did you mean 'cost'?" in wrong.stderr
    assert len(wrong.stderr.splitlines()) == 1


def test_a_run_that_is_not_complete_is_resumed_before_it_is_used(
    table: Path, tmp_path: Path
) -> None:
    (tmp_path / "checkpoint.safetensors").touch()
    for command in (["predict", tmp_path, table / "held-out.csv"], ["report", tmp_path]):
        result = CliRunner().invoke(app, [str(word) for word in command])
        assert f"resume it with: tacit train --resume {tmp_path}" in str(result.exception)
