"""A run says where δ promises little, and why it took no step."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file
from typer.testing import CliRunner

from tacit.cli import app
from tacit.cli.run_directory import delta_note

FAST = ["--quiet", "--json", "--seed", "0"]


def train(folder: Path, *arguments: str) -> dict:
    result = CliRunner().invoke(app, ["train", *FAST, "--out", str(folder), *arguments])
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout)


def about_no_step(facts: dict) -> list[str]:
    return [note for note in facts["notes"] if note.startswith("no step was taken")]


def test_delta_is_held_against_the_number_of_records(tmp_path: Path) -> None:
    told = ["--steps", "1", "--noise-multiplier", "9", "--delta"]
    loud, quiet = train(tmp_path / "a", *told, "0.01"), train(tmp_path / "b", *told, "1e-4")
    begins = "δ = 0.01 is not below 1/N for N = 1438 records: "
    assert any(note.startswith(begins) for note in loud["notes"])
    assert not any(note.startswith("δ") for note in quiet["notes"])
    assert len(delta_note(0.01, 100)) == 1
    assert delta_note(0.0099, 100) == []


def test_too_little_noise_for_one_step(tmp_path: Path) -> None:
    for name, noise in (("a", "0.1"), ("b", "0")):
        facts = train(tmp_path / name, "--steps", "3", "--noise-multiplier", noise)
        (note,) = about_no_step(facts)
        assert f"noise multiplier {noise} would pass the budget, epsilon 3" in note
        assert "the weights are the initial ones" in note


def test_a_ledger_that_others_have_used_up(tmp_path: Path) -> None:
    book = str(tmp_path / "book")
    told = ["ledger", "create", book, "--epsilon", "3.3", "--delta", "1e-5"]
    assert CliRunner().invoke(app, told).exit_code == 0
    run = ["--ledger", book, "--noise-multiplier", "4"]
    assert about_no_step(train(tmp_path / "a", *run, "--steps", "20", "--epsilon", "2")) == []
    while_there_is_room = [train(tmp_path / f"b{i}", *run, "--steps", "20") for i in range(3)]
    (note,) = about_no_step(while_there_is_room[-1])
    assert "the other runs of the ledger leave no budget" in note


def test_a_run_that_was_complete_already(tmp_path: Path) -> None:
    run = ["--ledger", str(tmp_path / "book"), "--run-name", "r", "--noise-multiplier", "4"]
    first = train(tmp_path / "a", *run, "--steps", "3")
    again = train(tmp_path / "b", *run, "--steps", "3")
    assert about_no_step(first) == []
    assert again["steps"] == 0
    (note,) = about_no_step(again)
    assert "complete on its ledger already" in note
    weights = [load_file(tmp_path / name / "weights.safetensors") for name in "ab"]
    assert any(not weights[0][name].equal(weights[1][name]) for name in weights[0])


def test_a_run_that_had_spent_its_budget_already(tmp_path: Path) -> None:
    run = ["--ledger", str(tmp_path / "book"), "--run-name", "r", "--noise-multiplier", "4"]
    run += ["--epsilon", "1", "--steps", "900"]
    assert 0 < train(tmp_path / "a", *run)["steps"] < 900
    (note,) = about_no_step(train(tmp_path / "b", *run))
    assert "had spent its budget on the ledger already" in note


def test_no_step_that_was_asked_for(tmp_path: Path) -> None:
    (note,) = about_no_step(train(tmp_path, "--steps", "0", "--noise-multiplier", "4"))
    assert "--steps is 0" in note
