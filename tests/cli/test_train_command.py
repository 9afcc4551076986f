"""`tacit train` from end to end, as a newcomer runs it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file as load_weights
from typer.testing import CliRunner

import tacit
from tacit.cli import app
from tacit.ledger.statement import read_statement

FAST = ["--steps", "6", "--epsilon", "3", "--delta", "1e-4", "--quiet"]


def tacit_command(*arguments: str) -> tuple[int, str, BaseException | None]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.exception


def train(folder: Path, *arguments: str) -> dict:
    code, text, error = tacit_command("train", *FAST, "--out", str(folder), "--json", *arguments)
    assert code == 0, (text, error)
    return json.loads(text)


def test_a_run_folder_says_everything(tmp_path: Path) -> None:
    facts = train(tmp_path / "x", "--seed", "0")
    written = json.loads((tmp_path / "x" / "run.json").read_text())
    assert written == facts
    wanted = "accuracy epsilon delta relation sampling noise_multiplier steps seconds seeded config"
    assert set(wanted.split()) <= set(written)
    assert written["epsilon"] <= 3
    assert written["steps"] == 6
    assert written["seeded"] is True
    assert any("not private against" in note for note in written["notes"])
    assert written["config"]["settings"]["training"]["seed"] == 0
    assert (tmp_path / "x" / "progress.png").read_bytes().startswith(b"\x89PNG")
    weights = load_weights(tmp_path / "x" / "weights.safetensors")
    model = tacit.models.default_model((1, 8, 8), 10)
    model.load_state_dict(weights)


def test_the_same_seed_gives_the_same_model_and_no_seed_does_not(tmp_path: Path) -> None:
    accuracy = [train(tmp_path / name, "--seed", "1")["loss"] for name in "ab"]
    free = [train(tmp_path / name)["loss"] for name in "cd"]
    assert accuracy[0] == accuracy[1]
    assert free[0] != free[1]


def test_the_ledger_holds_the_steps_taken(tmp_path: Path) -> None:
    train(tmp_path / "x")
    (run,) = read_statement(tmp_path / "x" / "ledger.sqlite").runs
    assert run.steps == 6
    code, text, _ = tacit_command("ledger", "show", str(tmp_path / "x" / "ledger.sqlite"), "--json")
    assert code == 0
    assert json.loads(text)["runs"][0]["charged_steps"] == 6


def test_a_run_is_not_overwritten_unasked(tmp_path: Path) -> None:
    train(tmp_path / "x")
    code, _, error = tacit_command("train", *FAST, "--out", str(tmp_path / "x"))
    assert code != 0
    for remedy in ("another --out", "--overwrite"):
        assert remedy in str(error)
    train(tmp_path / "y")


def test_noise_given_by_hand_ends_at_the_budget(tmp_path: Path) -> None:
    facts = train(tmp_path / "x", "--noise-multiplier", "4", "--steps", "100", "--epsilon", "1")
    assert facts["stopped"] == "budget"
    assert 0 < facts["steps"] < 100
    assert facts["epsilon"] <= 1


@pytest.mark.parametrize("sampling", ["poisson", "fixed-size", "shuffle"])
@pytest.mark.parametrize("blocks", ["flat", "layer"])
def test_every_sampling_and_block_choice_trains(tmp_path: Path, sampling: str, blocks: str) -> None:
    facts = train(tmp_path / "x", "--sampling", sampling, "--blocks", blocks)
    assert facts["epsilon"] <= 3
    assert facts["relation"] == ("add-or-remove-one" if sampling == "poisson" else "replace-one")
    if sampling == "shuffle":
        assert "without amplification" in facts["sampling"]


def test_two_runs_share_a_ledger_and_a_third_is_refused(tmp_path: Path) -> None:
    book = str(tmp_path / "book.sqlite")
    assert tacit_command("ledger", "create", book, "--epsilon", "5.5", "--delta", "1e-4")[0] == 0
    for name in "ab":
        assert train(tmp_path / name, "--ledger", book)["stopped"] == "plan complete"
    code, text, _ = tacit_command("ledger", "show", book, "--json")
    total = json.loads(text)
    assert total["epsilon"] <= 5.5
    assert "RDP filter" in total["method"]
    assert code == 0
    assert train(tmp_path / "c", "--ledger", book)["steps"] < 6


def test_own_csv(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(400, 3)), rng.integers(2, size=400)
    x[:, 0] += 4 * y
    rows = ["a,b,c,kind"]
    rows += [
        ",".join(f"{v:.4f}" for v in r) + f",{['no', 'yes'][k]}" for r, k in zip(x, y, strict=True)
    ]
    (tmp_path / "own.csv").write_text("\n".join(rows))
    facts = train(
        tmp_path / "x", "--data", str(tmp_path / "own.csv"), "--target", "kind",
        "--feature-range", "-10,10", "--scale-noise", "20", "--batch-size", "150", "--steps", "30",
    )  # fmt: skip
    assert facts["accuracy"] > 0.8
    assert facts["epsilon"] <= 3
    notes = " ".join(facts["notes"])
    assert "treated as public" in notes
    assert "is charged" in notes
    plan = facts["plan"]
    assert plan["prelude"] == [20.0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--dataset", "mnits"], "mnist"),
        (["--data", "no.csv", "--target", "y"], "no file"),
        (["--data", "no.csv"], "--target"),
        (["--epsilon", "-1"], "epsilon"),
        (["--delta", "2"], "delta"),
        (["--batch-size", "99999"], "more than"),
        (["--sampling", "shuffle", "--relation", "add-or-remove-one"], "replace-one"),
        (["--feature-range", "5", "--data", "no.csv", "--target", "y"], "lower,upper"),
        (["--max-norm", "0"], "--max-norm"),
    ],
)
def test_a_wrong_argument_is_named(tmp_path: Path, arguments: list[str], says: str) -> None:
    code, _, error = tacit_command("train", *FAST, "--out", str(tmp_path / "x"), *arguments)
    assert code != 0
    assert says in str(error)
    assert not (tmp_path / "x" / "run.json").exists()
