"""`tacit certify` on the folder of a run, and on folders that are none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import tacit
from tacit.certificates import certified_accuracy
from tacit.cli import app
from tacit.cli.show_commands import held_out_records

FAST = ["--steps", "8", "--noise-multiplier", "5", "--quiet", "--json", "--seed", "0"]


def command(*arguments: str) -> tuple[int, str, BaseException | None]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.exception


def train(folder: Path, *arguments: str) -> Path:
    code, text, error = command("train", *FAST, "--out", str(folder), *arguments)
    assert code == 0, (text, error)
    return folder


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "linear", "--model", "linear")


def test_a_run_is_certified(linear: Path) -> None:
    code, text, error = command("certify", str(linear), "--radii", "0,8,64", "--json")
    assert code == 0, (text, error)
    facts = json.loads(text)
    assert facts == json.loads((linear / "certificate.json").read_text())
    shares = [row["share"] for row in facts["certified_accuracy"]]
    run = json.loads((linear / "run.json").read_text())
    assert shares[0] == pytest.approx(run["accuracy"], abs=0.01)
    assert shares[0] >= shares[1] > shares[2]
    assert facts["inputs"].startswith("pixels")
    assert (linear / "certified.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_says_the_same(linear: Path) -> None:
    code, text, _ = command("certify", str(linear))
    assert code == 0
    assert "16/255" in text
    assert "written to" in text
    shares = json.loads((linear / "certificate.json").read_text())["certified_accuracy"]
    assert f"{shares[0]['share']:.2%}" in text


def test_it_is_what_python_says(linear: Path) -> None:
    _, test = tacit.load("digits", scale=None)
    model = tacit.load_run(linear).model
    found = certified_accuracy(model, test, [0, 8])
    _, text, _ = command("certify", str(linear), "--radii", "0,8", "--json")
    rows = json.loads(text)["certified_accuracy"]
    assert [row["share"] for row in rows] == list(found.shares)


def test_unit_norm_is_certified_through_the_sphere(tmp_path: Path) -> None:
    folder = train(tmp_path / "x", "--model", "linear", "--unit-norm")
    test, before, _ = held_out_records(tacit.load_run(folder))
    assert [type(scaler).__name__ for scaler in before] == ["UnitNorm"]
    assert test.inputs.max() == 1
    code, text, error = command("certify", str(folder), "--json")
    assert code == 0, error
    shares = [row["share"] for row in json.loads(text)["certified_accuracy"]]
    assert shares[0] > shares[-1] > 0


def test_own_tables_are_certified_as_scaled(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(200, 3), torch.randint(2, (200,))
    x[:, 0] += 4 * y
    lines = [f"{a},{b},{c},{k}" for (a, b, c), k in zip(x.tolist(), y.tolist(), strict=True)]
    (tmp_path / "own.csv").write_text("\n".join(["a,b,c,kind", *lines]))
    about = ["--data", str(tmp_path / "own.csv"), "--target", "kind", "--feature-range", "-10,10"]
    folder = train(tmp_path / "x", *about, "--model", "linear", "--batch-size", "60")
    code, text, error = command("certify", str(folder), "--json")
    assert code == 0, error
    assert json.loads(text)["inputs"].startswith("inputs as the network")


def test_a_network_without_a_constant_is_named(tmp_path: Path) -> None:
    folder = train(tmp_path / "x", "--model", "mlp")
    code, _, error = command("certify", str(folder))
    assert code != 0
    assert "no certificate" in str(error)
    assert "Linear" in str(error)
    assert not (folder / "certificate.json").exists()


@pytest.mark.parametrize("radii", ["", "a,b", "1;2", "-1", "nan", "0,inf"])
def test_radii_that_make_no_sense_are_named(linear: Path, radii: str) -> None:
    code, _, error = command("certify", str(linear), "--radii", radii)
    assert code != 0
    assert "radii" in str(error)


def test_folders_that_are_no_run_are_named(tmp_path: Path, linear: Path) -> None:
    def says(folder: Path) -> str:
        code, _, error = command("certify", str(folder))
        assert code != 0
        return str(error)

    assert "has no run.json" in says(tmp_path / "nowhere")
    (tmp_path / "run.json").write_text("{}")
    assert "an earlier version of Tacit or another program wrote it" in says(tmp_path)
    (tmp_path / "run.json").write_text("not json")
    assert "not made by tacit train" in says(tmp_path)
    facts = json.loads((linear / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(facts))
    assert "has no weights.safetensors" in says(tmp_path)
    for name in ("weights.safetensors", "preprocessing.json"):
        shutil.copy(linear / name, tmp_path)
    facts["model"]["architecture"]["num_outputs"] += 1
    (tmp_path / "run.json").write_text(json.dumps(facts))
    assert "do not fit the network" in says(tmp_path)
    del facts["config"]["settings"]
    facts["model"]["architecture"]["num_outputs"] -= 1
    (tmp_path / "run.json").write_text(json.dumps(facts))
    assert "holds no settings" in says(tmp_path)
    (tmp_path / "preprocessing.json").write_bytes(b"cut short")
    assert "preprocessing.json is not the file that run.json was written with" in says(tmp_path)
