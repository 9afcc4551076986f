"""`check_statement`: whether the figures of a statement.json follow from what it says.

Five checks, each of which names what it finds:

1. *Form.* The object is one that `statement.schema.json` describes.
2. *Digests.* Each section, and the whole, is what its digest is of. This finds slips. Whoever
   changes a statement can compute digests again, so it is no proof of anything.
3. *Figures.* ε, the Rényi cross-check, μ, the advantage, every point of the curve and ε with a
   search are computed again from the events and δ, and must agree to one part in a million.
4. *Files.* The weights beside the statement are those that it names, where they are there.
5. *Ledger*, where one is given: it has the head as one of its rows, its budget is the stated one,
   it stated, when that row was the last, all that the statement says of it, and its run has these
   events.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dp_accounting as dpa

from tacit.accounting.event_fields import event_from_fields, event_to_fields
from tacit.accounting.plan import epsilon_of_event
from tacit.budget import Relation
from tacit.errors import LedgerDamaged
from tacit.ledger.statement import RunCharge, read_statements
from tacit.report.folder_files import digest_of, plain_values
from tacit.report.privacy_statement import (
    ROUNDING,
    SCHEMA_FILE,
    accounted,
    digest,
    figures,
    read_stored,
)
from tacit.report.statement_words import BEFORE, CHEAP_TRIALS, GRADIENTS, NEIGHBOURS, sentence


@dataclass(frozen=True)
class StatementCheck:
    """What was found: `wrong`, sentences that each name a figure; and what was not checked."""

    wrong: tuple[str, ...]
    checked: tuple[str, ...]
    unchecked: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not self.wrong


def check_statement(
    path: str | os.PathLike[str], ledger: str | os.PathLike[str] | None = None
) -> StatementCheck:
    """Compute every figure of a statement.json again, and compare it with its ledger.

    Raises ValueError where there is no statement.

        tacit.report.check_statement("runs/x/statement.json", "runs/x/ledger.sqlite").wrong  # ()
    """
    content = read_stored(path).content
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    # Without its form nothing of it can be computed.
    if malformed := form_of(content, schema):
        return StatementCheck(tuple(malformed), ("form",), ("everything else",))
    checked, unchecked = ["form", "digests", "figures"], []
    wrong = [*changed_sections(content), *wrong_figures(content)]
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    found, missing = _files(folder, content["model_files"])
    wrong += found
    if len(missing) < len(content["model_files"]):
        checked.append("files of the model")
    unchecked += [f"{name}, which is not beside the statement" for name in missing]
    if ledger is not None:
        checked.append("ledger")
        wrong += wrong_ledger(content, ledger)
        if len((content["ledger"] or {"runs": []})["runs"]) > 1:
            unchecked.append("which of the ledger's runs the model came from")
    else:
        unchecked.append("the ledger, since none was given")
    unchecked.append("words: the unit of privacy, how batches were drawn, what is public")
    return StatementCheck(tuple(wrong), tuple(checked), tuple(unchecked))


# ---- form ----------------------------------------------------------------------------------------

_MOST = 1e18  # of any number: beyond it nothing can be computed
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}


def form_of(value: Any, schema: Mapping[str, Any], where: str = "", root: Any = None) -> list[str]:
    """Where the value is not what a JSON schema describes, by the keywords that ours uses."""
    root = root or schema
    if "$ref" in schema:
        return form_of(value, root["$defs"][schema["$ref"].rpartition("/")[2]], where, root)
    name = where or "the statement"
    if "anyOf" in schema:
        tried = [form_of(value, one, where, root) for one in schema["anyOf"]]
        return [] if not all(tried) else min(tried, key=len)
    if "const" in schema and value != schema["const"]:
        return [f"{name} is {value!r}, and not {schema['const']!r}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{name} is {value!r}, and none of {', '.join(map(str, schema['enum']))}"]
    if "type" in schema and not _is(value, schema["type"]):
        return [f"{name} is {type(value).__name__}, and not {schema['type']}"]
    found: list[str] = []
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        found.append(f"{name} is {value!r}, which is not of the form {schema['pattern']}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        least, above = schema.get("minimum", -math.inf), schema.get("exclusiveMinimum", -math.inf)
        most, below = schema.get("maximum", _MOST), schema.get("exclusiveMaximum", math.inf)
        if not (value >= least and value > above and value <= most and value < below):
            found.append(f"{name} is {value!r}, which is out of range")
    if isinstance(value, dict):
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        found += [
            f"{name} has no {key!r}" for key in schema.get("required", ()) if key not in value
        ]
        for key, inner in value.items():
            place = f"{where}.{key}" if where else key
            if key in properties:
                found += form_of(inner, properties[key], place, root)
            elif others is False:
                found.append(f"{name} has {key!r}, which is not known")
            elif isinstance(others, dict):
                found += form_of(inner, others, place, root)
    if isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            found.append(f"{name} has {len(value)} entries, and needs {schema['minItems']}")
        if len(value) > schema.get("maxItems", math.inf):
            return [f"{name} has {len(value)} entries, and may have {schema['maxItems']}"]
        for number, inner in enumerate(value):
            found += form_of(inner, schema.get("items", {}), f"{where}[{number}]", root)
    return found


def _is(value: Any, kinds: str | Sequence[str]) -> bool:
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if isinstance(value, bool):
        return "boolean" in kinds
    return any(isinstance(value, _TYPES[kind]) for kind in kinds)


# ---- digests -------------------------------------------------------------------------------------


def changed_sections(content: Mapping[str, Any]) -> list[str]:
    """Sections that are not what their digest is of."""
    told = content["digests"]
    plain = {k: v for k, v in content.items() if k not in ("digests", "digest")}
    if not isinstance(told, dict):
        return ["digests is no object"]
    named = sorted({*plain, *told})
    wrong = [
        f"{name} was changed: its digest is another"
        for name in named
        if name not in plain or told.get(name) != digest(plain[name])
    ]
    if content["digest"] != digest(plain):
        wrong.append("digest is not that of the statement")
    return wrong


# ---- figures -------------------------------------------------------------------------------------


def wrong_figures(content: Mapping[str, Any]) -> list[str]:
    """Figures that do not follow from the events and δ; and words that do not follow from them."""
    told, delta = content["guarantee"], float(content["guarantee"]["delta"])
    try:
        event, relation = event_from_fields(content["events"])
    except ValueError as error:
        return [f"{error}"]
    under = accounted(content)
    if relation not in (None, under):
        named, sampled = content["relation"]["name"], content["unit"]["sampled"]
        return [
            f"events are accounted under {relation}; for neighbours by {named}, where a {sampled} "
            f"is sampled, they must be under {under}"
        ]
    try:
        found = plain_values(figures(event, under, delta))
    except (ValueError, ArithmeticError, MemoryError) as error:
        return [f"the events cannot be accounted for: {error}"]
    wrong = _differences(told, found, "guarantee")
    wrong += _differences(content["searched"], _of_search(content, delta), "searched")
    sampling = content["sampling"]
    charged, per_event = sampling["charged_steps"], sampling["steps_per_event"]
    count = sum(e["count"] for e in content["events"] if e["what"] == GRADIENTS)
    if count != math.ceil(charged / per_event):
        wrong.append(
            f"sampling.charged_steps is {charged}, and the events count {count} times {per_event}"
        )
    if sampling["steps"] > charged:
        wrong.append(f"sampling.steps is {sampling['steps']}, and {charged} are charged")
    name, unit = content["relation"]["name"], content["unit"]["name"]
    if content["text"] != sentence(float(told["epsilon"]), delta, unit, name):
        wrong.append("text does not say what the figures do")
    if content["relation"]["neighbours"] != NEIGHBOURS[name]:
        wrong.append("relation.neighbours does not say what relation.name does")
    return wrong


def _of_search(content: Mapping[str, Any], delta: float) -> dict[str, Any]:
    """ε of the trials alone and of the final run alone, where trials are among the events."""
    if content["searched"]["method"] != CHEAP_TRIALS:
        # Trials that cost nothing, or are in the one event of a selection.
        selected = any(e["kind"] == "best_of_repeated_runs" for e in content["events"])
        free = content["searched"]["recorded"] and not selected
        return {"epsilon_of_search": 0.0} if free else {}
    parts = {"epsilon_of_search": BEFORE, "epsilon_of_final_run": GRADIENTS}
    found = {}
    for name, what in parts.items():
        event, _ = event_from_fields([e for e in content["events"] if e["what"] == what])
        found[name] = epsilon_of_event(event, delta, accounted(content))
    return plain_values(found | {"epsilon_uncharged": found["epsilon_of_final_run"]})


def _differences(told: Any, found: Any, where: str, by: str = "by the events") -> list[str]:
    """Leaves of `found` that `told` does not have, up to rounding; what else is told stands."""
    if isinstance(found, dict):
        if not isinstance(told, dict):
            return [f"{where} is no object"]
        return [
            text
            for key, inner in found.items()
            for text in _differences(told.get(key), inner, f"{where}.{key}", by)
        ]
    if isinstance(found, list):
        if not isinstance(told, list) or len(told) != len(found):
            return [f"{where} has not {len(found)} entries, as {by}"]
        return [
            text
            for number, (one, other) in enumerate(zip(told, found, strict=True))
            for text in _differences(one, other, f"{where}[{number}]", by)
        ]
    numbers = (int, float)
    if isinstance(told, numbers) and isinstance(found, numbers):
        same = math.isclose(told, found, rel_tol=ROUNDING, abs_tol=1e-15)
    else:
        same = told == found
    return [] if same else [f"{where} is {told!r}, and {by} it is {found!r}"]


# ---- files and ledger ----------------------------------------------------------------------------


def _files(folder: Path, named: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Files that are not those that the statement names, and those that are not there."""
    wrong, missing = [], []
    for name, told in named.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            wrong.append(f"model_files names {name!r}, which is not a file beside the statement")
            continue
        places = [folder / name, folder / Path(name).name]  # beside a model that was given away
        place = next((file for file in places if file.is_file()), None)
        if place is None:
            missing.append(name)
        elif digest_of(place) != told:
            wrong.append(f"model_files.{name} is not the file that the statement is of")
    return wrong, missing


