"""What a page says about privacy: the words of the run's statement, and its curves.

Every number is the ledger's or the accountant's: nothing is computed here but positions of points.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.special import ndtr

from tacit.accounting.composition import COARSE, FINE, Grid
from tacit.accounting.f_dp import TradeOff, trade_off
from tacit.accounting.plan import Plan
from tacit.report.charts import (
    ChartAxis,
    ChartData,
    Mark,
    Markup,
    Series,
    joined,
    line_chart,
    plain,
    tag,
)
from tacit.report.page_shell import warning
from tacit.report.privacy_statement import TYPE_ONE, curve_figures
from tacit.report.saved_facts import SavedFacts
from tacit.report.statement_words import paragraphs
from tacit.sampling.repeated_runs import SelectedRun

_DRAWN = [0.0, *(float(ndtr(x)) for x in np.linspace(-4, 4, 121)), 1.0]
# Other plans around the run's own, as multiples of its steps and of its noise multiplier.
_STEPS = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0)
_NOISE = tuple(2 ** (k / 6) for k in range(-6, 7))
# Where the coarse grid is this much too high at the run's own plan, few plans are drawn finely.
_TOO_COARSE = 1.02
_MOST_DRAWN = 200.0  # an ε beyond is no privacy, and takes long to account for


def curve_of(run: SavedFacts) -> TradeOff | None:
    """The trade-off curve of what the run answers for; None where that is not its plan.

    The curve of a plan that ε is not of would promise more than the run does. The best of repeated
    runs has no curve, only bounds.
    """
    if run.plan is None or not run.is_of_its_plan or isinstance(run.plan.scheme, SelectedRun):
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


def statement(words: Mapping[str, Any]) -> Markup:
    """The sections of a privacy statement, but for what is not covered, as a list."""
    items = [(tag("dt", name), tag("dd", joined(tag("p", p) for p in found)))
             for name, found in paragraphs(words)]  # fmt: skip
    return tag("dl", joined(part for item in items for part in item), class_="facts")


def words_of(run: SavedFacts, curve: TradeOff | None) -> dict[str, Any]:
    """The sections of the run's statement, with the figures of its curve where there is one."""
    if curve is None:
        return run.words
    computed = curve_figures(curve, run.epsilon)
    return run.words | {"guarantee": run.words["guarantee"] | computed}


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
    items = run.words["not_covered"]
    listed = tag("ul", joined(tag("li", item) for item in items), class_="plain")
    notes: Markup | None = None
    if run.notes:
        listed_notes = tag("ul", joined(tag("li", note) for note in run.notes), class_="plain")
        notes = joined([tag("h3", "Notes of the run"), listed_notes])
    return joined([listed, notes])
