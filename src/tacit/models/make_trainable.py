"""Replaces the parts of a model that mix records, such as BatchNorm, and reports each change."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from tacit.checks.isolation import refuse_mixing
from tacit.errors import MixesRecords, UnsupportedModule
from tacit.models.residual import Norm, WeightStandardised, WeightStandardisedConv2d, group_norm
from tacit.torch_internals import BatchNorm, InstanceNorm, tables_of

SIXTEEN_GROUPS = group_norm(16)
_BATCH_NORM_FORWARDS = (BatchNorm.forward, nn.SyncBatchNorm.forward)
_BATCH_NORM_STATE = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}


class Trainable(NamedTuple):
    """A model that keeps records apart, and in words what was changed to make it one."""

    model: nn.Module
    changes: tuple[str, ...]


def make_trainable(model: nn.Module, norm: Norm | WeightStandardised = SIXTEEN_GROUPS) -> Trainable:
    """A copy of the model in which no module mixes records, and what was changed in it.

    BatchNorm, in either mode, becomes `norm(channels)`, by default GroupNorm, with the same
    weights, followed by the activation and dropout that some libraries put inside it. Running
    statistics of InstanceNorm and max_norm of embeddings are dropped. Shared modules and tied
    weights stay so. The changed layers compute a different function: train or fine-tune the result.

    `norm=WeightStandardised()` also standardises the weights of the convolution that feeds a
    BatchNorm: the `nn.Conv2d` that the same parent registered just before it, with as many filters
    as the norm has channels. The forward pass is not examined.

    Raises MixesRecords or UnsupportedModule for parts that it cannot replace.

        model, changes = tacit.make_trainable(torchvision.models.resnet18(num_classes=10))
    """
    changes: list[str] = []
    # deepcopy takes the entries of its memo for copied already, so every reference to a replaced
    # module or to its weights becomes one to the replacement.
    memo: dict[int, Any] = {}
    feeding = _feeding(model) if isinstance(norm, WeightStandardised) else set()
    make_norm = norm.norm if isinstance(norm, WeightStandardised) else norm
    for module, names in _paths(model).items():
        where = _where(names)
        if isinstance(module, BatchNorm):
            replacement: nn.Module = _normalisation(module, where, make_norm, memo)
            why = "batch statistics mix records"
        elif module in feeding:
            assert isinstance(module, nn.Conv2d)
            replacement = _standardised(module, memo)
            why = "it feeds a BatchNorm, and standardised weights stand in for a part of it"
        else:
            continue
        memo[id(module)] = replacement
        changes.append(f"{where}: {_brief(module)} → {_brief(replacement)}: {why}")
    copied = copy.deepcopy(model, memo)
    for module, names in _paths(copied).items():
        words = _simplified(module)
        if words is not None:
            changes.append(f"{_where(names)}: {words}")
    refuse_mixing(copied)
    return Trainable(copied, tuple(changes))


def _normalisation(
    module: BatchNorm, where: str, make_norm: Norm, memo: dict[int, Any]
) -> nn.Module:
    """The norm for as many channels, with the BatchNorm's weights, ε, mode, dtype and device."""
    kind = type(module)
    if module.num_features == 0:
        raise UnsupportedModule(
            f"{where} ({kind.__name__}) does not know its channels yet; run one batch of zeros "
            "through the model, and then make it trainable"
        )
    own = tables_of(module)
    state = {*own.parameters, *own.buffers}
    plain = kind.forward in _BATCH_NORM_FORWARDS and not own.children
    if not state <= _BATCH_NORM_STATE or not (plain or _is_followed_by_its_children(module)):
        raise MixesRecords(
            f"{where} ({kind.__name__}) mixes records through batch statistics, and does more "
            "than the BatchNorm it is derived from, which a replacement would lose; replace it "
            "by hand"
        )
    if isinstance(module, nn.BatchNorm1d) and module.num_features == 1:
        raise MixesRecords(
            f"{where} (BatchNorm1d) mixes records through batch statistics, and has one channel, "
            "which normalised by itself would be zero; remove it"
        )
    norm = make_norm(module.num_features)
    tensors = chain(module.parameters(), module.buffers())
    like = next((t for t in tensors if t.is_floating_point()), None)
    if like is not None:
        norm.to(like.device, like.dtype)
    for name in ("weight", "bias"):
        given, initial = getattr(module, name), getattr(norm, name, None)
        if given is None and isinstance(norm, nn.GroupNorm):
            norm.affine = False
            setattr(norm, name, None)
        elif given is not None and initial is not None and given.shape == initial.shape:
            setattr(norm, name, copy.deepcopy(given, memo))
    if isinstance(norm, nn.GroupNorm):
        norm.eps = module.eps
    if not plain:
        after = copy.deepcopy(own.children, memo)
        norm = nn.Sequential(OrderedDict({"norm": norm, **after}))  # type: ignore[dict-item]
    return norm.train(module.training)


