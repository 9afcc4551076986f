"""What a page says about privacy: the promise in plain words, its curves, and what it leaves out.

Every number is the ledger's or the accountant's: nothing is computed here but positions of points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.special import ndtr

from tacit.accounting.composition import COARSE, FINE, Grid
from tacit.accounting.f_dp import TradeOff, trade_off
from tacit.accounting.plan import Plan
from tacit.budget import Relation
from tacit.report.charts import (
    ChartAxis,
    ChartData,
    Mark,
    Markup,
    Series,
    joined,
    line_chart,
    percent,
    plain,
    tag,
)
from tacit.report.page_shell import warning
from tacit.report.saved_facts import SavedFacts
from tacit.sampling.scheme import Unit
from tacit.training.run import ENDED_EARLY

# Type I errors in the table of a trade-off curve; the drawing has more points.
TYPE_ONE = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5)
_DRAWN = [0.0, *(float(ndtr(x)) for x in np.linspace(-4, 4, 121)), 1.0]
# Other plans around the run's own, as multiples of its steps and of its noise multiplier.
_STEPS = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0)
_NOISE = tuple(2 ** (k / 6) for k in range(-6, 7))
# Where the coarse grid is this much too high at the run's own plan, few plans are drawn finely.
_TOO_COARSE = 1.02
_MOST_DRAWN = 200.0  # an ε beyond is no privacy, and takes long to account for


def curve_of(run: SavedFacts) -> TradeOff | None:
    """The trade-off curve of what the run answers for; None where that is not its plan.

    The curve of a plan that ε is not of would promise more than the run does.
    """
    if run.plan is None or not run.is_of_its_plan:
        return None
    plan = run.plan
    return trade_off(
        plan.noise_multiplier,
        plan.scheme,
        run.answers_for,
        relation=plan.relation,
        unit=plan.unit,
        prelude=plan.prelude,
    )


def disagreement(run: SavedFacts) -> Markup | None:
    """A warning where run.json's ε is not that of its plan, or cannot be computed again."""
    computed = run.computed_epsilon
    if computed is None:
        words = f"ε could not be computed again: {run.no_plan}. The curves are left out."
        return warning("Not checked", words)
    if run.is_of_its_plan:
        return None
    words = (
        f"run.json reports ε = {run.epsilon!r}, and {run.answers_for:,} steps of its plan have "
        f"ε = {computed!r}. A run that resumes another answers for the steps of both: its ledger "
        "holds them (tacit ledger show). Otherwise run.json was changed. The trade-off "
        "curve is left out, since it would be that of the plan alone."
    )
    return warning("ε does not match the plan", words)


# ---- the statement -------------------------------------------------------------------------------


def statement(run: SavedFacts, curve: TradeOff | None) -> Markup:
    """Unit, relation, ε, δ, what they mean, sampling, and what was released before training."""
    rows = [
        ("What is protected", _unit(run)),
        ("Against whom", _against(run)),
        ("ε and δ", _promise(run)),
    ]
    if curve is not None:
        rows.append(("What a test can learn", _tests(run, curve)))
    rows += [
        ("How batches were drawn", _sampling(run)),
        ("Noise", _noise(run)),
        ("Before training", _prelude(run)),
        ("Accounting", _accounting(run)),
    ]
    if run.ledger is not None:
        rows.append(("The ledger", _ledger(run.ledger)))
    items = [(tag("dt", name), tag("dd", joined(tag("p", p) for p in words)))
             for name, words in rows]  # fmt: skip
    return tag("dl", joined(part for item in items for part in item), class_="facts")


def _unit(run: SavedFacts) -> list[object]:
    words: list[object] = [
        "One record of the training data: one row of its table, one image. A person with several "
        "records has a weaker promise."
    ]
    if run.privacy_unit != "record":
        words = [f"One record of the training data, which is one {run.privacy_unit}."]
    if run.plan is not None and run.plan.unit is Unit.MINI_SET:
        words.append(
            "Records were dealt into fixed mini-sets, and the bound is on what a whole set adds. "
            "So it holds for each record of a set."
        )
    return words


def _against(run: SavedFacts) -> list[object]:
    if run.relation is Relation.ADD_OR_REMOVE_ONE:
        neighbours = "the same data with one record added or removed"
    else:
        neighbours = "the same data with one record replaced by any other"
    return [
        f"Neighbouring relation {run.relation}: the run is compared with one on {neighbours}. "
        "The promise holds against somebody who sees every released weight, knows all other "
        "records, and has any amount of time."
    ]


