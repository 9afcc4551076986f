"""What a page is made of: a run's facts, checked and with ε computed again, and its diagnostics."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from tacit.accounting.plan import Plan
from tacit.budget import Relation, require_delta
from tacit.diagnostics.diagnostic import Diagnostic
from tacit.diagnostics.gradient_norms import (
    ClippingAlignment,
    GradientNormHistory,
    whole_norms,
)
from tacit.report.folder_files import STATEMENT, require_file, write_json
from tacit.report.privacy_statement import FORMAT as STATEMENT_FORMAT
from tacit.report.privacy_statement import (
    ROUNDING,
    PrivacyStatement,
    plan_of,
    read_stored,
    sections,
    state,
    steps_of_epsilon,
)
from tacit.report.statement_check import changed_sections
from tacit.sampling.scheme import UnregisteredScheme
from tacit.training.evaluation import Metrics

T = TypeVar("T")

DIAGNOSTICS = "diagnostics.json"


@dataclass(frozen=True)
class SavedFacts:
    """What a page says of a run: the facts of its run.json, all of the type that they must have.

    `plan` is None where it cannot be accounted for here, such as where this process does not know
    its sampling scheme; `no_plan` then says why. `answers_for` is the number of steps that ε is of
    (`steps_of_epsilon`). `metrics` and each entry of `history` hold numbers by name, as
    `Metrics.facts` names them.

    Facts that not every run has: `confusion`, counts as a square list of lists, a row for each
    true class, beside `class_names` (of the facts or of their "model"); `baseline`, metrics by
    name of a model that ignores its inputs, and its "predictor" in words; `task`, a word;
    `certificate`; and `diagnostics`, from the file diagnostics.json. `words` holds the sections of
    a privacy statement that are made from these facts, with the ledger that the stored one names.
    """

    folder: Path
    epsilon: float
    epsilon_rdp: float | None
    delta: float
    relation: Relation
    sampling: str
    noise_multiplier: float
    steps: int
    planned_steps: int | None
    stopped: str
    seeded: bool
    notes: list[str]
    metrics: dict[str, float]
    history: list[dict[str, float]]
    config: dict[str, Any]
    environment: dict[str, Any]
    privacy_unit: str = "record"
    plan: Plan | None = None
    no_plan: str = ""
    answers_for: int = 0
    seconds: float | None = None
    peak_memory_bytes: float | None = None
    task: str | None = None
    baseline: dict[str, float] = field(default_factory=dict)
    predictor: str = "baseline"
    words: dict[str, Any] = field(default_factory=dict)
    certificate: dict[str, Any] | None = None
    confusion: list[list[float]] | None = None
    class_names: list[str] | None = None
    diagnostics: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @cached_property
    def computed_epsilon(self) -> float | None:
        """ε of the plan's steps, computed anew; None where there is no plan."""
        return None if self.plan is None else self.plan.epsilon(self.answers_for, self.delta)

    @property
    def is_of_its_plan(self) -> bool:
        """Whether ε was computed anew and is the one that run.json reports, up to rounding."""
        computed = self.computed_epsilon
        return computed is not None and (
            self.epsilon == computed or math.isclose(self.epsilon, computed, rel_tol=ROUNDING)
        )

    def used(self, name: str) -> Any:
        """What `tacit train` used for a setting; None for runs from Python."""
        used = self.config.get("used")
        return used.get(name) if isinstance(used, dict) else None


def read_facts(folder: str | Path) -> SavedFacts:
    """The facts of the run in `folder`. Raises ValueError, which names what is missing or wrong."""
    folder = Path(folder)
    facts = read_object(folder, "run.json")
    try:
        return _checked(folder, facts)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"{folder}/run.json is damaged, or was not made by tacit: {what}; save the run again"
        ) from error


