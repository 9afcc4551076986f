"""`fit_lightning`: a LightningModule, trained with differential privacy.

Lightning's own loop calls `training_step` on a batch and `backward` on one number, the mean of the
batch. By then the records' gradients are added up, and clipping the sum bounds nothing. Its batches
come from a DataLoader, which shuffles, and ε of Poisson sampling does not hold for them. Callbacks
and hooks see the gradients before the noise. So there is no strategy or callback of Tacit for it:
each of these three would have to be taken away from the loop, and what is left is the loop's name.

What a module has beyond the loop is used: its network (`forward`), its `configure_optimizers`, and,
after training, the module itself, with `lightning.Trainer().validate(module, loader)`, `test`,
`predict` and checkpoints as ever.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from tacit.budget import Budget
from tacit.integrations.language_models import require
from tacit.losses.record_loss import losses_of, name_of
from tacit.noise import Noise
from tacit.pytrees import call_model
from tacit.queries.bounded_gradient import GradientQuery, Loss
from tacit.queries.per_sample_clip import PerSampleClip
from tacit.records import as_records
from tacit.sampling.poisson import PoissonSampler
from tacit.training import Callback, ProgressBar, Run
from tacit.training.trainer import Trainer

# Hooks of Lightning's loop that see batches or gradients, or change a step.
_HOOKS = (
    *("backward", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step"),
    *("configure_gradient_clipping", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_start"),
    *("on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end", "on_train_start"),
    *("transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer"),
)
_FEW = 4  # records on which training_step is compared with the loss


def fit_lightning(
    module: nn.Module,
    train: object,
    loss: Loss,
    *,
    epsilon: float,
    delta: float,
    expected_batch_size: int,
    max_epochs: float | None = None,
    max_steps: int | None = None,
    max_norm: float = 1.0,
    query: GradientQuery | None = None,
    noise_multiplier: float | None = None,
    max_physical_batch: int | None = None,
    public_size: int | None = None,
    evaluate_on: object = None,
    callbacks: Sequence[Callback] | None = None,
    ledger: Any = None,
    seed: int | None = None,
) -> Run:
    """Train a LightningModule in place within the budget, and return the run.

        run = fit_lightning(module, dataset, nn.CrossEntropyLoss(), epsilon=3.0, delta=1e-5,
            expected_batch_size=256, max_epochs=10, public_size=len(dataset))
        lightning.Trainer().validate(module, loader)

    `loss` takes the outputs of the module and the targets of `train`. It replaces `training_step`,
    which is not called to train: it is compared with the loss on a few records, without a gradient
    and on a copy, and a module whose `training_step` computes another number is refused.

    Guarantee: the weights are (ε, δ)-DP in the records of `train`, for neighbours of which one has
    a record more.

    Args:
        train: `tacit.Records`, a dataset, or a pair of tensors; no DataLoader, since batches are
            drawn here.
        max_epochs: expected passes over the data; or give `max_steps`.
        max_norm: the clipping norm of each record's gradient; or give a `query`.
        public_size: the number of records, declared public, unless `train` declares it.
        evaluate_on, callbacks, ledger, seed: of `tacit.Trainer`.
    """
    if not isinstance(module, require("lightning", "lightning").LightningModule):
        raise TypeError(
            f"module is a {type(module).__name__}; give a lightning.LightningModule, or train any "
            "other module with tacit.Trainer"
        )
    _refuse_hooks(module)
    records = as_records(train)
    if public_size is not None:
        records = replace(records, public_size=public_size)
    if (max_epochs is None) is (max_steps is None):
        raise ValueError("give one of max_epochs and max_steps")
    duration: dict[str, Any] = {"epochs": max_epochs} if max_steps is None else {"steps": max_steps}
    sampler = PoissonSampler(
        records,
        expected_batch_size=expected_batch_size,
        max_physical_batch=max_physical_batch,
        seed=seed,
        **duration,
    )
    _compare(module, loss, records)
    configured = _configured(module)
    epoch = max(1, round(1 / sampler.scheme.epochs(1)))
    return Trainer(
        module,
        loss,
        PerSampleClip(max_norm=max_norm) if query is None else query,
        sampler,
        configured.optimizer,
        Budget(epsilon, delta),
        noise=Noise(noise_multiplier),
        evaluate_on=evaluate_on,
        callbacks=[
            *([ProgressBar()] if callbacks is None else callbacks),
            *(_Schedule(s, epoch) for s in configured.schedules),
        ],
        ledger=ledger,
        seed=seed,
    ).fit()


def _refuse_hooks(module: Any) -> None:
    """Refuse what would be left out of training without a word."""
    if not module.automatic_optimization:
        raise ValueError(
            f"{type(module).__name__} optimises manually (automatic_optimization is False), so its "
            "training_step decides what a step is, and nothing bounds it; train its networks with "
            "tacit.Trainer"
        )
    base = require("lightning", "lightning").LightningModule
    changed = [h for h in _HOOKS if getattr(type(module), h, None) is not getattr(base, h, None)]
    if changed:
        raise ValueError(
            f"{type(module).__name__} overrides {changed[0]}, which private training does not "
            "call; move what it does into the network, the loss or a tacit.Callback, and remove it"
        )


def _compare(module: nn.Module, loss: Loss, records: Any) -> None:
    """Refuse a `training_step` that computes another number than the loss, such as with a penalty.

    A copy is asked, in evaluation mode: a step may count in metrics, which must not keep anything
    of private records.
    """
    few = records.take(slice(_FEW)).read()
    if len(few) == 0:
        return
    first = next(module.parameters())
    few = few.to(first.device, first.dtype)
    try:
        copied: Any = copy.deepcopy(module).eval()
    except Exception:  # whatever an object of the user's raises
        return
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of self.log without a trainer
        expected = float(losses_of(loss, call_model(copied, few.inputs), few.targets).mean())
        try:
            found = copied.training_step((few.inputs, few.targets), 0)
        except Exception as error:  # a step may take batches of any form
            said = (str(error).splitlines() or [""])[0]
            raise ValueError(
                f"{type(module).__name__}.training_step cannot be run on (inputs, targets) to "
                f"compare it with the loss ({type(error).__name__}: {said}); have it take such a "
                "pair, without using self.trainer"
            ) from error
    value = float(found["loss"] if isinstance(found, Mapping) else found)
    if abs(value - expected) > 1e-3 * max(1.0, abs(expected)):
        raise ValueError(
            f"{type(module).__name__}.training_step gives {value:.4g} for the first {len(few)} "
            f"records, and {name_of(loss)} of the module's outputs {expected:.4g}; give the loss "
            "that training_step computes, penalties included, as a function of outputs and targets"
        )


class _Configured(NamedTuple):
    """What `configure_optimizers` gives."""

    optimizer: torch.optim.Optimizer
    schedules: list[dict[str, Any]]


def _configured(module: Any) -> _Configured:
    try:
        given = module.configure_optimizers()
    except RuntimeError as error:  # of self.trainer without one
        raise ValueError(
            f"{type(module).__name__}.configure_optimizers cannot be called without a Trainer of "
            f"Lightning ({str(error).splitlines()[0]}); have it take numbers of steps from the "
            "module's own arguments"
        ) from error
    schedules: Any = []
    if isinstance(given, Mapping):
        schedules = [given["lr_scheduler"]] if given.get("lr_scheduler") is not None else []
        given = given["optimizer"]
    elif isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], list | tuple):
        given, schedules = given
    optimizers = list(given) if isinstance(given, list | tuple) else [given]
    if len(optimizers) != 1 or not isinstance(optimizers[0], torch.optim.Optimizer):
        raise ValueError(
            f"{type(module).__name__}.configure_optimizers gives "
            f"{len([o for o in optimizers if o is not None])} optimizers, and a step is released "
            "once, to one; give one optimizer with groups of parameters"
        )
    plain = [dict(s) if isinstance(s, Mapping) else {"scheduler": s} for s in schedules]
    for schedule in plain:
        if isinstance(schedule["scheduler"], torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError(
                "ReduceLROnPlateau follows a metric during training; give a scheduler that follows "
                "the steps"
            )
    return _Configured(optimizers[0], plain)


class _Schedule(Callback):
    """Steps a scheduler as Lightning does: after each epoch, or each step, or every few of them."""

    def __init__(self, schedule: Mapping[str, Any], epoch: int) -> None:
        unit = 1 if schedule.get("interval", "epoch") == "step" else epoch
        self.scheduler = schedule["scheduler"]
        self.every = unit * int(schedule.get("frequency", 1))

    def on_step(self, trainer: Trainer, step: int) -> None:
        if step % self.every == 0:
            self.scheduler.step()
