"""The training loop and what goes with it: evaluation, callbacks and the finished run.

`Trainer` runs the pipe: sampler, query, mechanism, ledger, optimizer. `Run` is what it returns.
Whoever writes their own loop needs `tacit.Mechanism` and `tacit.Ledger` and nothing from here.
"""

from tacit.training.callbacks import (
    Callback,
    Evaluation,
    MovingAverage,
    ProgressBar,
    Sparsification,
)
from tacit.training.checkpoint import Checkpoint, Stateful
from tacit.training.evaluation import Metrics, evaluate
from tacit.training.preconditions import HeldOut, LedgerRun, Unprotected
from tacit.training.run import Run, summary_text
from tacit.training.trainer import Trainer

__all__ = [
    "Callback",
    "Checkpoint",
    "Evaluation",
    "HeldOut",
    "LedgerRun",
    "Metrics",
    "MovingAverage",
    "ProgressBar",
    "Run",
    "Sparsification",
    "Stateful",
    "Trainer",
    "Unprotected",
    "evaluate",
    "summary_text",
]
