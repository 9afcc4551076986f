"""Tacit: train PyTorch models with differential privacy.

One accountant, one ledger, one training loop; the routes differ in how a gradient is bounded.
"""

__version__ = "0.1.0"

from tacit import errors, losses, models
from tacit.accounting import (
    Ledger,
    Plan,
    calibrate,
    epsilon,
    epsilon_rdp,
    gaussian_dp_mu,
    steps_within,
    trade_off,
)
from tacit.batch import Batch, batch_of
from tacit.budget import Budget, Relation
from tacit.data import Records, load, load_file
from tacit.errors import BudgetExceeded, MixesRecords, UnsupportedEvent
from tacit.mechanism import Mechanism
from tacit.noise import GlobalNoise, OptimisedNoise, PerLayerNoise
from tacit.private_gradient import PrivateGradient
from tacit.queries import (
    Block,
    BookKeeping,
    BoundedGradient,
    GradientQuery,
    PerRecord,
    PerSampleClip,
    Replay,
    by_layer,
    by_parameter,
    by_prefix,
)
from tacit.report import save_run
from tacit.sampling import (
    FixedSizeSampler,
    MiniSets,
    MiniSetSampler,
    Poisson,
    PoissonSampler,
    ShuffledEpochs,
    ShuffleSampler,
    WithoutReplacement,
)
from tacit.training import Callback, MovingAverage, Run, Trainer, evaluate

__all__ = [
    "Batch",
    "Block",
    "BookKeeping",
    "BoundedGradient",
    "Budget",
    "BudgetExceeded",
    "Callback",
    "FixedSizeSampler",
    "GlobalNoise",
    "GradientQuery",
    "Ledger",
    "Mechanism",
    "MiniSetSampler",
    "MiniSets",
    "MixesRecords",
    "MovingAverage",
    "OptimisedNoise",
    "PerLayerNoise",
    "PerRecord",
    "PerSampleClip",
    "Plan",
    "Poisson",
    "PoissonSampler",
    "PrivateGradient",
    "Records",
    "Relation",
    "Replay",
    "Run",
    "ShuffleSampler",
    "ShuffledEpochs",
    "Trainer",
    "UnsupportedEvent",
    "WithoutReplacement",
    "batch_of",
    "by_layer",
    "by_parameter",
    "by_prefix",
    "calibrate",
    "epsilon",
    "epsilon_rdp",
    "errors",
    "evaluate",
    "gaussian_dp_mu",
    "load",
    "load_file",
    "losses",
    "models",
    "save_run",
    "steps_within",
    "trade_off",
]
