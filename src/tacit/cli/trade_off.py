"""`tacit trade-off`: what the best test for one record can reach."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import typer

from tacit.accounting.accountant import no_privacy_note
from tacit.accounting.f_dp import TradeOff, plot_trade_offs
from tacit.accounting.f_dp import trade_off as trade_off_of
from tacit.accounting.gaussian_dp import GaussianDpEstimate, gaussian_dp_mu, layerwise_multiplier
from tacit.accounting.plan import Plan
from tacit.cli import accounting_options as options
from tacit.cli.accounting_options import AccountedSampling, RelationName
from tacit.cli.numbers import check_noise
from tacit.cli.output import show
from tacit.cli.saved_plan import read_plan
from tacit.errors import UnsupportedEvent
from tacit.report.run_folder import to_json

TYPE_ONE = (0.001, 0.01, 0.05, 0.1, 0.5)
_NEEDED = "--noise-multiplier, --steps and --delta"


def trade_off(
    runs: list[Path] | None = typer.Argument(
        None, metavar="RUN", help="Folders of saved runs, instead of the options below."
    ),
    noise_multiplier: float | None = typer.Option(
        None, help="Noise's standard deviation ÷ sensitivity, of each block if --layers is given."
    ),
    layers: int = typer.Option(1, help="Blocks with noise of their own: L of them make σ/√L."),
    sampling_rate: float | None = options.RATE,
    steps: int | None = typer.Option(None, help="Number of steps."),
    delta: float | None = typer.Option(None, help="δ at which to give ε."),
    sampling: AccountedSampling = options.ACCOUNTED_SAMPLING,
    population: int | None = options.POPULATION,
    batch_size: int | None = options.BATCH,
    relation: RelationName | None = options.RELATION,
    out: Path | None = typer.Option(
        None, help="Write a picture here; a saved run's goes to its folder by default."
    ),
    as_json: bool = options.JSON,
) -> None:
    """The least type II error of any test for one record, at each type I error: exact, by PLD.

    Beside it stand ε at δ, the advantage of the best test, and the CLT's μ, which is no guarantee.

    Example: tacit trade-off --noise-multiplier 2.5 --layers 8 --sampling mini-sets --records 54000
    --batch-size 64 --steps 42200 --delta 1e-5 --out curve.png
    """
    picture = out
    check_noise(noise_multiplier)
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
        found = [_saved(folder) for folder in runs]
        picture = out or runs[0] / "trade_off.png"
    else:
        if noise_multiplier is None or steps is None or delta is None:
            raise ValueError(f"give the folder of a saved run, or {_NEEDED}")
        scheme = options.scheme_from(sampling, sampling_rate, population, batch_size)
        plan = Plan(
            scheme,
            layerwise_multiplier(noise_multiplier, layers),
            options.relation_from(relation, sampling),
            steps,
            options.unit_from(sampling),
        )
        name = f"noise multiplier {plan.noise_multiplier:.4g}, {steps} steps"
        found = [_described(name, plan, steps, delta)]
    if picture is not None:
        names = _names([facts["run"] for _, _, facts in found])
        plot_trade_offs(
            {name: curve for name, (curve, _, _) in zip(names, found, strict=True)},
            picture,
            {name: limit for name, (_, limit, _) in zip(names, found, strict=True) if limit},
        )
    if as_json:
        written = None if picture is None else str(picture)
        typer.echo(to_json({"curves": [facts for _, _, facts in found], "picture": written}))
        return
    for _, _, facts in found:
        errors = {
            f"type II error at type I {row['type_one']:g}": row["type_two"]
            for row in facts.pop("errors")
        }
        show({**facts, **errors}, False, "trade-off of a run")
    if picture is not None:
        typer.echo(f"written to {picture}")


Found = tuple[TradeOff, GaussianDpEstimate | None, dict[str, Any]]


def _saved(folder: Path) -> Found:
    saved = read_plan(folder)
    found = _described(folder.name, saved.plan, saved.steps, saved.delta)
    spent = found[2]["epsilon"]
    # Rounding differs by far less; continued runs answer for steps that run.json does not count.
    if abs(spent - saved.epsilon) > 0.01 * saved.epsilon:
        raise ValueError(
            f"{folder}/run.json reports epsilon {saved.epsilon:.4g}, but {saved.steps} steps of "
            f"its plan have {spent:.4g}: the run was continued from another, and its ledger "
            "holds what it answers for; see tacit ledger show"
        )
    return found


def _described(name: str, plan: Plan, steps: int, delta: float) -> Found:
    z, unit = plan.noise_multiplier, plan.unit
    curve = trade_off_of(
        z, plan.scheme, steps, relation=plan.relation, unit=unit, prelude=plan.prelude
    )
    epsilon = plan.epsilon(steps, delta)
    facts = {
        "run": name,
        "epsilon": epsilon,
        "delta": delta,
        "relation": plan.relation.value,
        "sampling": plan.scheme.describe(),
        "noise_multiplier": z,
        "steps": steps,
        "advantage_of_the_best_test": curve.advantage,
        "gaussian_mu_of_the_curve": curve.gaussian_mu(),
    }
    limit = None
    if z > 0 and not plan.prelude:
        with contextlib.suppress(UnsupportedEvent):
            limit = gaussian_dp_mu(z, plan.scheme, steps, relation=plan.relation, unit=unit)
    if limit is not None and limit.approximate:
        facts["clt_mu_not_a_guarantee"] = limit.mu
        facts["clt_epsilon_not_a_guarantee"] = limit.epsilon(delta)
    note = no_privacy_note(epsilon, delta)
    if note is not None:
        facts["note"] = note
    facts["errors"] = [{"type_one": a, "type_two": float(curve(a)[0])} for a in TYPE_ONE]
    return curve, limit, facts


def _names(names: list[str]) -> list[str]:
    """Two runs may sit in folders of one name."""
    return [f"{n} ({i})" if names.count(n) > 1 else n for i, n in enumerate(names, 1)]