def _promise(run: SavedFacts) -> list[object]:
    exact = tag("code", f"ε = {run.epsilon!r}, δ = {run.delta!r}")
    if not math.isfinite(run.epsilon):
        return [exact, "An infinite ε promises nothing: the run is not private."]
    factor = plain(math.exp(run.epsilon)) if run.epsilon < 700 else "more than 10³⁰⁰"
    with_and_without = "with a record as without it"
    if run.relation is Relation.REPLACE_ONE:
        with_and_without = "with a record as with any other in its place"
    return [
        exact,
        joined(
            [
                "Whatever can be seen of the model is at most e",
                tag("sup", "ε"),
                f" = {factor} times as likely {with_and_without}, plus δ = {plain(run.delta)}, and "
                "the other way round.",
            ]
        ),
    ]


def in_one_sentence(run: SavedFacts, curve: TradeOff) -> str:
    """What the curve promises to one record."""
    question = "whether a given record took part"
    if run.relation is Relation.REPLACE_ONE:
        question = "which of two given records took part"
    return (
        "From even odds, somebody who sees this model and knows all other records is right about "
        f"{question} at most {_rounded_up((1 + curve.advantage) / 2)} of the time. A coin is right "
        "50% of the time."
    )


def _rounded_up(share: float) -> str:
    """A bound from above stays one when it is written with four digits."""
    return percent(math.ceil(1e4 * share) / 1e4)


def _tests(run: SavedFacts, curve: TradeOff) -> list[object]:
    at = 0.05
    found = 1 - float(curve(at)[0])
    return [
        in_one_sentence(run, curve),
        f"A test that raises a false alarm {percent(at)} of the time detects the record at most "
        f"{_rounded_up(found)} of the time.",
    ]


def _sampling(run: SavedFacts) -> list[object]:
    words = f"{run.sampling}; {run.steps:,} steps"
    if run.planned_steps is not None and run.planned_steps != run.steps:
        words += f" of {run.planned_steps:,} that were planned (ended: {run.stopped})"
    if run.plan is None:
        return [f"{words}."]
    epochs = run.plan.scheme.epochs(run.steps)
    more = "Who takes part in a step is drawn from a cryptographic stream, and ε counts on that."
    if not run.plan.scheme.amplifies():
        more = "ε counts on no randomness of the draw."
    return [f"{words}; a record takes part {plain(epochs)} times on average.", more]


def _noise(run: SavedFacts) -> list[object]:
    one = "record"
    if run.plan is not None and run.plan.unit is Unit.MINI_SET:
        one = "mini-set"
    return [
        f"Gaussian, noise multiplier {plain(run.noise_multiplier)}: its standard deviation over "
        f"the most that one {one} can move a step's sum of gradients."
    ]


def _prelude(run: SavedFacts) -> list[object]:
    released = run.plan.prelude if run.plan is not None else ()
    words: list[object] = []
    if released:
        sizes = ", ".join(plain(event.noise_multiplier) for event in released)
        words.append(
            f"{len(released)} Gaussian release{'s' if len(released) > 1 else ''} from the "
            "training records, such as the constants of scaling and category counts, with noise "
            f"multiplier {sizes}. "
            "ε counts this."
        )
    elif run.plan is not None:
        words.append("Nothing was released from the training records before the first step.")
    else:
        words.append("Not known, since the plan could not be read.")
    if run.used("statistics"):
        words.append(str(run.used("statistics")))
    if run.used("public_records"):
        words.append(
            f"{run.used('public_records')} records were declared public; ε is not for them."
        )
    return words


def _accounting(run: SavedFacts) -> list[object]:
    words: list[object] = ["Privacy loss distributions (PLD), rounded so that ε is never too low."]
    if run.epsilon_rdp is not None:
        words.append(f"Cross-check by Rényi DP: ε = {plain(run.epsilon_rdp)}.")
    if ENDED_EARLY in run.notes:
        words.append(
            f"ε is that of all {run.answers_for:,} steps of the plan: when to stop may have been "
            "chosen by looking."
            if run.plan is not None
            else "ε is that of the whole plan."
        )
    elif run.stopped == "budget":
        words.append("The budget ended the run: one more step would have passed it.")
    return words


def _ledger(stated: dict[str, Any]) -> list[object]:
    count = len(stated["runs"])
    runs = "this run alone" if count == 1 else f"{count} runs"
    return [
        f"It held {runs} when this one was saved. Together: ε = {plain(float(stated['epsilon']))} "
        f"of a budget of {plain(float(stated['budget_epsilon']))}, at δ = "
        f"{plain(float(stated['delta']))}.",
        joined(["Its head was ", tag("code", stated["head"]), "; tacit ledger verify --head checks "
                "that the file continues it."]),
    ]  # fmt: skip


# ---- curves --------------------------------------------------------------------------------------