def _is_followed_by_its_children(module: BatchNorm) -> bool:
    """Whether the module is a BatchNorm followed by its children in order.

    timm has such layers, which normalise, drop and activate. The test is numerical, in evaluation
    mode, because a subclass's forward pass may do anything.
    """
    copied = copy.deepcopy(module).eval()
    tensors = chain(copied.parameters(), copied.buffers())
    like = next((t for t in tensors if t.is_floating_point()), None)
    if like is None or copied.running_mean is None:
        return False
    shape = {nn.BatchNorm1d: (), nn.BatchNorm2d: (5, 3), nn.BatchNorm3d: (2, 5, 3)}
    sizes = next((size for base, size in shape.items() if isinstance(module, base)), None)
    if sizes is None:
        return False
    x = torch.linspace(-3, 3, 2 * math.prod((module.num_features, *sizes)))
    x = x.to(like).reshape(2, module.num_features, *sizes)
    try:
        with torch.no_grad():
            expected = BatchNorm.forward(copied, x)
            for child in copied.children():
                expected = child(expected)
            return bool(torch.allclose(copied(x), expected))
    except Exception:  # a forward pass that takes something else
        return False


def _standardised(module: nn.Conv2d, memo: dict[int, Any]) -> WeightStandardisedConv2d:
    names = "in_channels out_channels kernel_size stride padding dilation groups padding_mode"
    settings: Any = {name: getattr(module, name) for name in names.split()}
    settings |= {"bias": module.bias is not None, "device": "meta"}  # its weights are replaced
    conv = WeightStandardisedConv2d(**settings)
    conv.weight, conv.bias = copy.deepcopy((module.weight, module.bias), memo)
    return conv.train(module.training)


def _feeding(model: nn.Module) -> set[nn.Module]:
    """The convolutions that a parent registered just before a BatchNorm of as many channels."""
    return {
        before
        for parent in model.modules()
        for before, after in pairwise(tables_of(parent).children.values())
        if type(before) is nn.Conv2d
        and isinstance(after, BatchNorm)
        and before.out_channels == after.num_features
        and before.weight[0].numel() > 1  # one number less its own mean is zero
    }


def _simplified(module: nn.Module) -> str | None:
    """Switch off the options that mix records. Returns the change in words, or None."""
    kind = type(module).__name__
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        was, module.max_norm = f"max_norm={module.max_norm:g}", None
        return f"{kind} with {was} → without: it rewrites the rows that records read"
    if isinstance(module, InstanceNorm) and module.track_running_stats:
        module.track_running_stats = False
        module.running_mean = module.running_var = module.num_batches_tracked = None
        was = "running statistics"
        return f"{kind}({module.num_features}) with {was} → without: they are not noised"
    return None


def _paths(model: nn.Module) -> dict[nn.Module, list[str]]:
    """All names of each module; a shared module has several."""
    paths: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(name)
    return paths


def _where(names: list[str]) -> str:
    if names == [""]:
        return "the model itself"
    quoted = [repr(name) for name in names]
    return f"layer {quoted[0]}" if len(quoted) == 1 else f"layer {' = '.join(quoted)}"


def _brief(module: nn.Module) -> str:
    kind = type(module).__name__
    if isinstance(module, BatchNorm):
        return f"{kind}({module.num_features})"
    if isinstance(module, nn.GroupNorm):
        return f"{kind}({module.num_groups}, {module.num_channels})"
    if isinstance(module, nn.Conv2d):
        return f"{kind}({module.in_channels}, {module.out_channels})"
    if isinstance(module, nn.Sequential):
        return " and ".join(map(_brief, module))
    return repr(module)
