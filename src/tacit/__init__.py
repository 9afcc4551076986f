"""Tacit: train PyTorch models with differential privacy.

One accountant, one ledger, one training loop; the routes differ in how a gradient is bounded.
"""

__version__ = "0.1.0"

from tacit import certificates, diagnostics, errors, lipschitz, losses, models, statistics
from tacit.accounting import (
    Plan,
    calibrate,
    check_scheme,
    epsilon,
    epsilon_rdp,
    gaussian_dp_mu,
    steps_within,
    trade_off,
)
from tacit.budget import Budget, Relation
from tacit.data import Records, load, load_file
from tacit.data.augmentation import Augmentation, RandomCropFlip
from tacit.data.splits import split_public
from tacit.engines import Automatic, BookKeeping, PerRecord, Recorder, gradient_rule
from tacit.engines.clipping import Clip, Normalise
from tacit.errors import BudgetExceeded, MixesRecords, UnsupportedEvent
from tacit.ledger import Ledger
from tacit.lipschitz import lipschitz_twin, project, propagate
from tacit.losses import check_loss, register_loss
from tacit.mechanism import Mechanism, PendingRelease
from tacit.models import make_trainable
from tacit.noise import GlobalNoise, OptimisedNoise, PerLayerNoise, SharedNoise
from tacit.queries import (
    AdaptiveNorm,
    BatchClip,
    Block,
    BoundedGradient,
    Clipless,
    Decaying,
    GradientQuery,
    LayerFactors,
    LayerwiseNorms,
    LocalRun,
    MeanGradient,
    PerSampleClip,
    SetBySet,
    SetsAsRecords,
    Statistic,
    by_layer,
    by_parameter,
    by_prefix,
    group_by_norm,
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
    register_scheme,
)
from tacit.sampling.batch import Batch, batch_of
from tacit.statistics import PublicStatistics, ReleasedStatistics
from tacit.training import Callback, MovingAverage, Run, Sparsification, Trainer, evaluate

__all__ = [
    "AdaptiveNorm",
    "Augmentation",
    "Automatic",
    "Batch",
    "BatchClip",
    "Block",
    "BookKeeping",
    "BoundedGradient",
    "Budget",
    "BudgetExceeded",
    "Callback",
    "Clip",
    "Clipless",
    "Decaying",
    "FixedSizeSampler",
    "GlobalNoise",
    "GradientQuery",
    "LayerFactors",
    "LayerwiseNorms",
    "Ledger",
    "LocalRun",
    "MeanGradient",
    "Mechanism",
    "MiniSetSampler",
    "MiniSets",
    "MixesRecords",
    "MovingAverage",
    "Normalise",
    "OptimisedNoise",
    "PendingRelease",
    "PerLayerNoise",
    "PerRecord",
    "PerSampleClip",
    "Plan",
    "Poisson",
    "PoissonSampler",
    "PublicStatistics",
    "RandomCropFlip",
    "Recorder",
    "Records",
    "Relation",
    "ReleasedStatistics",
    "Run",
    "SetBySet",
    "SetsAsRecords",
    "SharedNoise",
    "ShuffleSampler",
    "ShuffledEpochs",
    "Sparsification",
    "Statistic",
    "Trainer",
    "UnsupportedEvent",
    "WithoutReplacement",
    "batch_of",
    "by_layer",
    "by_parameter",
    "by_prefix",
    "calibrate",
    "certificates",
    "check_loss",
    "check_scheme",
    "diagnostics",
    "epsilon",
    "epsilon_rdp",
    "errors",
    "evaluate",
    "gaussian_dp_mu",
    "gradient_rule",
    "group_by_norm",
    "lipschitz",
    "lipschitz_twin",
    "load",
    "load_file",
    "losses",
    "make_trainable",
    "models",
    "project",
    "propagate",
    "register_loss",
    "register_scheme",
    "save_run",
    "split_public",
    "statistics",
    "steps_within",
    "trade_off",
]