def trade_off_chart(curves: Sequence[tuple[str, TradeOff]]) -> Markup:
    """The least type II error at each type I error, by name."""
    lines = [
        Series(name, _DRAWN, curve(_DRAWN).tolist(), style, markers=False)
        for style, (name, curve) in enumerate(curves)
    ]
    lines.append(Series("a guess: 1 − α", (0.0, 1.0), (1.0, 0.0), None))
    rows = [(plain(at), *(f"{float(curve(at)[0]):.4f}" for _, curve in curves)) for at in TYPE_ONE]
    names = [name for name, _ in curves]
    return line_chart(
        "trade-off",
        "Trade-off curve",
        lines,
        ChartAxis("false alarms (type I error α)", plain, (0.0, 1.0), fixed=True),
        ChartAxis("misses (type II error)", plain, (0.0, 1.0), fixed=True),
        note="Every test has its errors on or above the curve. The nearer the curve is to the "
        "dashed line, the less a test learns.",
        data=ChartData(
            ("type I error α", *(names if len(names) > 1 else ["least type II error"])), rows
        ),
    )


def calibration_charts(run: SavedFacts) -> list[Markup]:
    """ε of other plans around this one: more or fewer steps, more or less noise."""
    if run.plan is None or run.answers_for == 0 or not run.noise_multiplier > 0:
        return []
    plan, answers_for = run.plan, run.answers_for
    own = run.computed_epsilon
    if own is None or own > _MOST_DRAWN:
        return []
    coarse = plan.epsilon(answers_for, run.delta, COARSE) <= _TOO_COARSE * own
    grid, every = (COARSE, 1) if coarse else (FINE, 3)
    steps = sorted({max(1, round(share * answers_for)) for share in _STEPS[::every]})
    noise = [share * run.noise_multiplier for share in _NOISE[::every]]
    by_steps = _drawn([(plan, count) for count in steps], run.delta, grid)
    by_noise = _drawn(
        [(replace(plan, noise_multiplier=z), answers_for) for z in reversed(noise)], run.delta, grid
    )[::-1]
    at_delta = f"ε at δ = {plain(run.delta)}"
    return [
        _calibration(
            "epsilon-steps", "ε against the number of steps", steps, by_steps,
            ChartAxis("steps", _whole, (0.0,)), ChartAxis(at_delta, plain, (0.0,)),
            Mark("this run", answers_for, run.epsilon),
            f"At noise multiplier {plain(run.noise_multiplier)}.",
        ),
        _calibration(
            "epsilon-noise", "ε against the noise multiplier", noise, by_noise,
            ChartAxis("noise multiplier"), ChartAxis(at_delta, plain, (0.0,)),
            Mark("this run", run.noise_multiplier, run.epsilon),
            f"With {answers_for:,} steps.",
        ),
    ]  # fmt: skip


def _drawn(plans: Sequence[tuple[Plan, int]], delta: float, grid: Grid) -> list[float]:
    """ε of plans of growing ε, infinite from the first that is too large to be drawn.

    An ε that is far too large takes long to compute; the next one is never far above the last.
    """
    found: list[float] = []
    for plan, steps in plans:
        too_large = bool(found) and found[-1] > 2 * _MOST_DRAWN
        found.append(math.inf if too_large else plan.epsilon(steps, delta, grid))
    return found


def _whole(value: float) -> str:
    return f"{value:,.0f}" if abs(value - round(value)) < 1e-9 else plain(value)


def _calibration(
    name: str,
    title: str,
    at: Sequence[float],
    epsilons: Sequence[float],
    x: ChartAxis,
    y: ChartAxis,
    mark: Mark,
    words: str,
) -> Markup:
    note = (
        f"{words} Other plans are computed on a coarser grid, and may be a percent or two too high."
    )
    line = Series("other plans", at, epsilons, 0)
    return line_chart(name, title, [line], x, y, marks=[mark], note=note)


# ---- what is not covered -------------------------------------------------------------------------


def not_covered(run: SavedFacts) -> Markup:
    """What ε says nothing about, then the run's own notes."""
    items = [
        "Metrics on held-out records: accuracy, loss, the confusion matrix and certified accuracy "
        "are computed from those records without noise.",
        "The search for settings: if learning rate, clipping or the model were chosen by looking "
        "at other runs on the same records, those runs cost privacy too. Charge all of them to "
        "one ledger (--ledger); its ε then counts them together.",
        "Public choices: data that was declared public, sizes, classes and ranges that were "
        "declared, weights that the model began with.",
        "What is true of a population: a model may reveal what holds for people like you, whether "
        "or not your record was among those it learned from.",
    ]
    if run.seeded:
        items.insert(
            0,
            "This run was seeded. Whoever knows the seed, or sees another run that was drawn from "
            "it, can remove the noise: against them it is not private.",
        )
    listed = tag("ul", joined(tag("li", item) for item in items), class_="plain")
    notes: Markup | None = None
    if run.notes:
        listed_notes = tag("ul", joined(tag("li", note) for note in run.notes), class_="plain")
        notes = joined([tag("h3", "Notes of the run"), listed_notes])
    return joined([listed, notes])
