"""The accounting commands: golden values as JSON, help with examples, mistakes named."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from tacit.cli import app, main


def answer(*arguments: str) -> dict:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout)


def test_epsilon() -> None:
    facts = answer(
        "epsilon", "--noise-multiplier", "1.54", "--sampling-rate", "0.02048",
        "--steps", "1465", "--delta", "1e-5",
    )  # fmt: skip
    assert facts["epsilon"] == pytest.approx(2.387, rel=5e-3)
    assert facts["epsilon_rdp"] == pytest.approx(2.61, rel=5e-3)


def test_noise() -> None:
    facts = answer(
        "noise", "--epsilon", "3", "--delta", "1e-5", "--sampling-rate", "0.02048",
        "--steps", "1465",
    )  # fmt: skip
    assert facts["noise_multiplier"] == pytest.approx(1.3215, rel=1e-3)
    assert facts["epsilon"] <= 3


def test_fixed_size_is_replace_one() -> None:
    facts = answer(
        "epsilon", "--sampling", "fixed-size", "--population", "54000", "--batch-size", "64",
        "--steps", "42188", "--delta", "1e-5", "--noise-multiplier", str(2.5 / 8**0.5),
    )  # fmt: skip
    assert facts["epsilon"] == pytest.approx(2.083, rel=5e-3)
    assert facts["relation"] == "replace-one"


def test_no_noise_is_infinite_and_still_json() -> None:
    facts = answer(
        "epsilon", "--noise-multiplier", "0", "--sampling-rate", "0.1", "--steps", "1",
        "--delta", "1e-5",
    )  # fmt: skip
    assert facts["epsilon"] == "inf"


@pytest.mark.parametrize("command", ["train", "epsilon", "noise", "trade-off", "data", "ledger"])
def test_help_shows_an_example(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"tacit {command}" in " ".join(result.stdout.split())


def test_data_lists_and_describes() -> None:
    assert "cifar10" in answer("data")["datasets"]
    facts = answer("data", "digits")
    assert (facts["train_records"], facts["shape"], facts["classes"]) == (1438, "1×8×8", 10)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["epsilon", "--noise-multiplier", "1", "--steps", "1", "--delta", "1e-5"],
            "sampling-rate",
        ),
        (
            ["noise", "--epsilon", "1", "--delta", "0", "--sampling-rate", "0.1", "--steps", "1"],
            "--delta is 0",
        ),
        (
            ["noise", "--epsilon", "1", "--delta", "1e-5", "--sampling-rate", "2", "--steps", "1"],
            "--sampling-rate is 2",
        ),
        (["ledger", "show", "nothing.sqlite"], "no ledger"),
    ],
)
def test_a_mistake_is_one_line_on_standard_error(
    arguments: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["tacit", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert says in said
    assert "Traceback" not in said
