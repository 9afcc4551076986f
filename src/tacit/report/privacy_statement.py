"""The privacy statement of a run: statement.json, which anybody can check.

Its sections are in the order in which NIST SP 800-226 evaluates a guarantee: unit of privacy,
neighbouring relation, ε and δ with the whole trade-off curve, sampling and the accounted events,
what was released, what is public by declaration, what was searched, what is not covered, random
draws and floating point, software, ledger. `statement.schema.json` beside this file describes it.

Every figure under "guarantee" follows from "events" and δ: `statement_check` computes all of them
again, and so can another accountant (`accounting.event_fields` says what the events mean). run.json
holds the same object; pages and model cards take their words from it (`statement_words`).
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dp_accounting as dpa

from tacit.accounting.event_fields import event_to_fields
from tacit.accounting.events import components_of
from tacit.accounting.f_dp import TradeOff, trade_off_of_event
from tacit.accounting.plan import Plan, epsilon_of_event
from tacit.accounting.rdp import epsilon_of_curve, renyi_curve
from tacit.budget import Relation
from tacit.ledger import Ledger
from tacit.ledger.statement import read_statement
from tacit.report.folder_files import STATEMENT, plain_values, write_json
from tacit.report.statement_words import (
    BEFORE,
    GRADIENTS,
    NEIGHBOURS,
    not_covered,
    page_of_words,
    released,
    sentence,
)
from tacit.sampling.repeated_runs import SelectedRun, SelectedRunDpEvent
from tacit.sampling.scheme import Unit, accounted_relation

FORMAT = "tacit privacy statement 1"
SCHEMA_FILE = Path(__file__).with_name("statement.schema.json")
# Two computations of one figure differ by rounding alone.
ROUNDING = 1e-6
SMALLEST_ERROR = 1e-6
# The facts about a search for settings that a statement holds.
SEARCHED = ("method", "trials", "epsilon_of_search", "epsilon_of_final_run", "epsilon_uncharged")
MU = (
    "the least μ for which the Gaussian trade-off curve G_μ is nowhere above the curve of the run, "
    f"where both errors of a test are at least {SMALLEST_ERROR:g}. Beyond, no G_μ is below the "
    "curve of a sampled run: there μ promises nothing, and ε at δ does"
)
METHOD = "privacy loss distributions (PLD), rounded so that ε is never too low"
# Type I errors of the table; the profile has the whole curve.
TYPE_ONE = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5)
_SHARES = tuple(k / 16 for k in range(25))  # of ε, at which the privacy profile is given
_LEAST_DELTA = 1e-12
_LARGER_DELTAS = (1e-4, 1e-3, 1e-2, 0.1)


@dataclass(frozen=True, eq=False)
class PrivacyStatement:
    """The privacy statement of a run. `content` is the JSON object in statement.json.

    Guarantee: M is (ε, δ)-DP under `relation`, and every test for one record has its errors on or
    above the trade-off curve; see `content["guarantee"]`. A digest guards words and figures against
    slips. It is no signature: whoever changes the file can compute it again. `tacit verify`
    computes every figure from the events, and compares the ledger.

        statement = tacit.report.statement("runs/x")
        print(statement.epsilon, statement.markdown())
    """

    content: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"PrivacyStatement(epsilon={self.epsilon:.4g}, delta={self.delta:g})"

    @property
    def epsilon(self) -> float:
        return float(self.content["guarantee"]["epsilon"])

    @property
    def delta(self) -> float:
        return float(self.content["guarantee"]["delta"])

    def markdown(self) -> str:
        """The statement as a page of plain words."""
        return page_of_words(self.content)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write statement.json into `folder`, whole or not at all; return its path."""
        write_json(dict(self.content), Path(folder) / STATEMENT)
        return Path(folder) / STATEMENT


def state(
    facts: Mapping[str, Any],
    ledger: Ledger | str | os.PathLike[str] | None = None,
) -> PrivacyStatement:
    """The statement of a run with these facts (`Run.facts`), and of the ledger it was charged to.

    Facts that not every run has: "public", sentences that say what was declared; "search", what a
    search for settings cost (`tacit.search`); "model" with the digests of its "files";
    "environment".

    Raises ValueError if the facts report another ε than that of their plan.
    """
    plan = plan_of(facts)
    steps = steps_of_epsilon(facts, plan)
    event, relation, delta = plan.event(steps), plan.accounted_relation, float(facts["delta"])
    claimed = float(facts["epsilon"])
    found = figures(event, relation, delta)
    if not _close(claimed, found["epsilon"]):
        raise ValueError(
            f"'epsilon' is {claimed!r}, and {steps:,} steps of the plan have {found['epsilon']!r}; "
            "a run that another one was continued in answers for both: its ledger holds them "
            "(tacit ledger show)"
        )
    content = sections(facts, plan, steps, _ledger_facts(ledger))
    content["guarantee"] |= found | {"epsilon": claimed}
    return sealed(content)


