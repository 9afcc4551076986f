"""Options that the accounting commands share."""

from __future__ import annotations

import enum

import typer

from tacit.budget import Relation
from tacit.sampling.fixed_size import WithoutReplacement
from tacit.sampling.mini_sets import MiniSets
from tacit.sampling.poisson import Poisson
from tacit.sampling.scheme import Scheme, Unit
from tacit.sampling.shuffle import ShuffledEpochs


class SamplingName(enum.StrEnum):
    """The samplers that the command line can name."""

    POISSON = "poisson"
    FIXED_SIZE = "fixed-size"
    SHUFFLE = "shuffle"


class AccountedSampling(enum.StrEnum):
    """The samplings that the command line can account for; not all can be trained with."""

    POISSON = "poisson"
    FIXED_SIZE = "fixed-size"
    SHUFFLE = "shuffle"
    MINI_SETS = "mini-sets"


class RelationName(enum.StrEnum):
    ADD_OR_REMOVE_ONE = "add-or-remove-one"
    REPLACE_ONE = "replace-one"


SAMPLING = typer.Option(
    None,
    help="How batches are drawn: poisson by default; fixed-size and shuffle need replace-one. "
    "batch-clip draws mini-sets instead.",
)
ACCOUNTED_SAMPLING = typer.Option(
    AccountedSampling.POISSON,
    help="How batches are drawn; fixed-size and shuffle need replace-one. mini-sets is batch "
    "clipping: one of ⌈records ÷ batch⌉ fixed sets a step, clipped as one.",
)
RATE = typer.Option(None, help="Poisson: the probability that a record takes part in a step.")
POPULATION = typer.Option(
    None, "--population", "--records", help="The number of records, where there is no rate."
)
BATCH = typer.Option(None, help="The number of records in a batch (Poisson: expected).")
STEPS = typer.Option(..., help="Number of steps.")
DELTA = typer.Option(..., help="δ, well below one over the number of records.")
RELATION = typer.Option(
    None,
    help="Which datasets are neighbours. By default add-or-remove-one for Poisson, "
    "replace-one for the others. The noise multiplier is the noise over the sensitivity under "
    "this relation.",
)
JSON = typer.Option(False, "--json", help="Print one JSON object and nothing else.")


def scheme_from(
    sampling: SamplingName | AccountedSampling,
    rate: float | None,
    population: int | None,
    batch: int | None,
) -> Scheme:
    """The scheme that the options describe, or an error that names the missing one."""
    if sampling == SamplingName.POISSON:
        if rate is not None and (population is not None or batch is not None):
            raise ValueError("give --sampling-rate, or --population and --batch-size, not both")
        if rate is None:
            if population is None or batch is None:
                raise ValueError(
                    "Poisson sampling needs --sampling-rate, or --population and --batch-size"
                )
            _check_batch(population, batch)
            rate = batch / population
        return Poisson(rate)
    if rate is not None:
        raise ValueError(f"--sampling-rate is for Poisson sampling, not {sampling}")
    if population is None or batch is None:
        raise ValueError(f"{sampling} sampling needs --population and --batch-size")
    _check_batch(population, batch)
    if sampling == SamplingName.FIXED_SIZE:
        return WithoutReplacement(population, batch)
    num_batches = -(-population // batch)
    if sampling == AccountedSampling.MINI_SETS:
        return MiniSets(num_batches, batch, chosen=1)
    return ShuffledEpochs(num_batches)


def _check_batch(population: int, batch: int) -> None:
    if not 1 <= batch <= population:
        raise ValueError(
            f"--batch-size is {batch} of {population} records; give at least 1 and at most all"
        )


def unit_from(sampling: AccountedSampling) -> Unit:
    """What is bounded: with mini-sets the whole set, as batch clipping does."""
    return Unit.MINI_SET if sampling is AccountedSampling.MINI_SETS else Unit.RECORD


def relation_from(
    name: RelationName | None, sampling: SamplingName | AccountedSampling | None
) -> Relation:
    """The relation by name, or the usual one of the sampling; None is that of batch clipping."""
    if name is not None:
        return Relation(name.value)
    poisson = sampling == SamplingName.POISSON
    return Relation.ADD_OR_REMOVE_ONE if poisson else Relation.REPLACE_ONE
