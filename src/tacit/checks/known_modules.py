"""PyTorch's own modules that mix records, keep statistics or rewrite weights: refused by name."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from tacit.errors import MixesRecords


def refuse_mixing(model: nn.Module) -> None:
    """Raise MixesRecords if a module uses, or keeps, statistics of the batch.

    Batch statistics let one record move everyone's output, and so everyone's gradient: clipping
    each gradient bounds nothing. Frozen or `affine=False` does not help: the statistics are what
    mixes. In evaluation mode with fixed statistics records stay apart.
    """
    for module in model.modules():
        # Without running statistics even evaluation mode normalises by the batch's own.
        batch_statistics = module.training or getattr(module, "running_mean", None) is None
        if isinstance(module, _BatchNorm) and batch_statistics:
            raise MixesRecords(
                f"{_called(module, model)} mixes records through batch statistics, so no record's "
                "share of the gradient is bounded; replace it by GroupNorm or LayerNorm, or keep "
                "it in evaluation mode with statistics from public data"
            )
        if isinstance(module, _InstanceNorm) and module.training and module.track_running_stats:
            raise MixesRecords(
                f"{_called(module, model)} keeps running statistics of the records it sees, which "
                "would be released without noise; build it with track_running_stats=False"
            )
        refuse_rewriting(module, model)


MAY_REWRITE = nn.Embedding, nn.EmbeddingBag, nn.SyncBatchNorm


def refuse_rewriting(module: nn.Module, model: nn.Module) -> None:
    """Raise MixesRecords if the module rewrites its weights, or normalises across processes."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        raise MixesRecords(
            f"{_called(module, model)} has max_norm, which rewrites the rows that records ask for "
            "without any noise; build it without max_norm"
        )
    if isinstance(module, nn.SyncBatchNorm) and torch.distributed.is_initialized():
        raise MixesRecords(
            f"{_called(module, model)} normalises by the records of all processes together, so "
            "their mini-sets are mixed; use BatchNorm, which sees one mini-set at a time"
        )


def _called(module: nn.Module, model: nn.Module) -> str:
    kind = type(module).__name__
    name = next(name for name, found in model.named_modules() if found is module)
    return f"module {name!r} ({kind})" if name else f"the model itself ({kind})"
