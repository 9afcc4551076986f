"""Tacit: train PyTorch models with differential privacy.

One accountant, one ledger, one training loop; the routes differ in how a gradient is bounded.
Names are imported when they are first used, so that `import tacit` and the command line's help
wait for nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tacit import (
        accounting,
        certificates,
        data,
        diagnostics,
        engines,
        errors,
        ledger,
        lipschitz,
        losses,
        models,
        noise,
        queries,
        sampling,
        statistics,
        training,
    )
    from tacit.accounting import calibrate, epsilon, steps_within, trade_off
    from tacit.budget import Budget, Relation
    from tacit.data import RandomCropFlip, load, load_file, release_statistics, split_public
    from tacit.engines import gradient_rule
    from tacit.ledger import Ledger
    from tacit.lipschitz import lipschitz_twin, project
    from tacit.losses import register_loss
    from tacit.mechanism import Mechanism, PendingRelease
    from tacit.models.make_trainable import make_trainable
    from tacit.noise import GlobalNoise, Noise, OptimisedNoise, PerLayerNoise
    from tacit.queries import (
        AdaptiveNorm,
        BatchClip,
        Clipless,
        Normalise,
        PerSampleClip,
        by_layer,
        by_parameter,
        by_prefix,
    )
    from tacit.records import Records
    from tacit.report import save_run
    from tacit.sampling import (
        Batch,
        FixedSizeSampler,
        MiniSetSampler,
        PoissonSampler,
        Sampler,
        Scheme,
        ShuffleSampler,
        Unit,
        register_scheme,
    )
    from tacit.statistics import PublicStatistics, ReleasedStatistics
    from tacit.training import (
        Callback,
        HeldOut,
        LedgerRun,
        MovingAverage,
        Run,
        Trainer,
        Unprotected,
        evaluate,
    )

# Where each name is defined; `tests/test_house.py` compares this with the imports above.
_HOMES = {
    "tacit.accounting": "calibrate epsilon steps_within trade_off",
    "tacit.budget": "Budget Relation",
    "tacit.data": "RandomCropFlip load load_file release_statistics split_public",
    "tacit.engines": "gradient_rule",
    "tacit.ledger": "Ledger",
    "tacit.lipschitz": "lipschitz_twin project",
    "tacit.losses": "register_loss",
    "tacit.mechanism": "Mechanism PendingRelease",
    "tacit.models.make_trainable": "make_trainable",
    "tacit.noise": "GlobalNoise Noise OptimisedNoise PerLayerNoise",
    "tacit.queries": (
        "AdaptiveNorm BatchClip Clipless Normalise PerSampleClip by_layer by_parameter by_prefix"
    ),
    "tacit.records": "Records",
    "tacit.report": "save_run",
    "tacit.sampling": (
        "Batch FixedSizeSampler MiniSetSampler PoissonSampler Sampler Scheme "
        "ShuffleSampler Unit register_scheme"
    ),
    "tacit.statistics": "PublicStatistics ReleasedStatistics",
    "tacit.training": "Callback HeldOut LedgerRun MovingAverage Run Trainer Unprotected evaluate",
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [
    "AdaptiveNorm",
    "Batch",
    "BatchClip",
    "Budget",
    "Callback",
    "Clipless",
    "FixedSizeSampler",
    "GlobalNoise",
    "HeldOut",
    "Ledger",
    "LedgerRun",
    "Mechanism",
    "MiniSetSampler",
    "MovingAverage",
    "Noise",
    "Normalise",
    "OptimisedNoise",
    "PendingRelease",
    "PerLayerNoise",
    "PerSampleClip",
    "PoissonSampler",
    "PublicStatistics",
    "RandomCropFlip",
    "Records",
    "Relation",
    "ReleasedStatistics",
    "Run",
    "Sampler",
    "Scheme",
    "ShuffleSampler",
    "Trainer",
    "Unit",
    "Unprotected",
    "accounting",
    "by_layer",
    "by_parameter",
    "by_prefix",
    "calibrate",
    "certificates",
    "data",
    "diagnostics",
    "engines",
    "epsilon",
    "errors",
    "evaluate",
    "gradient_rule",
    "ledger",
    "lipschitz",
    "lipschitz_twin",
    "load",
    "load_file",
    "losses",
    "make_trainable",
    "models",
    "noise",
    "project",
    "queries",
    "register_loss",
    "register_scheme",
    "release_statistics",
    "sampling",
    "save_run",
    "split_public",
    "statistics",
    "steps_within",
    "trade_off",
    "training",
]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    elif name in __all__:
        value = importlib.import_module(f"tacit.{name}")
    else:
        raise AttributeError(f"module 'tacit' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
