"""Running statistics in a model: training without them, and refusing to save private ones.

`without_running_statistics` keeps BatchNorm from writing them during training, and
`refuse_private_statistics` stops those of private records from being saved. Both modes of a model,
evaluation and training, can be set here without unfreezing a frozen norm.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.errors import PrivateStatistics, UnsupportedModule
from tacit.torch_internals import INSTANCE_NORM_METHOD, BatchNorm, InstanceNorm

_INITIAL = {"running_mean": 0, "running_var": 1, "num_batches_tracked": 0}
_ORIGIN = "_origin_of_statistics"


def refuse_private_statistics(model: nn.Module) -> None:
    """Raise PrivateStatistics if a module holds running statistics that may be private.

    May be saved: the initial values (mean 0, variance 1, no batches), what `PublicStatistics`
    or `ReleasedStatistics` set, and what was declared with `declare_public`. Each is known by a
    fingerprint of the values, so one forward pass that changes them makes them private again.
    Any module counts that has a buffer of one of the names running_mean, running_var and
    num_batches_tracked, whatever its class.
    """
    for name, module in model.named_modules():
        if all(bool((b == _INITIAL[n]).all()) for n, b in _statistics(module).items()):
            continue
        origin, fingerprint = getattr(module, _ORIGIN, (None, None))
        if fingerprint == _fingerprint(module):
            continue
        kind = type(module).__name__
        where = f"module {name!r} ({kind})" if name else f"the model itself ({kind})"
        changed = f"; they were {origin}, and have changed since" if origin else ""
        raise PrivateStatistics(
            f"{where} holds running statistics of records that nobody declared public, and to "
            f"save them is to release them without noise{changed}. Set them with "
            "PublicStatistics(public, set_size).apply(model), give the Trainer "
            "statistics=ReleasedStatistics(...), or replace the module: make_trainable(model). "
            "If they never saw a private record, as in a pretrained network that stays in "
            "evaluation mode, say so once, before training: declare_public(model)"
        )


def declare_public(model: nn.Module) -> None:
    """Declare that the running statistics in the model, as they are now, hold nothing private.

    Tacit cannot check this promise. Make it for statistics that came with a pretrained
    network, before private records pass through it. It ends when the statistics change.
    """
    for module in model.modules():
        if _statistics(module):
            set_origin(module, "declared public")


def set_origin(module: nn.Module, origin: str) -> None:
    """Record where the module's current statistics come from."""
    setattr(module, _ORIGIN, (origin, _fingerprint(module)))


def origins_of(model: nn.Module) -> dict[str, str]:
    """By module, where its current statistics come from, if that is known."""
    known = {name: getattr(module, _ORIGIN, (None, None)) for name, module in model.named_modules()}
    return {name: origin for name, (origin, _) in known.items() if origin is not None}


def _statistics(module: nn.Module) -> dict[str, Tensor]:
    """The running statistics that it holds; a lazy module's have no values yet."""
    return {
        name: buffer
        for name, buffer in module.named_buffers(recurse=False)
        if name in _INITIAL and not isinstance(buffer, nn.UninitializedBuffer)
    }


def _fingerprint(module: nn.Module) -> str:
    """SHA-256 over names, types and bits of the statistics: NaN has one too."""
    digest = hashlib.sha256()
    for name, buffer in sorted(_statistics(module).items()):
        digest.update(f"{name} {buffer.dtype} {tuple(buffer.shape)}".encode())
        values = buffer.detach().cpu().contiguous().flatten()
        digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def without_running_statistics(model: nn.Module) -> Iterator[None]:
    """Inside, no forward pass of the model changes its running statistics, bit for bit.

    In training mode BatchNorm computes γ·(x − mean_B)/√(var_B + ε) + β from its batch B, and then
    moves running_mean and running_var towards mean_B and var_B. The first is covered by a clip of
    what the batch adds; the second is a release without noise. Here the second does not take
    place: `track_running_stats` is off, so that PyTorch is handed no buffers to write to.
    InstanceNorm writes to its buffers whatever that switch says, so its call is made without them.

    Evaluation mode is unchanged: frozen statistics are used and kept. Nothing is copied or read
    back from a GPU. At the end, also after an exception, modules are as they were. Inside,
    `functional_call`, `vmap` and the capture of CUDA graphs work. The capture of a graph must be
    inside; its replays need not.

    Raises UnsupportedModule for a BatchNorm whose forward pass is not PyTorch's own, since it is
    not known what that stores, and for a lazy one that has no channels yet.
    """
    norms = {name: m for name, m in model.named_modules() if tracks_statistics(m)}
    for name, module in norms.items():
        _require_known(name, module)
    batch_norms = [m for m in norms.values() if isinstance(m, BatchNorm) and m.track_running_stats]
    instance_norms = [
        m
        for m in norms.values()
        if isinstance(m, InstanceNorm) and INSTANCE_NORM_METHOD not in vars(m)
    ]
    try:
        for batch_norm in batch_norms:
            batch_norm.track_running_stats = False
        for instance_norm in instance_norms:
            vars(instance_norm)[INSTANCE_NORM_METHOD] = partial(_instance_norm, instance_norm)
        yield
    finally:
        for batch_norm in batch_norms:
            batch_norm.track_running_stats = True
        for instance_norm in instance_norms:
            vars(instance_norm).pop(INSTANCE_NORM_METHOD, None)


def tracks_statistics(module: nn.Module) -> bool:
    """Whether the module is a BatchNorm or an InstanceNorm with running statistics."""
    return isinstance(module, BatchNorm | InstanceNorm) and module.running_mean is not None


def unfrozen_norms(model: nn.Module) -> dict[str, nn.Module]:
    """The modules, by name, whose running statistics training would change.

    Not those kept in evaluation mode while the model itself is in training.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if tracks_statistics(module) and (module.training or not model.training)
    }


def _instance_norm(module: InstanceNorm, x: Tensor) -> Tensor:
    of_input = module.training or not module.track_running_stats
    mean, variance = (None, None) if of_input else (module.running_mean, module.running_var)
    return F.instance_norm(x, mean, variance, module.weight, module.bias, of_input, 0.0, module.eps)


def _require_known(name: str, module: nn.Module) -> None:
    kind = type(module)
    where = f"module {name!r}" if name else "the model itself"
    if getattr(module, "num_features", None) == 0:
        raise UnsupportedModule(
            f"{where} ({kind.__name__}) does not know its channels yet; run one batch of zeros "
            "through the model in evaluation mode first"
        )
    if isinstance(module, BatchNorm):
        known = kind.forward in (BatchNorm.forward, nn.SyncBatchNorm.forward)
    else:
        methods = ("forward", INSTANCE_NORM_METHOD)
        known = all(getattr(kind, m) is getattr(InstanceNorm, m) for m in methods)
    if not known or "forward" in vars(module):
        raise UnsupportedModule(
            f"{where} ({kind.__name__}) has a forward pass of its own, and what it stores of "
            "the records is not known; use PyTorch's BatchNorm, or make_trainable(model)"
        )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; afterwards each module is in the mode that it had.

    `model.train()` would unfreeze a BatchNorm that somebody keeps in evaluation mode.
    """
    modes = [(module, module.training) for module in model.modules()]
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
        for module, training in modes:
            module.training = training


def train_unfrozen(model: nn.Module) -> None:
    """Set training mode, except for norms that are frozen in a model that trains."""
    frozen = [
        m for m in model.modules() if model.training and tracks_statistics(m) and not m.training
    ]
    model.train()
    for module in frozen:
        module.eval()
