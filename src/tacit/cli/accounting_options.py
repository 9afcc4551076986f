"""Options that the accounting commands share."""

from __future__ import annotations

import enum

import typer

from tacit.budget import Relation
from tacit.sampling.schemes import Poisson, Scheme, ShuffledEpochs, WithoutReplacement


class SamplingName(enum.StrEnum):
    """The samplers that the command line can name."""

    POISSON = "poisson"
    FIXED_SIZE = "fixed-size"
    SHUFFLE = "shuffle"


class RelationName(enum.StrEnum):
    ADD_OR_REMOVE_ONE = "add-or-remove-one"
    REPLACE_ONE = "replace-one"


SAMPLING = typer.Option(
    SamplingName.POISSON, help="How batches are drawn; fixed-size and shuffle need replace-one."
)
RATE = typer.Option(None, help="Poisson: the probability that a record takes part in a step.")
POPULATION = typer.Option(None, help="fixed-size, shuffle: the number of records.")
BATCH = typer.Option(None, help="fixed-size, shuffle: the number of records in a batch.")
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
    sampling: SamplingName, rate: float | None, population: int | None, batch: int | None
) -> Scheme:
    """The scheme that the options describe, or an error that names the missing one."""
    if sampling is SamplingName.POISSON:
        if rate is None:
            raise ValueError("Poisson sampling needs --sampling-rate")
        return Poisson(rate)
    if rate is not None:
        raise ValueError(f"--sampling-rate is for Poisson sampling, not {sampling}")
    if population is None or batch is None:
        raise ValueError(f"{sampling} sampling needs --population and --batch-size")
    if sampling is SamplingName.FIXED_SIZE:
        return WithoutReplacement(population, batch)
    if batch < 1:
        raise ValueError(f"--batch-size is {batch}; give at least 1")
    return ShuffledEpochs(-(-population // batch))


def relation_from(name: RelationName | None, sampling: SamplingName) -> Relation:
    if name is not None:
        return Relation(name.value)
    poisson = sampling is SamplingName.POISSON
    return Relation.ADD_OR_REMOVE_ONE if poisson else Relation.REPLACE_ONE