def sealed(content: Mapping[str, Any]) -> PrivacyStatement:
    """The content as plain values, with the digests that are computed from it."""
    plain = {k: v for k, v in plain_values(content).items() if k not in ("digests", "digest")}
    digests = {name: digest(value) for name, value in plain.items()}
    return PrivacyStatement(plain | {"digests": digests, "digest": digest(plain)})


def digest(value: Any) -> str:
    """SHA-256 of the value as JSON with sorted keys, without spaces, in ASCII."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_stored(path: str | os.PathLike[str]) -> PrivacyStatement:
    """The statement in a file, as it is there; nothing is checked but that it is one."""
    file = Path(path)
    if file.is_dir():
        file = file / STATEMENT
    if not file.is_file():
        raise ValueError(f"there is no statement at {file}; give the statement.json of a run")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error}); copy it from its run again") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{file} is not a {FORMAT!r}; give the statement.json of a run")
    return PrivacyStatement(content)


# ---- figures -------------------------------------------------------------------------------------


def figures(event: dpa.DpEvent, relation: Relation, delta: float) -> dict[str, Any]:
    """Every figure of a guarantee, computed from the event that it is for."""
    epsilon = epsilon_of_event(event, delta, relation)
    if any(isinstance(part.event, SelectedRunDpEvent) for part in components_of(event)):
        curve = figures_of_pairs(event, relation, delta)
    else:
        curve = curve_figures(trade_off_of_event(event, relation), epsilon)
    rdp = epsilon_of_curve(renyi_curve(event, relation), delta)
    return {"epsilon": epsilon, "epsilon_rdp": rdp, **curve}


def figures_of_pairs(event: dpa.DpEvent, relation: Relation, delta: float) -> dict[str, Any]:
    """The same for an event that has bounds at each δ and no pair of distributions.

    All pairs (ε, δ) hold at once, so the curve is at least the largest of their lines (above), and
    the advantage at most the smallest (e^ε − 1 + 2δ) / (e^ε + 1). No μ follows from a few pairs.
    """
    deltas = [delta, *(d for d in _LARGER_DELTAS if d > delta)]
    pairs = [(epsilon_of_event(event, d, relation), d) for d in deltas]

    def type_two(alpha: float) -> float:
        lines = [(1 - d - math.exp(e) * alpha, math.exp(-e) * (1 - d - alpha)) for e, d in pairs]
        return max(0.0, *(max(line) for line in lines))

    return {
        "mu": {"value": math.inf, "smallest_error": SMALLEST_ERROR, "definition": MU},
        "advantage": min((math.exp(e) - 1 + 2 * d) / (math.exp(e) + 1) for e, d in pairs),
        "profile": [{"epsilon": e, "delta": d} for e, d in pairs],
        "errors": [{"type_one": alpha, "type_two": type_two(alpha)} for alpha in TYPE_ONE],
    }


def curve_figures(curve: TradeOff, epsilon: float) -> dict[str, Any]:
    """μ, the advantage of the best test, and the curve: as (ε, δ), and as errors of tests.

    Every row of the profile is a guarantee of its own, and all of them together hold the trade-off
    curve from below: f(α) ≥ max(1 − δ − e^ε·α, e^(−ε)·(1 − δ − α), 0)  [Dong 2022, Prop. 2.5].
    """
    shares = _SHARES if 0 < epsilon < math.inf else (0.0,)
    points = [(share * epsilon if share else 0.0) for share in shares]
    profile = [{"epsilon": e, "delta": float(curve.delta(e)[0])} for e in points]
    return {
        "mu": {
            "value": curve.gaussian_mu(SMALLEST_ERROR),
            "smallest_error": SMALLEST_ERROR,
            "definition": MU,
        },
        "advantage": curve.advantage,
        "profile": [row for row in profile if row["delta"] >= _LEAST_DELTA or not row["epsilon"]],
        "errors": [{"type_one": a, "type_two": float(curve(a)[0])} for a in TYPE_ONE],
    }


def _close(one: float, other: float) -> bool:
    return one == other or math.isclose(one, other, rel_tol=ROUNDING)


# ---- sections ------------------------------------------------------------------------------------


def sections(
    facts: Mapping[str, Any], plan: Plan | None, steps: int, ledger: Mapping[str, Any] | None
) -> dict[str, Any]:
    """All that a statement says but what is computed from its events.

    `plan` is None where this process does not know its sampling scheme: then there are no events.
    """
    relation, unit = Relation(facts["relation"]), facts.get("privacy_unit") or "record"
    sets = plan is not None and plan.unit is Unit.MINI_SET
    epsilon, delta = float(facts["epsilon"]), float(facts["delta"])
    renyi = facts.get("epsilon_rdp")
    return {
        "format": FORMAT,
        "text": sentence(epsilon, delta, unit, relation.value),
        "unit": {"name": unit, "sampled": "mini-set" if sets else "record"},
        "relation": {"name": relation.value, "neighbours": NEIGHBOURS[relation.value]},
        "guarantee": {
            "epsilon": epsilon,
            "delta": delta,
            "epsilon_rdp": None if renyi is None else float(renyi),
            "method": METHOD,
        },
        "sampling": {
            "how": facts["sampling"],
            "steps": facts["steps"],
            "planned_steps": facts.get("planned_steps"),
            "charged_steps": steps if plan is not None else facts.get("charged_steps"),
            "steps_per_event": None if plan is None else plan.scheme.steps_within(1),
            "expected_participations": None if plan is None else plan.scheme.epochs(facts["steps"]),
            "amplified": None if plan is None else plan.scheme.amplifies(),
            "stopped": facts["stopped"],
        },
        "events": [] if plan is None else _events(plan, steps),
        "released": released(facts, plan),
        "public": _public(facts),
        "searched": _searched(facts),
        "not_covered": not_covered(facts),
        "randomness": {"seeded": facts["seeded"]},
        "trust_model": "central",
        "software": _software(facts.get("environment") or {}),
        "ledger": ledger,
        "model_files": dict((facts.get("model") or {}).get("files") or {}),
        "notes": _texts(facts["notes"], "'notes'"),
        "date": _date(facts, plan, ledger),
    }


def _events(plan: Plan, steps: int) -> list[dict[str, Any]]:
    """The events of the run, those before its first step first."""
    relation = plan.accounted_relation
    before = event_to_fields(plan.event_of_count(0), relation)
    count = plan.scheme.num_events(steps)
    taken = event_to_fields(dpa.SelfComposedDpEvent(plan.step_event, count), relation)
    return [
        *({"what": BEFORE, **part} for part in before),
        *({"what": GRADIENTS, **part} for part in taken),
    ]


def _date(facts: Mapping[str, Any], plan: Plan | None, ledger: Mapping[str, Any] | None) -> str:
    """Now; of the best of a secret number of runs, its beginning: its length tells the number."""
    if plan is None or not isinstance(plan.scheme, SelectedRun):
        return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    name = (facts.get("search") or {}).get("run")
    runs = ledger["runs"] if ledger else []
    return next((str(run["started"]) for run in runs if run["name"] == name), "not told")


def _searched(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts about a search for settings. Trials that cost anything are among the events."""
    search = facts.get("search")
    if search is not None and not isinstance(search, Mapping):
        raise ValueError(f"'search' is {search!r}; give what tacit.search says of a search")
    found = {name: (search or {}).get(name) for name in SEARCHED}
    return {"recorded": search is not None, **found}


