"""Every audit of a training set-up in one call, and a table of what they found."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from tacit.auditing.neighbours import replay_among_identical, replay_neighbours
from tacit.auditing.noise_check import check_noise
from tacit.auditing.projection_check import check_projection
from tacit.auditing.random_draws import attack_draws, noise_of_releases
from tacit.auditing.released_step import replay_release
from tacit.auditing.sampling_check import check_sampler
from tacit.auditing.verdicts import Factory, TrainingAudit, Verdict
from tacit.auditing.worst_record import find_worst_record
from tacit.budget import Relation
from tacit.lipschitz.projection import constraints_of
from tacit.mechanism import Mechanism
from tacit.noise import Allocation
from tacit.queries.bounded_gradient import GradientQuery, Loss


def audit_training(
    model: nn.Module,
    loss: Loss,
    query: GradientQuery,
    sampler: Factory,
    records: object,
    *,
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
    noise_multiplier: float = 1.0,
    allocation: Allocation | None = None,
    mechanism: Factory = Mechanism,
    dtype: torch.dtype | None = torch.float64,
    num_seeds: int = 1 << 16,
    seed: int = 0,
) -> TrainingAudit:
    """Run all audits on a set-up: does what is declared of it hold for what it does?

    Neighbour replay, also among thousands of identical records; the search for the worst record;
    the released step and its noise; prediction of the noise; the sampler against its scheme; and
    for Lipschitz networks the projection. Nothing is charged to a ledger of yours, and the model
    stays as it is. It takes some seconds for a small model, and about 10,000 steps' passes of a few
    records.

    Args:
        sampler: makes a sampler, as in `sampler(records, steps=1, seed=None)`: a sampler's class,
            or `functools.partial` of it.
        records: real or invented. With private ones the table is private as well.
        mechanism: makes the mechanism; a class with the arguments of `Mechanism`.
        dtype: of the copy of the model in which the worst record is searched.
        num_seeds: how many seeds are tried for the noise.

    A table that holds says that these attacks found nothing. It is no proof; the proofs are where
    the bounds are.

        sampler = partial(tacit.PoissonSampler, expected_batch_size=64)
        print(audit_training(model, loss, tacit.PerSampleClip(1.0), sampler, train))
    """
    step = (query, model, loss, records)
    how = {"relation": relation, "mechanism": mechanism}
    noise = {**how, "noise_multiplier": noise_multiplier, "allocation": allocation}
    draws = noise_of_releases(*step, sampler, **how)
    checks: list[Callable[[], Verdict]] = [
        lambda: replay_neighbours(*step, relation=relation, sampler=sampler, seed=seed),
        lambda: replay_among_identical(*step, relation=relation, seed=seed),
        lambda: find_worst_record(*step, relation=relation, dtype=dtype, seed=seed),
        lambda: replay_release(*step, sampler, **noise, seed=seed),
        lambda: check_noise(*step, sampler, **noise),
        lambda: attack_draws(draws, seeds=range(num_seeds)),
        lambda: check_sampler(sampler, records),
    ]
    if constraints_of(model):
        checks.append(lambda: check_projection(model, records, seed=seed))
    return TrainingAudit(tuple(_results(checks)))


def _results(checks: list[Callable[[], Verdict]]) -> Iterator[Verdict]:
    for check in checks:
        yield check()
