"""Tacit: train PyTorch models with differential privacy.

One accountant, one ledger, one training loop; the routes differ in how a gradient is bounded.
Names are imported when they are first used, so that `import tacit` and the command line's help
wait for nothing.
"""

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Where each name is defined; `tests/test_layout.py` compares this with the imports below.
_HOMES = {
    "tacit": (
        "accounting auditing certificates data diagnostics engines errors ledger lipschitz losses "
        "models noise queries report sampling statistics training"
    ),
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
    "tacit.report": "load_run save_run",
    "tacit.sampling": (
        "Batch FixedSizeSampler MiniSetSampler PoissonSampler Sampler Scheme "
        "ShuffleSampler Unit register_scheme"
    ),
    "tacit.statistics": "PublicStatistics ReleasedStatistics",
    "tacit.training": "Callback HeldOut LedgerRun MovingAverage Run Trainer Unprotected evaluate",
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

if TYPE_CHECKING:  # `as` says that a name is public
    from tacit import accounting as accounting
    from tacit import auditing as auditing
    from tacit import certificates as certificates
    from tacit import data as data
    from tacit import diagnostics as diagnostics
    from tacit import engines as engines
    from tacit import errors as errors
    from tacit import ledger as ledger
    from tacit import lipschitz as lipschitz
    from tacit import losses as losses
    from tacit import models as models
    from tacit import noise as noise
    from tacit import queries as queries
    from tacit import report as report
    from tacit import sampling as sampling
    from tacit import statistics as statistics
    from tacit import training as training
    from tacit.accounting import calibrate as calibrate
    from tacit.accounting import epsilon as epsilon
    from tacit.accounting import steps_within as steps_within
    from tacit.accounting import trade_off as trade_off
    from tacit.budget import Budget as Budget
    from tacit.budget import Relation as Relation
    from tacit.data import RandomCropFlip as RandomCropFlip
    from tacit.data import load as load
    from tacit.data import load_file as load_file
    from tacit.data import release_statistics as release_statistics
    from tacit.data import split_public as split_public
    from tacit.engines import gradient_rule as gradient_rule
    from tacit.ledger import Ledger as Ledger
    from tacit.lipschitz import lipschitz_twin as lipschitz_twin
    from tacit.lipschitz import project as project
    from tacit.losses import register_loss as register_loss
    from tacit.mechanism import Mechanism as Mechanism
    from tacit.mechanism import PendingRelease as PendingRelease
    from tacit.models.make_trainable import make_trainable as make_trainable
    from tacit.noise import GlobalNoise as GlobalNoise
    from tacit.noise import Noise as Noise
    from tacit.noise import OptimisedNoise as OptimisedNoise
    from tacit.noise import PerLayerNoise as PerLayerNoise
    from tacit.queries import AdaptiveNorm as AdaptiveNorm
    from tacit.queries import BatchClip as BatchClip
    from tacit.queries import Clipless as Clipless
    from tacit.queries import Normalise as Normalise
    from tacit.queries import PerSampleClip as PerSampleClip
    from tacit.queries import by_layer as by_layer
    from tacit.queries import by_parameter as by_parameter
    from tacit.queries import by_prefix as by_prefix
    from tacit.records import Records as Records
    from tacit.report.read_folder import load_run as load_run
    from tacit.report.run_folder import save_run as save_run
    from tacit.sampling import Batch as Batch
    from tacit.sampling import FixedSizeSampler as FixedSizeSampler
    from tacit.sampling import MiniSetSampler as MiniSetSampler
    from tacit.sampling import PoissonSampler as PoissonSampler
    from tacit.sampling import Sampler as Sampler
    from tacit.sampling import Scheme as Scheme
    from tacit.sampling import ShuffleSampler as ShuffleSampler
    from tacit.sampling import Unit as Unit
    from tacit.sampling import register_scheme as register_scheme
    from tacit.statistics import PublicStatistics as PublicStatistics
    from tacit.statistics import ReleasedStatistics as ReleasedStatistics
    from tacit.training import Callback as Callback
    from tacit.training import HeldOut as HeldOut
    from tacit.training import LedgerRun as LedgerRun
    from tacit.training import MovingAverage as MovingAverage
    from tacit.training import Run as Run
    from tacit.training import Trainer as Trainer
    from tacit.training import Unprotected as Unprotected
    from tacit.training import evaluate as evaluate
else:
    __all__ = sorted(_MODULE_OF)


def imported_when_used(package: str, module_of: dict[str, str]) -> Callable[[str], Any]:
    """`__getattr__` of a package whose names are imported from their modules when they are used."""

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = importlib.import_module(module_of[name])
        value = importlib.import_module(f"tacit.{name}") if home is root else getattr(home, name)
        setattr(sys.modules[package], name, value)
        return value

    root = sys.modules["tacit"]
    return get


__getattr__ = imported_when_used("tacit", _MODULE_OF)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