def _software(environment: Mapping[str, Any]) -> dict[str, Any]:
    names = ("tacit", "commit", "dirty", "python", "torch", "numpy", "scipy", "dp_accounting")
    return {name: environment.get(name) for name in (*names, "platform", "gpu")}


def _ledger_facts(ledger: Ledger | str | os.PathLike[str] | None) -> dict[str, Any] | None:
    """What the ledger states of all of its runs, and its head."""
    if ledger is None:
        return None
    stated = ledger.statement() if isinstance(ledger, Ledger) else read_statement(ledger)
    return stated.facts()


def _public(facts: Mapping[str, Any]) -> list[str]:
    """What was declared public, as far as the run knows."""
    found = _texts(facts.get("public") or [], "'public'")
    used = (facts.get("config") or {}).get("used")
    count = used.get("public_records") if isinstance(used, Mapping) else None
    if count:
        found.append(f"{count} records were declared public; ε is not for them")
    return found or ["nothing is recorded of what was declared"]


def _texts(value: object, name: str) -> list[str]:
    if not isinstance(value, Iterable) or isinstance(value, str | Mapping):
        raise ValueError(f"{name} is {value!r}; give a list of sentences")
    return [str(text) for text in value]


def plan_of(facts: Mapping[str, Any]) -> Plan:
    """The plan in a run's facts."""
    stored = facts["plan"] if "plan" in facts else facts["config"]["used"]["plan"]
    return Plan.from_json(stored if isinstance(stored, str) else json.dumps(stored))


def steps_of_epsilon(facts: Mapping[str, Any], plan: Plan) -> int:
    """How many steps the reported ε is of.

    Those that were charged; what an interruption lost is among them. Runs of earlier versions do
    not tell: they answer for the steps that they took if the budget ended them, else for the plan.
    """
    if facts.get("charged_steps") is not None:
        return _whole(facts["charged_steps"], "'charged_steps'")
    taken = _whole(facts["steps"], "'steps'")
    return taken if facts["stopped"] == "budget" or plan.steps is None else plan.steps


def _whole(value: object, name: str) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {value!r}, which is no count")
    return value


def accounted(content: Mapping[str, Any]) -> Relation:
    """The relation between sampled units that a statement's events are to be accounted under."""
    unit = Unit(content["unit"]["sampled"])
    return accounted_relation(Relation(content["relation"]["name"]), unit)
