"""`tacit epsilon`: what a run with this noise costs."""

from __future__ import annotations

import contextlib

import typer

from tacit.accounting.accountant import epsilon as epsilon_by_pld
from tacit.accounting.accountant import epsilon_rdp, no_privacy_note
from tacit.accounting.gaussian_dp import gaussian_dp_mu
from tacit.cli import accounting_options as options
from tacit.cli.accounting_options import AccountedSampling, RelationName
from tacit.cli.numbers import check_noise
from tacit.cli.output import show
from tacit.errors import UnsupportedEvent


def epsilon(
    noise_multiplier: float = typer.Option(..., help="Noise's standard deviation ÷ sensitivity."),
    sampling_rate: float | None = options.RATE,
    steps: int = options.STEPS,
    delta: float = options.DELTA,
    sampling: AccountedSampling = options.ACCOUNTED_SAMPLING,
    population: int | None = options.POPULATION,
    batch_size: int | None = options.BATCH,
    relation: RelationName | None = options.RELATION,
    as_json: bool = options.JSON,
) -> None:
    """The ε of a run: by PLD (the guarantee), by RDP (a cross-check), by the CLT (approximate).

    Example: tacit epsilon --noise-multiplier 1.54 --sampling-rate 0.02048 --steps 1465 --delta 1e-5
    """
    check_noise(noise_multiplier)
    scheme = options.scheme_from(sampling, sampling_rate, population, batch_size)
    between = options.relation_from(relation, sampling)
    unit = options.unit_from(sampling)
    pld = epsilon_by_pld(noise_multiplier, scheme, steps, delta=delta, relation=between, unit=unit)
    rdp = epsilon_rdp(noise_multiplier, scheme, steps, delta=delta, relation=between, unit=unit)
    facts = {
        "epsilon": pld,
        "epsilon_rdp": rdp,
        "delta": delta,
        "relation": between.value,
        "sampling": scheme.describe(),
        "noise_multiplier": noise_multiplier,
        "steps": steps,
    }
    if noise_multiplier > 0:
        with contextlib.suppress(UnsupportedEvent):
            estimate = gaussian_dp_mu(noise_multiplier, scheme, steps, relation=between, unit=unit)
            facts["gaussian_dp_mu_approximate"] = estimate.mu
    note = no_privacy_note(pld, delta)
    if note is not None:
        facts["note"] = note
    show(facts, as_json, "privacy of a run")