def wrong_ledger(content: Mapping[str, Any], ledger: str | os.PathLike[str]) -> list[str]:
    """Where the ledger's file does not say what the statement says of it."""
    told = content["ledger"]
    if told is None:
        return ["ledger: the statement names none, so it is not known to be of this one"]
    try:
        now, then = read_statements(ledger, told["head"])
    except LedgerDamaged as error:
        return [f"ledger.head: {error}"]
    guarantee, name = content["guarantee"], content["relation"]["name"]
    wrong = []
    if name != now.budget.relation.value:
        found = now.budget.relation.value
        wrong.append(f"relation.name is {name!r}, and {found!r} in the ledger")
    # Rows after the head are of later steps and runs: the ledger is replayed up to that row.
    facts = plain_values(then.facts())
    if extra := sorted(set(told) - set(facts)):
        wrong.append(f"ledger has {extra[0]!r}, which no ledger states")
    wrong += _differences(told, facts, "ledger", "in the ledger")
    if not any(_has_events(run, content) for run in now.runs):
        wrong.append(
            "events: no run of the ledger has these; a run that was continued since has more, and "
            "needs a new statement"
        )
    if guarantee["delta"] != now.budget.delta:
        wrong.append(
            f"guarantee.delta is {guarantee['delta']!r}, and {now.budget.delta!r} in the ledger"
        )
    return wrong


def _has_events(run: RunCharge, content: Mapping[str, Any]) -> bool:
    """Whether these are the events of the run, as charged or as planned."""
    if run.plan is None or run.plan.relation is not Relation(content["relation"]["name"]):
        return False
    told = _sorted([{k: v for k, v in e.items() if k != "what"} for e in content["events"]])
    # Not a plan of no steps, unless nothing else was charged or planned.
    counts = {count for count in (run.steps, run.step_limit) if count} or {0}
    for steps in counts:
        before = event_to_fields(run.plan.event_of_count(0), run.plan.accounted_relation)
        num = run.plan.scheme.num_events(steps)
        taken = dpa.SelfComposedDpEvent(run.plan.step_event, num)
        if told == _sorted([*before, *event_to_fields(taken, run.plan.accounted_relation)]):
            return True
    return False


def _sorted(parts: list[dict[str, Any]]) -> list[str]:
    return sorted(json.dumps(part, sort_keys=True) for part in parts)
