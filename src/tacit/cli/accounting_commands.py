"""`tacit epsilon`, `tacit noise` and `tacit trade-off`: what a run costs, before or after it."""

from __future__ import annotations

import contextlib
import enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from tacit.budget import Budget, Relation
from tacit.cli.console import JSON, print_facts, print_json
from tacit.cli.schema import FACTOR, NOISE, POSITIVE, SHARE, ZERO_OR_MORE
from tacit.errors import UnsupportedEvent

if TYPE_CHECKING:
    from tacit.accounting import GaussianDpEstimate, Plan, TradeOff
    from tacit.sampling import Scheme

TYPE_ONE_ERRORS = (0.001, 0.01, 0.05, 0.1, 0.5)


class AccountedSampling(enum.StrEnum):
    """The samplings that the command line can account for; not all can be trained with."""

    POISSON = "poisson"
    FIXED_SIZE = "fixed-size"
    SHUFFLE = "shuffle"
    MINI_SETS = "mini-sets"


SAMPLING = typer.Option(
    AccountedSampling.POISSON,
    metavar="NAME",
    help="How batches are drawn: poisson, fixed-size, shuffle or mini-sets. fixed-size and shuffle "
    "need replace-one. mini-sets is batch clipping: each step takes one of ⌈records ÷ batch⌉ fixed "
    "sets, and clips it as a whole.",
)
RATE = typer.Option(None, help="Poisson: probability that a record takes part in a step.")
POPULATION = typer.Option(
    None, "--population", "--records", help="Number of records, where no rate is given."
)
BATCH = typer.Option(None, help="Number of records in a batch (Poisson: expected).")
CAP = typer.Option(
    None, help="Poisson: largest batch, of a larger draw a random subset. Needs --population."
)
STEPS = typer.Option(..., help="Number of steps.")
DELTA = typer.Option(..., help="δ; choose it well below 1 / number of records.")
RELATION = typer.Option(
    None,
    metavar="NAME",
    help="Which datasets are neighbours: add-or-remove-one or replace-one. The noise multiplier is "
    "the noise over the sensitivity under this relation. Default: add-or-remove-one for Poisson "
    "sampling, else replace-one.",
)


def epsilon(
    noise_multiplier: float = typer.Option(
        ..., help="Standard deviation of the noise ÷ sensitivity."
    ),
    sampling_rate: float | None = RATE,
    steps: int = STEPS,
    delta: float = DELTA,
    sampling: AccountedSampling = SAMPLING,
    population: int | None = POPULATION,
    batch_size: int | None = BATCH,
    max_batch_size: int | None = CAP,
    relation: Relation | None = RELATION,
    as_json: bool = JSON,
) -> None:
    """Show the ε of a run.

    It is computed by PLD, which is the guarantee, and by RDP as a cross-check. μ is an estimate by
    the central limit theorem.

    Example: tacit epsilon --noise-multiplier 1.54 --sampling-rate 0.02048 --steps 1465 --delta 1e-5
    """
    SHARE.require("--delta", delta)
    plan = _plan(noise_multiplier, sampling, sampling_rate, population, batch_size, relation, steps)
    plan = _capped(plan, max_batch_size, population)
    more = {"epsilon_rdp": plan.epsilon_rdp(steps, delta)}
    if (estimate := _limit(plan, steps)) is not None:
        more["gaussian_dp_mu_approximate"] = estimate.mu
    print_facts(_facts_of(plan, steps, delta, more), as_json, "privacy of a run")


def noise(
    epsilon: float = typer.Option(..., help="ε to stay within."),
    delta: float = DELTA,
    sampling_rate: float | None = RATE,
    steps: int = STEPS,
    sampling: AccountedSampling = SAMPLING,
    population: int | None = POPULATION,
    batch_size: int | None = BATCH,
    max_batch_size: int | None = CAP,
    relation: Relation | None = RELATION,
    as_json: bool = JSON,
) -> None:
    """Show the smallest noise multiplier that keeps a run within ε, by PLD.

    Example: tacit noise --epsilon 3 --delta 1e-5 --sampling-rate 0.02048 --steps 1465
    """
    from dataclasses import replace

    from tacit.accounting import calibrate

    if steps < 1:
        raise ValueError(f"--steps is {steps}, which needs no noise; give at least 1")
    POSITIVE.require("--epsilon", epsilon)
    SHARE.require("--delta", delta)
    plan = _plan(1.0, sampling, sampling_rate, population, batch_size, relation, steps)
    plan = _capped(plan, max_batch_size, population)
    budget = Budget(epsilon, delta, plan.relation)
    multiplier = calibrate(budget, plan.scheme, steps, unit=plan.unit)
    plan = replace(plan, noise_multiplier=multiplier)
    print_facts(_facts_of(plan, steps, delta), as_json, "noise for a budget")


