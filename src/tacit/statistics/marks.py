"""Whose running statistics a module holds, and a refusal to let private ones out."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from tacit.errors import PrivateStatistics

_INITIAL = {"running_mean": 0, "running_var": 1, "num_batches_tracked": 0}
_MARK = "_origin_of_statistics"


def refuse_private_statistics(model: nn.Module) -> None:
    """Raise PrivateStatistics if a module holds running statistics that may be private.

    May be let out: the initial values (mean 0, variance 1, no batches), what `PublicStatistics`
    or `ReleasedStatistics` set, and what `declare_public` was told of. Each is known by a
    fingerprint of the values, so one forward pass that changes them makes them private again.
    Any module counts that has a buffer of one of the names running_mean, running_var and
    num_batches_tracked, whatever its class.
    """
    for name, module in model.named_modules():
        if not _statistics(module) or _untouched(module) or origin_of(module) is not None:
            continue
        kind = type(module).__name__
        where = f"module {name!r} ({kind})" if name else f"the model itself ({kind})"
        had = getattr(module, _MARK, None)
        changed = f"; they were {had[0]}, and have changed since" if had else ""
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

    It is a promise that nobody can check: make it of statistics that came with a pretrained
    network, before private records pass through it. It ends when the statistics change.
    """
    for module in model.modules():
        if _statistics(module):
            mark(module, "declared public")


def mark(module: nn.Module, origin: str) -> None:
    """Note where the statistics that the module holds now come from."""
    setattr(module, _MARK, (origin, _fingerprint(module)))


def origin_of(module: nn.Module) -> str | None:
    """Where its statistics come from; None if nobody said, or they have changed since."""
    origin, fingerprint = getattr(module, _MARK, (None, ""))
    return origin if origin is not None and fingerprint == _fingerprint(module) else None


def _statistics(module: nn.Module) -> dict[str, Tensor]:
    return {n: b for n, b in module.named_buffers(recurse=False) if n in _INITIAL}


def _untouched(module: nn.Module) -> bool:
    held = _statistics(module).items()
    return all(_shapeless(b) or bool((b == _INITIAL[n]).all()) for n, b in held)


def _fingerprint(module: nn.Module) -> str:
    """SHA-256 over names, types and bits of the statistics: NaN has one too."""
    digest = hashlib.sha256()
    for name, buffer in sorted(_statistics(module).items()):
        if _shapeless(buffer):
            continue
        digest.update(f"{name} {buffer.dtype} {tuple(buffer.shape)}".encode())
        values = buffer.detach().cpu().contiguous().flatten()
        digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _shapeless(buffer: Tensor) -> bool:
    """A lazy module's buffer, which has no values yet."""
    return isinstance(buffer, nn.UninitializedBuffer)
