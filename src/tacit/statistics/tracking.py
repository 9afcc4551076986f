"""BatchNorm that normalises by the batch's own statistics and remembers nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from tacit.errors import UnsupportedModule

_BATCH_NORM_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
_APPLY = "_apply_instance_norm"


@contextmanager
def without_running_statistics(model: nn.Module) -> Iterator[None]:
    """Within it, no forward pass of the model changes its running statistics, bit for bit.

    In training mode BatchNorm computes γ·(x − mean_B)/√(var_B + ε) + β from its batch B, and then
    moves running_mean and running_var towards mean_B and var_B. The first is covered by a clip of
    what the batch adds; the second is a release without noise. Here the second does not take
    place: `track_running_stats` is off, so that PyTorch is handed no buffers to write to.
    InstanceNorm writes to its buffers whatever that switch says, so its call is made without them.

    Evaluation mode is as ever: frozen statistics are used and stay. Nothing is copied, nothing is
    read back from a GPU, and modules are as they were when it ends, also by an exception; within
    it `functional_call`, `vmap` and the capture of CUDA graphs work. The capture of a graph must
    be within it, its replays need not.

    Raises UnsupportedModule for a BatchNorm whose forward pass is not PyTorch's own, since what
    that one remembers is not known, and for a lazy one that has no channels yet.
    """
    batch_norms: list[_BatchNorm] = []
    instance_norms: list[_InstanceNorm] = []
    for name, module in model.named_modules():
        if not remembers(module):
            continue
        _require_known(name, module)
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            batch_norms.append(module)
        if isinstance(module, _InstanceNorm) and _APPLY not in vars(module):
            instance_norms.append(module)
    try:
        for batch_norm in batch_norms:
            batch_norm.track_running_stats = False
        for instance_norm in instance_norms:
            vars(instance_norm)[_APPLY] = partial(_instance_norm, instance_norm)
        yield
    finally:
        for batch_norm in batch_norms:
            batch_norm.track_running_stats = True
        for instance_norm in instance_norms:
            vars(instance_norm).pop(_APPLY, None)


def remembers(module: nn.Module) -> bool:
    """Whether the module is a BatchNorm or an InstanceNorm with running statistics."""
    return isinstance(module, _BatchNorm | _InstanceNorm) and module.running_mean is not None


def unfrozen_norms(model: nn.Module) -> dict[str, nn.Module]:
    """The modules, by name, whose running statistics training would change.

    All that remember, but those kept in evaluation mode while the model itself is in training.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if remembers(module) and (module.training or not model.training)
    }


def _instance_norm(module: _InstanceNorm, x: Tensor) -> Tensor:
    own = module.training or not module.track_running_stats
    mean, variance = (None, None) if own else (module.running_mean, module.running_var)
    return F.instance_norm(x, mean, variance, module.weight, module.bias, own, 0.0, module.eps)


def _require_known(name: str, module: nn.Module) -> None:
    kind = type(module)
    where = f"module {name!r}" if name else "the model itself"
    if getattr(module, "num_features", None) == 0:
        raise UnsupportedModule(
            f"{where} ({kind.__name__}) does not know its channels yet; run one batch of zeros "
            "through the model in evaluation mode first"
        )
    if isinstance(module, _BatchNorm):
        known = kind.forward in _BATCH_NORM_FORWARDS
    else:
        own = (_InstanceNorm.forward, _InstanceNorm._apply_instance_norm)
        known = (kind.forward, kind._apply_instance_norm) == own  # type: ignore[attr-defined]
    if not known or "forward" in vars(module):
        raise UnsupportedModule(
            f"{where} ({kind.__name__}) has a forward pass of its own, and what it remembers of "
            "the records is not known; use PyTorch's BatchNorm, or make_trainable(model)"
        )