def trade_off(
    runs: list[Path] | None = typer.Argument(
        None, metavar="RUN", help="Folders of saved runs, instead of the options below."
    ),
    noise_multiplier: float | None = typer.Option(
        None,
        help="Noise standard deviation ÷ sensitivity; with --layers, that of each block.",
    ),
    layers: int = typer.Option(
        1, help="Number L of blocks with noise of their own; together they have σ/√L."
    ),
    sampling_rate: float | None = RATE,
    steps: int | None = typer.Option(None, help="Number of steps."),
    delta: float | None = typer.Option(None, help="δ at which to give ε."),
    sampling: AccountedSampling = SAMPLING,
    population: int | None = POPULATION,
    batch_size: int | None = BATCH,
    relation: Relation | None = RELATION,
    out: Path | None = typer.Option(
        None, help="Picture to write. Default for a saved run: trade_off.png in its folder."
    ),
    as_json: bool = JSON,
) -> None:
    """Show the trade-off curve of a run: the least type II error at each type I error.

    No test for one record can do better. The curve is exact, by PLD. Beside it are ε at δ, the
    advantage of the best test, and μ by the central limit theorem, which is no guarantee.

    Example: tacit trade-off --noise-multiplier 2.5 --layers 8
    --sampling mini-sets --records 54000 --batch-size 64 --steps 42200
    --delta 1e-5 --out curve.png
    """
    from tacit.accounting.f_dp import plot_trade_offs
    from tacit.accounting.gaussian_dp import layerwise_multiplier

    if out is not None and out.is_dir():
        raise ValueError(f"--out is {out}, which is a folder; give a file such as {out}/curve.png")
    if runs:
        given = (noise_multiplier, sampling_rate, steps, delta, population, batch_size, relation)
        if any(value is not None for value in given) or layers != 1:
            raise ValueError(
                "a saved run has its own noise, sampling, steps and delta; "
                "give the folders of runs, or the options, not both"
            )
        if len(runs) > 1 and out is None:
            raise ValueError(f"{len(runs)} runs in one picture; say where it goes with --out")
        curves = [_saved_curve(folder) for folder in runs]
        out = out or runs[0] / "trade_off.png"
    else:
        if noise_multiplier is None or steps is None or delta is None:
            raise ValueError(
                "give the folder of a saved run, or --noise-multiplier, --steps and --delta"
            )
        NOISE.require("--noise-multiplier", noise_multiplier)
        SHARE.require("--delta", delta)
        joint = layerwise_multiplier(noise_multiplier, layers)
        plan = _plan(joint, sampling, sampling_rate, population, batch_size, relation, steps)
        curves = [_curve_of(f"noise multiplier {joint:.4g}, {steps} steps", plan, steps, delta)]
    if out is not None:
        names = [curve.facts["run"] for curve in curves]
        # Two runs may be in folders of one name.
        names = [f"{n} ({i})" if names.count(n) > 1 else n for i, n in enumerate(names, 1)]
        by_name = dict(zip(names, curves, strict=True))
        plot_trade_offs(
            {name: curve.exact for name, curve in by_name.items()},
            out,
            {name: curve.limit for name, curve in by_name.items() if curve.limit},
        )
    if as_json:
        written = None if out is None else str(out)
        print_json({"curves": [curve.facts for curve in curves], "picture": written})
        return
    for curve in curves:
        rows = curve.facts.pop("errors")
        errors = {f"type II error at type I {r['type_one']:g}": r["type_two"] for r in rows}
        print_facts({**curve.facts, **errors}, False, "trade-off of a run")
    if out is not None:
        typer.echo(f"written to {out}")


class RunCurve(NamedTuple):
    """A run's trade-off curve, its limit by the central limit theorem, and the figures to show."""

    exact: TradeOff
    limit: GaussianDpEstimate | None
    facts: dict[str, Any]


def _saved_curve(folder: Path) -> RunCurve:
    from tacit.cli.run_directory import read_plan

    saved = read_plan(folder)
    try:
        curve = _curve_of(folder.name, saved.plan, saved.steps, saved.delta)
    except ArithmeticError as error:
        raise ValueError(
            f"{folder}/run.json holds a plan whose numbers cannot be accounted for ({error}); copy "
            "the file from a backup"
        ) from error
    spent = curve.facts["epsilon"]
    # Rounding differs by far less; resumed runs answer for steps that run.json does not count.
    if abs(spent - saved.epsilon) > 0.01 * saved.epsilon:
        raise ValueError(
            f"{folder}/run.json reports epsilon {saved.epsilon:.4g}, but {saved.steps} steps of "
            f"its plan have {spent:.4g}: the run was continued from another, and its ledger "
            "holds what it answers for; see tacit ledger show"
        )
    return curve


def _curve_of(name: str, plan: Plan, steps: int, delta: float) -> RunCurve:
    from tacit.accounting.f_dp import trade_off

    curve = trade_off(
        plan.noise_multiplier,
        plan.scheme,
        steps,
        relation=plan.relation,
        unit=plan.unit,
        prelude=plan.prelude,
    )
    more = {
        "advantage_of_the_best_test": curve.advantage,
        "gaussian_mu_of_the_curve": curve.gaussian_mu(),
    }
    limit = None if plan.prelude else _limit(plan, steps)
    if limit is not None and limit.approximate:
        more["clt_mu_not_a_guarantee"] = limit.mu
        more["clt_epsilon_not_a_guarantee"] = limit.epsilon(delta)
    facts = {"run": name, **_facts_of(plan, steps, delta, more)}
    facts["errors"] = [{"type_one": a, "type_two": float(curve(a)[0])} for a in TYPE_ONE_ERRORS]
    return RunCurve(curve, limit, facts)


