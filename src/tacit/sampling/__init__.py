"""Sampling: which records are in a batch, and what that is worth to the accountant.

A `Sampler` draws batches; its `Scheme` is the plain data from which the accountant makes an event.
Each scheme stands beside its sampler. Users write schemes of their own with `register_scheme`.
"""

from tacit.sampling.fixed_size import (
    FixedSizeSampler,
    ShuffledEpochs,
    ShuffleSampler,
    WithoutReplacement,
)
from tacit.sampling.mini_sets import MiniSets, MiniSetSampler, RevealedSampleDpEvent
from tacit.sampling.poisson import Poisson, PoissonSampler, TruncatedPoisson
from tacit.sampling.repeated_runs import NumRuns, SelectedRun, SelectedRunDpEvent
from tacit.sampling.sampler import Batch, Sampler, batch_of
from tacit.sampling.scheme import Scheme, Unit, register_scheme

__all__ = [
    "Batch",
    "FixedSizeSampler",
    "MiniSetSampler",
    "MiniSets",
    "NumRuns",
    "Poisson",
    "PoissonSampler",
    "RevealedSampleDpEvent",
    "Sampler",
    "Scheme",
    "SelectedRun",
    "SelectedRunDpEvent",
    "ShuffleSampler",
    "ShuffledEpochs",
    "TruncatedPoisson",
    "Unit",
    "WithoutReplacement",
    "batch_of",
    "register_scheme",
]
