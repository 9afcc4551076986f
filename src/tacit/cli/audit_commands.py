"""`tacit audit` and `tacit attack`: what attacks on a finished run prove, and what they find."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tacit.cli.console import JSON, print_json
from tacit.cli.model_commands import FOLDER, IMPORT
from tacit.cli.schema import SHARE

if TYPE_CHECKING:
    from tacit.accounting import Plan
    from tacit.auditing import MembershipAttack, StepAudit
    from tacit.cli.settings import TrainSettings
    from tacit.noise import Allocation
    from tacit.queries import GradientQuery
    from tacit.records import Records
    from tacit.report.saved_run import SavedRun

CONFIDENCE = typer.Option(0.95, help="Confidence of each bound or interval.")
PICTURE = typer.Option(None, help="Picture to write, such as audit.png.")
_LEAST_TRIALS = 1000
_RESAMPLES = 100


def audit(
    folder: Path = FOLDER,
    trials: int = typer.Option(1_000_000, help="Attacks with the canary, and as many without."),
    step_delta: float | None = typer.Option(
        None, help="δ of the audit of one step. Default: a tenth of its best test's advantage."
    ),
    confidence: float = CONFIDENCE,
    device: str = typer.Option("cpu", help="Device to draw noise on: cpu, cuda or auto."),
    seed: int | None = typer.Option(None, help="Random seed, to repeat an audit."),
    out: Path | None = PICTURE,
    as_json: bool = JSON,
) -> None:
    """Attack a run's training step with a canary, and compare with the ε that it claims.

    ε is computed again from the plan. Then one step with the run's query, noise and sampling is
    repeated on the worst records for it, with and without a canary. It tests code and accounting;
    neither the run's records nor its weights are needed. An ε that is proved and above the claim
    refutes it; one below is no upper bound.

    Example: tacit audit runs/x --out audit.png
    """
    SHARE.require("--confidence", confidence)
    SHARE.require("--step-delta", step_delta)
    if trials < _LEAST_TRIALS:
        raise ValueError(f"--trials is {trials}, which proves nothing; give at least 1000")
    _check_picture(out)
    from tacit.auditing import audit_step
    from tacit.cli.console import device_for
    from tacit.cli.run_directory import read_plan
    from tacit.report.read_folder import read_facts

    saved = read_plan(folder)
    plan = saved.plan
    if plan.noise_multiplier == 0:
        raise ValueError(
            f"the run in {folder} has no noise, so its epsilon is infinite and nothing can refute "
            "it; audit a run with noise"
        )
    query, allocation = route_of(read_facts(folder), plan)
    found = audit_step(
        query,
        plan.scheme,
        plan.noise_multiplier,
        plan.relation,
        delta=step_delta,
        trials=trials,
        confidence=confidence,
        allocation=allocation,
        device=device_for(device),
        seed=seed,
    )
    computed = plan.epsilon(saved.steps, saved.delta)
    z = found.largest_multiplier
    whole = 0.0
    if math.isfinite(z):
        whole = replace(plan, noise_multiplier=z).epsilon(saved.steps, saved.delta)
    facts = {
        "run": folder.name,
        "epsilon_reported": saved.epsilon,
        "epsilon": computed,
        "epsilon_at_least": whole,
        "assumes": "every step is as the audited one, and its noise alone is unknown",
        "delta": saved.delta,
        "steps": saved.steps,
        "confidence": confidence,
        "step": found.facts(),
        "refuted": whole > saved.epsilon or found.ratio > 1,
        "picture": None if out is None else str(out),
    }
    if out is not None:
        _plot_audit(facts, found, out)
    if as_json:
        print_json(facts)
        return
    _print_audit(facts, found)


def route_of(facts: dict[str, Any], plan: Plan) -> tuple[GradientQuery, Allocation]:
    """The route of a run, with its clip, rule, blocks and allocation of noise.

    Constants that follow public records or a quantile are audited at the norm that they begin at,
    and views not at all: one record's share has the same bound.
    """
    try:
        return _route(facts.get("config") or {}, plan)
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ValueError(
            f"run.json does not hold a run's route ({type(error).__name__}: {error}); copy the "
            "file from a backup, or in Python: tacit.auditing.audit_step(query, scheme, ...)"
        ) from error


def _route(config: dict[str, Any], plan: Plan) -> tuple[GradientQuery, Allocation]:
    from tacit import queries
    from tacit.cli.build_query import ALLOCATIONS
    from tacit.sampling import MiniSets, Unit

    used, sections = config.get("used") or {}, (config.get("settings") or {}).values()
    named = [part["query"] for part in sections if "query" in part]
    kind = named[0] if named else "clip"
    allocation = ALLOCATIONS[used.get("noise", "global")]()
    if kind == "clipless":
        return queries.Clipless(gradient_clip=used.get("gradient_clip")), allocation
    blocks = {
        "flat": queries.all_together,
        "layer": queries.by_layer,
        "parameter": queries.by_parameter,
    }[used.get("blocks_by", "flat")]
    shared: dict[str, Any] = {
        "max_norm": float(used.get("max_norm") or 1.0),
        "blocks": blocks,
        "rule": queries.Normalise() if used.get("rule") == "normalise" else queries.Clip(),
    }
    if plan.unit is Unit.MINI_SET:
        assert isinstance(plan.scheme, MiniSets)
        return queries.BatchClip(mini_set_size=plan.scheme.set_size, **shared), allocation
    return queries.PerSampleClip(**shared), allocation


def _rows(facts: dict[str, Any], found: StepAudit) -> list[tuple[str, str, float, str]]:
    """What ε is of, by which method, its value, and what that takes for granted."""
    of_run, of_step = f"the run, δ = {facts['delta']:g}", f"one step, δ = {found.delta:g}"
    rows = [
        (of_run, "claimed, computed from the plan", facts["epsilon"], ""),
        (of_run, "proved at least, from one step", facts["epsilon_at_least"], facts["assumes"]),
        (of_step, "claimed, computed from the plan", found.claimed, ""),
    ]
    for bound in found.bounds:
        words = "proved at least, " + (
            "by counting errors" if bound.assumes is None else "by the trade-off curve"
        )
        rows.append((of_step, words, bound.epsilon, bound.assumes or "nothing"))
    return rows


def _print_audit(facts: dict[str, Any], found: StepAudit) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"audit of {facts['run']}", title_justify="left")
    for column in ("ε of", "how", "ε", "assumes"):
        table.add_column(column, overflow="fold")
    for what, how, value, assumes in _rows(facts, found):
        table.add_row(what, how, f"{value:.4g}", assumes)
    console = Console()
    console.print(table)
    told = (
        f"{found.route}, {found.plan.scheme.describe()}, {found.plan.relation}; the canary is "
        f"{found.canary}, at {found.share_of_bound:.1%} of the bound; all bounds hold together "
        f"with confidence {facts['confidence']:.0%}"
    )
    console.print(told, highlight=False)
    verdict = "the claim is refuted" if facts["refuted"] else "the claim stands this attack"
    console.print(f"{verdict}; an audit proves no upper bound: ε does", highlight=False)
    if facts["picture"]:
        console.print(f"written to {facts['picture']}", highlight=False, soft_wrap=True)


def _plot_audit(facts: dict[str, Any], found: StepAudit, out: Path) -> None:
    from tacit import canvas

    rows = _rows(facts, found)
    figure, ((axes,),) = canvas.blank(size=(7.2, 3.4))
    colours = ["0.6" if how.startswith("claimed") else "C0" for _, how, _, _ in rows]
    bars = axes.barh([f"{what}\n{how}" for what, how, _, _ in rows], [v for *_, v, _ in rows])
    for bar, colour in zip(bars, colours, strict=True):
        bar.set_color(colour)
    axes.bar_label(bars, fmt="%.3g", padding=3)
    axes.invert_yaxis()
    axes.set_xlabel("ε")
    axes.margins(x=0.15)
    axes.set_title(f"audit of {facts['run']}", fontsize=11)
    canvas.save(figure, out)


# ---- membership inference ------------------------------------------------------------------------


def attack(
    folder: Path = FOLDER,
    data: Path | None = typer.Option(
        None, help="The run's own table, where it is not where it was. Default: that of the run."
    ),
    dataset: str | None = typer.Option(
        None, help="The named dataset of a run that was not made by tacit train."
    ),
    records: int = typer.Option(10_000, help="The most training records, and held-out ones."),
    confidence: float = CONFIDENCE,
    device: str = typer.Option("auto", help="Device to compute on: cpu, cuda or auto."),
    import_model: bool = IMPORT,
    seed: int | None = typer.Option(None, help="Random seed, to repeat an attack."),
    out: Path | None = PICTURE,
    as_json: bool = JSON,
) -> None:
    """Try to tell a run's training records from held-out ones by its model.

    Thresholds on the loss and on entropies, and a logistic regression that knows half of the
    answers. This is evidence, not a guarantee. The results are not covered by ε: they are of
    training records.

    Example: tacit attack runs/x --out attack.png
    """
    SHARE.require("--confidence", confidence)
    if records < 20:
        raise ValueError(f"--records is {records}; give at least 20")
    _check_picture(out)
    from tacit.auditing.membership import EVIDENCE, attack_model
    from tacit.cli.console import device_for
    from tacit.report.read_folder import load_run

    run = load_run(folder, import_model=import_model, device=device_for(device))
    outputs, targets, members = _outputs(run, *_records_of(run, data, dataset), records)
    attacks = attack_model(
        outputs, targets, members, confidence=confidence, resamples=_RESAMPLES, seed=seed
    )
    facts = {
        "run": folder.name,
        "epsilon": run.epsilon,
        "delta": run.delta,
        "note": EVIDENCE,
        "attacks": [one.facts() for one in attacks],
        "picture": None if out is None else str(out),
    }
    if out is not None:
        _plot_attacks(folder.name, attacks, out)
    if as_json:
        print_json(facts)
        return
    _print_attacks(facts, attacks)


def _records_of(run: SavedRun, data: Path | None, dataset: str | None) -> tuple[Records, Records]:
    """The records that the run was trained on, and held-out ones, before any scaling."""
    from tacit.cli.build_data import USUAL_PUBLIC_SHARE, load_records
    from tacit.cli.run_directory import settings_of
    from tacit.data import load, split_public

    if data is not None and dataset is not None:
        raise ValueError("both --data and --dataset are given; give the one that the run is of")
    if dataset is not None:
        return load(dataset, scale=None)
    settings: TrainSettings = settings_of(run)
    if data is not None:
        if settings.data is None:
            raise ValueError(
                f"--data is {data}, and the run is of the dataset {settings.dataset or 'digits'}; "
                "leave --data out"
            )
        settings = replace(settings, data=data)
    if settings.data is not None and not settings.data.exists():
        raise ValueError(
            f"the run was trained on {settings.data}, which is not there; give the file with --data"
        )
    train, test = load_records(settings, scaled=False)
    norms = settings.layerwise != "none" or settings.groups is not None
    if norms or settings.statistics == "public":  # records that were given up are no members
        _, train = split_public(train, settings.public_share or USUAL_PUBLIC_SHARE)
    return train, test


def _outputs(run: SavedRun, train: Records, test: Records, most: int) -> tuple[Any, Any, Any]:
    """Log probabilities, classes, and who is a member."""
    import numpy as np

    from tacit.losses.registry import Task

    if run.task not in (Task.CLASSIFICATION, Task.BINARY):
        raise ValueError(
            f"the task of the run is {run.task or 'not known'}, and these attacks are for "
            "classifiers; in Python: tacit.auditing.measure_attack with scores of your own"
        )
    logp, classes = [], []
    for side in (train, test):
        if len(side) < 2:
            raise ValueError(
                "the run has no held-out records to compare with; give --data with some, or keep "
                "a share of them with tacit train --test-data"
            )
        some = side.take(slice(most))
        chances = run.probabilities_of(run.outputs(some))
        logp.append(np.log(np.maximum(chances, 1e-300)))
        y = some.targets.cpu().numpy().reshape(-1)
        classes.append((y > 0).astype(int) if run.task is Task.BINARY else y)
    members = np.repeat([True, False], [len(part) for part in logp])
    return np.concatenate(logp), np.concatenate(classes), members


def _print_attacks(facts: dict[str, Any], attacks: list[MembershipAttack]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"membership inference against {facts['run']}, ε = {facts['epsilon']:.4g} at "
        f"δ = {facts['delta']:g}",
        title_justify="left",
    )
    for column in ("attack", "AUROC", "advantage", *(f"TPR at {r:.1%} FPR" for r in (0.001, 0.01))):
        table.add_column(column, overflow="fold")
    for one in attacks:
        rates = [str(tpr) for _, tpr in one.true_positive_rates]
        table.add_row(one.name, str(one.auroc), str(one.advantage), *rates)
    console = Console()
    console.print(table)
    console.print(facts["note"], highlight=False)
    if facts["picture"]:
        console.print(f"written to {facts['picture']}", highlight=False, soft_wrap=True)


def _plot_attacks(name: str, attacks: list[MembershipAttack], out: Path) -> None:
    from tacit import canvas
    from tacit.auditing.membership import EVIDENCE

    figure, ((left, right),) = canvas.blank(1, 2, size=(9.6, 3.4))
    places = range(len(attacks))
    for axes, title, chance, of in (
        (left, "AUROC", 0.5, [one.auroc for one in attacks]),
        (right, "TPR at 1% FPR", 0.01, [one.true_positive_rates[-1][1] for one in attacks]),
    ):
        away = [[m.value - m.low for m in of], [m.high - m.value for m in of]]
        away = [[max(0.0, v) for v in side] for side in away]
        axes.errorbar([m.value for m in of], places, xerr=away, fmt="o", capsize=3)
        axes.axvline(chance, color="0.6", linestyle="--")
        axes.set(title=title, yticks=list(places), ylim=(len(attacks) - 0.5, -0.5))
        axes.set_yticklabels([])
    left.set_yticklabels([one.name.replace(" that knows", "\nthat knows") for one in attacks])
    canvas.save(figure, out, f"membership inference against {name}: {EVIDENCE}")


def _check_picture(out: Path | None) -> None:
    if out is None:
        return
    if out.is_dir():
        raise ValueError(f"--out is {out}, which is a folder; give a file such as {out}/audit.png")
    if out.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise ValueError(f"--out is {out}; give a file that ends in .png, .pdf or .svg")