def _plan(
    noise_multiplier: float,
    sampling: AccountedSampling,
    rate: float | None,
    population: int | None,
    batch: int | None,
    relation: Relation | None,
    steps: int,
) -> Plan:
    """The plan that the options describe, under the sampling's usual relation if none is given."""
    from tacit.accounting import Plan
    from tacit.sampling import Unit

    NOISE.require("--noise-multiplier", noise_multiplier)
    FACTOR.require("--sampling-rate", rate)
    ZERO_OR_MORE.require("--steps", steps)
    relation = relation_for(sampling, relation)
    unit = Unit.MINI_SET if sampling is AccountedSampling.MINI_SETS else Unit.RECORD
    return Plan(_scheme(sampling, rate, population, batch), noise_multiplier, relation, steps, unit)


def _capped(plan: Plan, cap: int | None, population: int | None) -> Plan:
    """The plan with a cap on the batch size, if one is given."""
    from dataclasses import replace

    from tacit.sampling import Poisson, TruncatedPoisson

    if cap is None:
        return plan
    if not isinstance(plan.scheme, Poisson) or population is None:
        raise ValueError(
            "--max-batch-size is for Poisson sampling from a known number of records; give "
            "--population and --batch-size, and no other --sampling"
        )
    return replace(plan, scheme=TruncatedPoisson(plan.scheme.rate, cap, population))


def relation_for(sampling: str, given: Relation | None) -> Relation:
    """The relation that is given, else the usual one of the sampling."""
    if given is None:
        poisson = sampling == AccountedSampling.POISSON
        return Relation.ADD_OR_REMOVE_ONE if poisson else Relation.REPLACE_ONE
    needs_replace_one = (AccountedSampling.FIXED_SIZE, AccountedSampling.SHUFFLE)
    if given is Relation.ADD_OR_REMOVE_ONE and sampling in needs_replace_one:
        raise ValueError(
            f"--relation is {given} and --sampling is {sampling}, which is analysed for "
            "replace-one alone; leave --relation out, or give --sampling poisson"
        )
    return given


def _scheme(
    sampling: AccountedSampling, rate: float | None, population: int | None, batch: int | None
) -> Scheme:
    """The scheme that the options describe, or an error that names the missing one."""
    from tacit.sampling import MiniSets, Poisson, ShuffledEpochs, WithoutReplacement

    poisson = sampling is AccountedSampling.POISSON
    if rate is not None:
        if not poisson:
            raise ValueError(f"--sampling-rate is for Poisson sampling, not {sampling}")
        if population is not None or batch is not None:
            raise ValueError("give --sampling-rate, or --population and --batch-size, not both")
        return Poisson(rate)
    if population is None or batch is None:
        needed = "--population and --batch-size"
        raise ValueError(
            f"Poisson sampling needs --sampling-rate, or {needed}"
            if poisson
            else f"{sampling} sampling needs {needed}"
        )
    if not 1 <= batch <= population:
        raise ValueError(
            f"--batch-size is {batch} of {population} records; give at least 1 and at most all"
        )
    num_batches = -(-population // batch)
    if poisson:
        return Poisson(batch / population)
    if sampling is AccountedSampling.FIXED_SIZE:
        return WithoutReplacement(population, batch)
    if sampling is AccountedSampling.MINI_SETS:
        return MiniSets(num_batches, batch, chosen=1)
    return ShuffledEpochs(num_batches)


def _limit(plan: Plan, steps: int) -> GaussianDpEstimate | None:
    """The central limit theorem's estimate, where there is one."""
    from tacit.accounting import gaussian_dp_mu

    z = plan.noise_multiplier
    if z > 0:
        with contextlib.suppress(UnsupportedEvent):
            return gaussian_dp_mu(z, plan.scheme, steps, relation=plan.relation, unit=plan.unit)
    return None


def _facts_of(
    plan: Plan, steps: int, delta: float, more: dict[str, float] | None = None
) -> dict[str, Any]:
    """ε of the plan's first steps, what else was computed, the plan, and a note if ε is vast."""
    from tacit.accounting.gaussian_dp import no_privacy_note

    spent = plan.epsilon(steps, delta)
    note = no_privacy_note(spent, delta)
    uncapped = plan.epsilon_without_cap(steps, delta)
    return {
        "epsilon": spent,
        **({} if uncapped is None else {"epsilon_without_cap": uncapped}),
        **(more or {}),
        "delta": delta,
        "relation": plan.relation.value,
        "sampling": plan.scheme.describe(),
        "noise_multiplier": plan.noise_multiplier,
        "steps": steps,
        **({} if note is None else {"note": note}),
    }
