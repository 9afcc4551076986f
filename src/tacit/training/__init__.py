"""The training loop and what goes with it: evaluation, callbacks and the finished run.

`Trainer` runs the pipe: sampler, query, mechanism, ledger, optimizer. `Run` is what it returns.
Whoever writes their own loop needs `tacit.Mechanism` and `tacit.Ledger` and nothing from here.
"""

from typing import TYPE_CHECKING

from tacit import imported_when_used

if TYPE_CHECKING:
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

_HOMES = {
    "callbacks": ("Callback", "Evaluation", "MovingAverage", "ProgressBar", "Sparsification"),
    "checkpoint": ("Checkpoint", "Stateful"),
    "evaluation": ("Metrics", "evaluate"),
    "preconditions": ("HeldOut", "LedgerRun", "Unprotected"),
    "run": ("Run", "summary_text"),
    "trainer": ("Trainer",),
}
# Whoever evaluates or predicts need not wait for what trains.
__getattr__ = imported_when_used(
    __name__, {name: f"{__name__}.{home}" for home, names in _HOMES.items() for name in names}
)
