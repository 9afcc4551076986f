"""How many epochs some steps are, from public constants."""

from __future__ import annotations

from tacit.errors import UndeclaredConstant
from tacit.sampling.schemes import MiniSets, Poisson, Scheme, ShuffledEpochs, WithoutReplacement


def epochs_of(scheme: Scheme, steps: int) -> float:
    """How often each record is expected to have taken part after `steps` steps.

    steps·q under Poisson sampling, steps·n/N for n of N records: what steps·(expected batch)/N is.
    """
    return steps * _share(scheme)


def _share(scheme: Scheme) -> float:
    if isinstance(scheme, Poisson):
        return scheme.rate
    if isinstance(scheme, WithoutReplacement):
        return scheme.sample_size / scheme.population
    if isinstance(scheme, MiniSets):
        return scheme.probability
    if isinstance(scheme, ShuffledEpochs):
        return 1 / scheme.steps_per_epoch
    raise UndeclaredConstant(
        f"how much of an epoch a step of {type(scheme).__name__} is, is unknown; use a sampler of "
        "tacit, or a loop of your own that tells the loss its epoch with loss.at(epoch)"
    )