def stated(folder: Path, facts: dict[str, Any]) -> PrivacyStatement:
    """The privacy statement of a run, checked against its facts and with ε computed again.

    Raises ValueError where run.json reports less than its plan costs, or where the statement was
    changed or is not of these facts.
    """
    content = _object(facts["statement"], "'statement'")
    if content.get("format") != STATEMENT_FORMAT:
        raise ValueError(f"'statement' is not of the format {STATEMENT_FORMAT!r}")
    run = _checked(folder, facts)
    computed = run.computed_epsilon
    if computed is not None and not run.epsilon >= computed * (1 - ROUNDING):
        raise ValueError(
            f"'epsilon' is {run.epsilon:.4g}, and {run.answers_for:,} steps of its plan have "
            f"epsilon {computed:.4g}"
        )
    if (wrong := changed_sections(content)) or (wrong := other_facts(content, run)):
        raise ValueError(f"'statement' was changed, or is not of this run: {'; '.join(wrong)}")
    if (folder / STATEMENT).exists() and read_stored(folder).content != content:
        raise ValueError(f"{STATEMENT} is not the statement in run.json")
    return PrivacyStatement(content)


def statement(folder: str | os.PathLike[str]) -> PrivacyStatement:
    """The privacy statement of the run in `folder`, checked against run.json.

    Of a run that was saved without one it is made from run.json, and names no ledger. Raises
    ValueError where it was changed, or is not of the run.

        print(tacit.report.statement("runs/x").markdown())
    """
    folder = Path(folder)
    facts = read_object(folder, "run.json")
    read_facts(folder)  # every fact is of the type that it must have
    try:
        stored = facts.get("statement")
        made_here = isinstance(stored, dict) and stored.get("format") == STATEMENT_FORMAT
        return stated(folder, facts) if made_here else state(facts)
    except (KeyError, TypeError, ValueError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{folder}/run.json has no privacy statement: {what}") from error


def other_facts(content: Mapping[str, Any], run: SavedFacts) -> list[str]:
    """Where a statement says something else than the facts of the run."""
    guarantee = _object(content["guarantee"], "'guarantee'")
    found = {
        "epsilon": (_number(guarantee["epsilon"], "'epsilon' of 'statement'"), run.epsilon),
        "delta": (_number(guarantee["delta"], "'delta' of 'statement'"), run.delta),
        "relation": (content["relation"]["name"], run.relation.value),
        "unit": (content["unit"]["name"], run.privacy_unit),
        "steps": (content["sampling"]["steps"], run.steps),
        "seeded": (content["randomness"]["seeded"], run.seeded),
    }
    return [f"{n} is {a!r}, and {b!r} in the facts" for n, (a, b) in found.items() if a != b]


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of a run's folder."""
    require_file(folder, name)
    try:
        facts = json.loads((folder / name).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{folder}/{name} is not JSON ({error}); it is damaged, or was not made by tacit"
        ) from error
    if not isinstance(facts, dict):
        raise ValueError(f"{folder}/{name} holds no JSON object; it was not made by tacit")
    return facts


def _checked(folder: Path, facts: dict[str, Any]) -> SavedFacts:
    def read(name: str, check: Callable[[Any, str], T]) -> T:
        return check(facts[name], repr(name))

    def optional(name: str, check: Callable[[Any, str], T]) -> T | None:
        return None if facts.get(name) is None else read(name, check)

    plan, no_plan = None, ""
    try:
        plan = plan_of(facts)
    except UnregisteredScheme as error:
        no_plan = str(error)
    relation = Relation(read("relation", _text))
    if plan is not None and plan.relation is not relation:
        raise ValueError(f"'relation' is {relation}, and that of 'plan' is {plan.relation}")
    delta, epsilon = read("delta", _number), read("epsilon", _number)
    require_delta(delta)
    if plan is not None and (no_plan := _too_much(plan, steps_of_epsilon(facts, plan), delta)):
        plan = None
    if not epsilon >= 0:
        raise ValueError(f"'epsilon' is {epsilon}, which is below 0")
    confusion = optional("confusion", _square)
    of_model = optional("model", _object) or {}
    names = facts.get("class_names") or of_model.get("class_names")
    class_names = None if names is None else _texts(names, "'class_names'")
    baseline = optional("baseline", _object) or {}
    ledger = (optional("statement", _object) or {}).get("ledger")
    if confusion and class_names and len(class_names) != len(confusion):
        raise ValueError(f"{len(class_names)} 'class_names', and {len(confusion)} in 'confusion'")
    answers_for = 0 if plan is None else steps_of_epsilon(facts, plan)
    return SavedFacts(
        folder=folder,
        epsilon=epsilon,
        epsilon_rdp=optional("epsilon_rdp", _number),
        delta=delta,
        relation=relation,
        sampling=read("sampling", _text),
        noise_multiplier=read("noise_multiplier", _number),
        steps=read("steps", _count),
        planned_steps=optional("planned_steps", _count),
        stopped=read("stopped", _text),
        seeded=read("seeded", _flag),
        privacy_unit=optional("privacy_unit", _text) or "record",
        notes=read("notes", _texts),
        answers_for=answers_for,
        metrics=_metrics(facts),
        history=[_evaluation(point) for point in read("history", _list)],
        config=read("config", _object),
        environment=optional("environment", _object) or {},
        plan=plan,
        no_plan=no_plan,
        seconds=optional("seconds", _number),
        peak_memory_bytes=optional("peak_memory_bytes", _number),
        task=optional("task", _text),
        baseline=_numbers(baseline),
        predictor=_text(baseline.get("predictor", "baseline"), "'predictor'"),
        words=sections(facts, plan, answers_for, None if ledger is None else _ledger(ledger)),
        certificate=optional("certificate", _certificate),
        confusion=confusion or None,
        class_names=class_names,
        diagnostics=_diagnostics(folder),
    )


# Far past any use, where accounting by PLD takes minutes.
_MOST_EPSILON, _MOST_STEPS = 1000.0, 10**7


def _too_much(plan: Plan, steps: int, delta: float) -> str:
    """Why a plan is not accounted for anew; empty if it is. Rényi DP is quick for every plan."""
    if max(steps, plan.steps or 0) > _MOST_STEPS:
        return f"its plan has more than {_MOST_STEPS:,} steps"
    try:
        bound = plan.epsilon_rdp(max(steps, plan.steps or 0), delta)
    except OverflowError:
        return "its noise is out of the accountant's range"
    return "" if bound <= _MOST_EPSILON else f"by Rényi DP it is above {_MOST_EPSILON:g}"


def _metrics(facts: dict[str, Any]) -> dict[str, float]:
    """A run's own metrics; they stand among its other facts, before them."""
    named = [f.name for f in fields(Metrics) if f.type == "float | None"]
    return {k: _number(facts[k], repr(k)) for k in named if facts.get(k) is not None}


def _evaluation(point: object) -> dict[str, float]:
    values = _object(point, "an entry of 'history'")
    for name in ("step", "epsilon"):
        _number(values[name], f"{name!r} of 'history'")
    return _numbers(values)


def _numbers(values: object) -> dict[str, float]:
    """The entries that are numbers."""
    entries = _object(values, "an object of metrics")
    numbers = (int, float)
    return {
        name: _number(value, repr(name))
        for name, value in entries.items()
        if (isinstance(value, numbers) and not isinstance(value, bool))
        or value in ("inf", "-inf", "nan")
    }


def _certificate(value: object, name: str) -> dict[str, Any]:
    found = _object(value, name)
    rows = _list(found["certified_accuracy"], "'certified_accuracy'")
    points = [_object(row, "a row of 'certified_accuracy'") for row in rows]
    for row in points:
        for key in ("radius", "share"):
            _number(row[key], repr(key))
    _number(found["unit"], "'unit'")
    return found


def _ledger(value: object) -> dict[str, Any]:
    found = _object(value, "'ledger'")
    for key in ("epsilon", "budget_epsilon", "delta"):
        _number(found[key], repr(key))
    _text(found["head"], "'head'")
    _list(found["runs"], "'runs'")
    return found


def _square(value: object, name: str) -> list[list[float]]:
    rows = [_list(row, f"a row of {name}") for row in _list(value, name)]
    if any(len(row) != len(rows) for row in rows):
        raise ValueError(f"{name} is not a square list of lists")
    counts = [[_number(count, f"a count of {name}") for count in row] for row in rows]
    if not all(0 <= count < math.inf for row in counts for count in row):
        raise ValueError(f"{name} holds a count below 0, or one that is not finite")
    return counts


def _diagnostics(folder: Path) -> list[dict[str, Any]]:
    """The measurements that `save_diagnostics` wrote; none if there is no such file."""
    if not (folder / DIAGNOSTICS).exists():
        return []
    stored = read_object(folder, DIAGNOSTICS)
    found = [_object(m, "a measurement") for m in _list(stored["measurements"], "'measurements'")]
    for one in found:
        for key in ("name", "notice", "quantity"):
            _text(one[key], repr(key))
        for point in _list(one["points"], "'points'"):
            for key in ("step", "least", "median", "largest"):
                _number(_object(point, "a point")[key], repr(key))
            if point.get("clipped") is not None:
                _number(point["clipped"], "'clipped'")
    return found


def save_diagnostics(
    folder: str | os.PathLike[str], *measured: Diagnostic[Any], max_norm: float | None = None
) -> Path:
    """Write what was measured during a run beside it, for its page. **Not private.**

    The file diagnostics.json holds the least, median and largest gradient norm of single records
    (`GradientNormHistory`) or cosine of batches (`ClippingAlignment`) at each measurement. With
    `max_norm`, the constant of flat per-sample clipping, also the share of norms above it. Where
    training records were read, no ε covers the file: delete it before the folder is given away.

        tacit.report.save_diagnostics("runs/x", norms, max_norm=1.0)
    """
    target = Path(folder)
    if not target.is_dir():
        raise ValueError(f"there is no folder {target}; save the run first: tacit.save_run")
    rows = [_measurement(one, max_norm) for one in measured]
    notices = "; ".join(sorted({one.notice for one in measured}))
    write_json({"notice": notices, "measurements": rows}, target / DIAGNOSTICS)
    return target / DIAGNOSTICS


def _measurement(one: Diagnostic[Any], max_norm: float | None) -> dict[str, Any]:
    norms = isinstance(one, GradientNormHistory)
    if not norms and not isinstance(one, ClippingAlignment):
        raise ValueError(
            f"a page shows no {type(one).__name__}; give a GradientNormHistory or a "
            "ClippingAlignment, and plot the others with their plot()"
        )
    points = []
    for point in one.points:
        values: Tensor = whole_norms(point.value) if norms else point.value.nan_to_num(0.0)
        clipped = (
            None if max_norm is None or not norms else float((values > max_norm).double().mean())
        )
        points.append(
            {
                "step": point.step,
                "least": float(values.min()),
                "median": float(values.median()),
                "largest": float(values.max()),
                "clipped": clipped,
            }
        )
    return {
        "name": type(one).__name__,
        "notice": one.notice,
        "private": one.private,
        "quantity": "gradient norm of one record" if norms else "cosine of clipped and full sum",
        "max_norm": max_norm if norms else None,
        "points": points,
    }


# ---- types ---------------------------------------------------------------------------------------


def _number(value: object, name: str) -> float:
    if isinstance(value, str) and value in ("inf", "-inf", "nan"):  # JSON has no such numbers
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {_short(value)}, which is no number")
    return float(value)


def _count(value: object, name: str) -> int:
    if type(value) is not int or not 0 <= value < 2**53:
        raise TypeError(f"{name} is {_short(value)}, which is no whole number from 0")
    return value


def _flag(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {_short(value)}, and must be true or false")
    return value


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {_short(value)}, which is no text")
    return value


def _list(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{name} is {_short(value)}, which is no list")
    return value


def _texts(value: object, name: str) -> list[str]:
    return [_text(item, f"an entry of {name}") for item in _list(value, name)]


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{name} is {_short(value)}, which is no JSON object")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
