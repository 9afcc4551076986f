"""The loop, and what hangs onto it."""

from tacit.training.callbacks import Callback, Evaluation
from tacit.training.evaluate import Metrics, evaluate
from tacit.training.held_out import Unprotected
from tacit.training.moving_average import MovingAverage
from tacit.training.progress import ProgressBar
from tacit.training.run import Run
from tacit.training.sparsification import Sparsification
from tacit.training.trainer import Trainer

__all__ = [
    "Callback",
    "Evaluation",
    "Metrics",
    "MovingAverage",
    "ProgressBar",
    "Run",
    "Sparsification",
    "Trainer",
    "Unprotected",
    "evaluate",
]
