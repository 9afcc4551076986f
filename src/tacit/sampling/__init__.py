"""Who is in a batch, and what that amplifies."""

from tacit.sampling.batch import Batch, batch_of
from tacit.sampling.fixed_size import FixedSizeSampler, RevealedSampleDpEvent, WithoutReplacement
from tacit.sampling.mini_sets import MiniSets, MiniSetSampler
from tacit.sampling.poisson import Poisson, PoissonSampler
from tacit.sampling.sampler import Sampler
from tacit.sampling.scheme import Scheme, Unit, register_scheme
from tacit.sampling.shuffle import ShuffledEpochs, ShuffleSampler

__all__ = [
    "Batch",
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
    "batch_of",
    "register_scheme",
]
