"""Modules that let one record change another's output, refused by name."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from tacit.errors import MixesRecords


def mixes_records(model: nn.Module) -> bool:
    """Whether a known module of the model lets records of a batch meet."""
    try:
        refuse_mixing(model)
    except MixesRecords:
        return True
    return False


def refuse_mixing(model: nn.Module) -> None:
    """Raise MixesRecords if a module uses, or remembers, statistics of the batch.

    Batch statistics let one record move everyone's output, and so everyone's gradient: clipping
    each gradient bounds nothing. Frozen or `affine=False` does not help: the statistics are what
    mixes. In evaluation mode with fixed statistics records stay apart.
    """
    for name, module in model.named_modules():
        kind = type(module).__name__
        where = f"module {name!r} ({kind})" if name else f"the model itself ({kind})"
        # Without running statistics even evaluation mode normalises by the batch's own.
        batch_statistics = module.training or getattr(module, "running_mean", None) is None
        if isinstance(module, _BatchNorm) and batch_statistics:
            raise MixesRecords(
                f"{where} mixes records through batch statistics, so no record's share of the "
                "gradient is bounded; replace it by GroupNorm or LayerNorm, or keep it in "
                "evaluation mode with statistics from public data"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise MixesRecords(
                f"{where} has max_norm, which rewrites the rows that records ask for without any "
                "noise; build it without max_norm"
            )
        if isinstance(module, _InstanceNorm) and module.training and module.track_running_stats:
            raise MixesRecords(
                f"{where} keeps running statistics of the records it sees, which would be "
                "released without noise; build it with track_running_stats=False"
            )
