"""Who is in a batch, and what that amplifies."""

from tacit.sampling.fixed_size import FixedSizeSampler
from tacit.sampling.mini_sets import MiniSetSampler
from tacit.sampling.poisson import PoissonSampler
from tacit.sampling.registry import register_scheme
from tacit.sampling.sampler import Sampler
from tacit.sampling.schemes import (
    MiniSets,
    Poisson,
    RevealedSampleDpEvent,
    Scheme,
    ShuffledEpochs,
    Unit,
    WithoutReplacement,
)
from tacit.sampling.shuffle import ShuffleSampler

__all__ = [
    "FixedSizeSampler",
    "MiniSetSampler",
    "MiniSets",
    "Poisson",
    "PoissonSampler",
    "RevealedSampleDpEvent",
    "Sampler",
    "Scheme",
    "ShuffleSampler",
    "ShuffledEpochs",
    "Unit",
    "WithoutReplacement",
    "register_scheme",
]
