"""The loop, and what hangs onto it."""

from tacit.training.callbacks import (
    Callback,
    Evaluation,
    MovingAverage,
    ProgressBar,
    Sparsification,
)
from tacit.training.evaluation import Metrics, evaluate
from tacit.training.preconditions import HeldOut, LedgerRun, Unprotected
from tacit.training.run import Run, summary_text
from tacit.training.trainer import Trainer

__all__ = [
    "Callback",
    "Evaluation",
    "HeldOut",
    "LedgerRun",
    "Metrics",
    "MovingAverage",
    "ProgressBar",
    "Run",
    "Sparsification",
    "Trainer",
    "Unprotected",
    "evaluate",
    "summary_text",
]
