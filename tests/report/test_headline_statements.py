"""Recorded headlines have statements that hold, with Tacit and without; changed ones do not."""

from __future__ import annotations

import copy
import json
import runpy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tacit.report.privacy_statement import PrivacyStatement, sealed
from tacit.report.statement_check import changed_sections, wrong_figures

ROOT = Path(__file__).parents[2]
# Not imported by name: another package may be called benchmarks.
MADE = runpy.run_path(str(ROOT / "benchmarks" / "headline_statements.py"))
BY_NAME = {headline.name: headline for headline in MADE["HEADLINES"]}
COMMAND_LINE = "CIFAR-10, command line"


@cache
def made(name: str) -> tuple[PrivacyStatement, float]:
    if name == COMMAND_LINE:
        return MADE["command_line_headline"]()
    return BY_NAME[name].statement(), BY_NAME[name].recorded_epsilon()


@pytest.fixture(scope="module")
def by_dp_accounting() -> Any:
    return runpy.run_path(str(ROOT / "tools" / "verify_statement.py"))["wrong_figures"]


@pytest.mark.parametrize("name", [*BY_NAME, COMMAND_LINE])
def test_the_statement_of_a_headline_holds_and_a_changed_digit_does_not(
    name: str, by_dp_accounting: Any
) -> None:
    statement, recorded = made(name)
    assert statement.epsilon == pytest.approx(recorded, rel=2e-4)  # by an earlier accountant
    content = json.loads(json.dumps(statement.content))
    assert changed_sections(content) == wrong_figures(content) == by_dp_accounting(content) == []
    changed = copy.deepcopy(content)
    changed["guarantee"]["epsilon"] = round(content["guarantee"]["epsilon"] - 0.1, 6)
    assert changed_sections(changed)[0].startswith("guarantee was changed")
    changed = dict(sealed(changed).content)
    assert any(text.startswith("guarantee.epsilon") for text in wrong_figures(changed))
    assert any("epsilon" in text for text in by_dp_accounting(changed))


def test_every_headline_of_the_results_page_has_a_statement_or_a_reason() -> None:
    """Each record that the page links to is one that statements, or reasons, are made from."""
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    used = {headline.record.split("/")[0] for headline in BY_NAME.values()}
    reasons = " ".join(MADE["MISSING"].values())
    for line in page.splitlines():
        if line.startswith("[") and "benchmarks/records/" in line:
            record = line.rstrip("/").rpartition("/")[2]
            assert record in used, record
    assert "2026-11-15_clipless_table_7" in reasons
    for text in MADE["MISSING"].values():
        assert "no noise multiplier" in text
