"""`losses_of`: the loss of each record on its own, whatever the loss's reduction over records.

Losses whose records stay apart by construction are evaluated on the whole batch at once; any other
that gives one number is evaluated on batches of one record.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from tacit.losses.record_loss import (
    LipschitzSum,
    RecordLoss,
    WeightedSum,
    WithConstant,
    name_of,
    tensors_for,
)
from tacit.losses.task import TORCH_LOSSES
from tacit.pytrees import Tree, logits_of, map_leaves, named_leaves, tensors_of, with_tensors


def losses_of(loss: Callable[..., Tensor], outputs: Tree, targets: Tree) -> Tensor:
    """ℓ_i = loss(outputs of record i, targets of record i), one number per record: (B,).

    - Tacit's losses, and those of `torch.nn` and `torch.nn.functional`, are evaluated on the whole
      batch at once. They take one tensor: where a model returns several, its `logits`. With
      reduction "mean" each record is divided by its own count (or class weights), as in a batch of
      one; a record whose targets are all ignored has loss 0, where PyTorch gives 0/0.
    - Any other callable is given all outputs. One number per record, shape (B,), is used as it is;
      the certificate of the model proves that records stay apart in it. If it gives a single number
      (a mean or a sum over the batch), the loss is evaluated on batches of one record: by `vmap`,
      or in a loop where `vmap` cannot.
    """
    kind: Any = type(loss)
    if kind is WithConstant:
        return losses_of(loss.loss, outputs, targets)  # type: ignore[attr-defined]
    if kind is WeightedSum or kind is LipschitzSum:
        assert isinstance(loss, WeightedSum)
        # Each part by its own right: one of them may be a user's.
        each = (losses_of(part, outputs, targets) for part in loss.parts)
        return torch.stack([w * l_B for w, l_B in zip(loss.weights, each, strict=True)]).sum(dim=0)
    if isinstance(loss, RecordLoss):
        h, y = tensors_for(loss, outputs, targets)
        # By exact type, since a subclass may let records meet.
        return loss.per_record(h, y) if _is_ours(kind) else _taken_apart(loss, h, y)
    known = _TorchLoss.of(loss)
    if known is not None:
        h, y = tensors_for(loss, outputs, targets)
        found = known.per_record(h, y)
        return _taken_apart(loss, h, y) if found is None else found
    return _of_callable(loss, outputs, targets)


@functools.cache
def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("tacit.losses.")


class _TorchLoss:
    """One of PyTorch's losses, by its unreduced form and what its mean divides by."""

    def __init__(self, name: str, unreduced: Callable[..., Tensor], options: dict[str, Any]):
        self.name, self.unreduced, self.options = name, unreduced, options

    @classmethod
    def of(cls, loss: Any) -> _TorchLoss | None:
        if isinstance(loss, nn.Module):
            if type(loss) not in TORCH_LOSSES or "forward" in vars(loss):
                return None
            options = {key: getattr(loss, key) for key in _OPTIONS if hasattr(loss, key)}
            # A copy, so that the user's own keeps its reduction; `copy.copy` takes 20 µs.
            unreduced = type(loss).__new__(type(loss))
            vars(unreduced).update(vars(loss), reduction="none")
            return cls(TORCH_LOSSES[type(loss)][0], unreduced, options)
        partial = isinstance(loss, functools.partial)
        name = _FUNCTIONS.get(id(loss.func if partial else loss))
        if name is None or (
            partial and (loss.args or {"reduce", "size_average"} & set(loss.keywords))
        ):
            return None
        return cls(
            name,
            functools.partial(loss, reduction="none"),
            {"reduction": "mean", **(loss.keywords if partial else {})},
        )

    def per_record(self, h: Tensor, y: Tensor) -> Tensor | None:
        """ℓ_i of each record; None where the batch might not be its records one by one."""
        by_class = self.name in ("cross_entropy", "nll_loss")
        weights = [w for w in map(self.options.get, ("weight", "pos_weight")) if w is not None]
        # (B, 1) against (B,) broadcasts to B² pairs, and weights of B rows meet other records.
        pairs = h.shape == y.shape and all(w.dim() < h.dim() for w in weights)
        if not (by_class or pairs or self.name in _BY_ROW):
            return None
        each = self.unreduced(h, y)
        reduction = self.options["reduction"]
        if reduction == "none":
            return _one_per_record(each, len(h), self.name)
        each = each.flatten(1) if each.dim() > 1 else each.unsqueeze(1)
        if reduction == "mean" and by_class and not y.is_floating_point():
            return self._mean_over_classes(each, y)
        return each.mean(dim=1) if reduction == "mean" else each.sum(dim=1)

    def _mean_over_classes(self, each: Tensor, y: Tensor) -> Tensor:
        """Σ_t ℓ_t / Σ_t w(y_t) over the positions t that are not ignored."""
        weight, ignored = self.options.get("weight"), self.options.get("ignore_index", -100)
        if weight is None and y.dim() == 1:
            return each.squeeze(1)
        y = y.reshape(len(y), -1)
        kept = y != ignored
        if weight is None:
            total = kept.sum(dim=1)
        else:
            if y.shape[1] == 1:
                warnings.warn(_WEIGHTS_CANCEL, stacklevel=4)
            total = torch.where(kept, weight[torch.where(kept, y, 0)], 0.0).sum(dim=1)
        return each.sum(dim=1) / torch.where(total > 0, total, 1)


_WEIGHTS_CANCEL = (
    "class weights with reduction='mean' cancel: the mean of one record divides by its own weight; "
    "give reduction='none', and each record's loss is multiplied by the weight of its class"
)
_OPTIONS = ("reduction", "weight", "pos_weight", "ignore_index")
_BY_ROW = ("multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss")
# By identity: a user's function may have the same name.
_FUNCTIONS = {id(getattr(F, name)): name for name, _ in TORCH_LOSSES.values()}


def _of_callable(loss: Callable[..., Tensor], outputs: Tree, targets: Tree) -> Tensor:
    rows = _num_records(outputs, targets)
    if rows == 0 or _holds(_one_number, loss):
        return _taken_apart(loss, outputs, targets)
    value = loss(outputs, targets)
    if not isinstance(value, Tensor):
        raise ValueError(f"{name_of(loss)} returns {value!r}; return one number per record")
    if value.dim() or rows == 1:
        return _one_per_record(value, rows, name_of(loss))
    _add(_one_number, loss)
    return _taken_apart(loss, outputs, targets)


def _taken_apart(loss: Callable[..., Tensor], outputs: Tree, targets: Tree) -> Tensor:
    """The loss of batches of one record: exact for every loss."""
    rows = _num_records(outputs, targets)
    left_out = [
        place
        for name, tree in (("outputs", outputs), ("targets", targets))
        for place, leaf in named_leaves(tree, name)
        if not _has_rows(leaf, rows)
    ]
    if left_out:  # such as a mean over all records, which no record may see
        outputs, targets = (
            map_leaves(lambda leaf: leaf if _has_rows(leaf, rows) else None, tree)
            for tree in (outputs, targets)
        )
    tree = (outputs, targets)
    tensors = tensors_of(tree)

    def of_one(*record: Tensor) -> Tensor:
        h, y = with_tensors(tree, [t.unsqueeze(0) for t in record])
        value = loss(h, y)
        if not isinstance(value, Tensor):
            raise ValueError(f"{name_of(loss)} returns {value!r} for one record")
        return _one_per_record(value, 1, name_of(loss)).squeeze(0)

    if not _holds(_loops, loss):
        try:
            return vmap(of_one, randomness="different")(*tensors)
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
    if rows == 0:
        return tensors[0].flatten(1).sum(dim=1) if tensors[0].dim() > 1 else tensors[0]
    try:
        found = torch.stack([of_one(*(t[i] for t in tensors)) for i in range(rows)])
    except Exception as error:
        if not left_out:
            raise
        raise ValueError(
            f"{name_of(loss)} cannot be evaluated for one record ({error}). It was not given "
            f"{', '.join(left_out)}, which has no row per record. Compute the loss from what has: "
            "for a language model, give the tokens as targets and "
            "loss=tacit.losses.TokenCrossEntropy(shift=True), or for classes "
            "loss=lambda out, y: F.cross_entropy(out.logits, y, reduction='none')"
        ) from error
    if not _holds(_loops, loss):
        _add(_loops, loss)
        warnings.warn(
            f"torch.vmap cannot take {name_of(loss)} ({reason}), so it runs once per record: "
            "exact, and slow; have it return one number per record",
            stacklevel=2,
        )
    return found


def _one_per_record(value: Tensor, rows: int, name: str) -> Tensor:
    if value.shape == (rows,):
        return value
    if rows == 1 and value.dim() == 0:
        return value.unsqueeze(0)
    if value.dim() and len(value) == rows:
        line = "mean(1)" if value.dim() == 2 else "flatten(1).mean(1)"
        remedy = f"end it with `.{line}`"
    else:
        remedy = "keep the records in the first dimension and end it with `.flatten(1).mean(1)`"
    raise ValueError(
        f"{name} gives shape {tuple(value.shape)} for {rows} records, and one number per record is "
        f"needed, shape ({rows},); {remedy}"
    )


def _num_records(outputs: Tree, targets: Tree) -> int:
    for tensor in (*tensors_of(targets), logits_of(outputs), *tensors_of(outputs)):
        if tensor is not None and tensor.dim():
            return len(tensor)
    raise ValueError("neither outputs nor targets hold a tensor with one row per record")


def _has_rows(leaf: Any, rows: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == rows


# Losses that gave a single number, and those that vmap cannot take, by identity: asking again costs
# a pass over the outputs. Batches of one are right for every loss, so a loss that behaves otherwise
# later only loses time.
_one_number: dict[int, weakref.ref[Any]] = {}
_loops: dict[int, weakref.ref[Any]] = {}


def _holds(known: dict[int, weakref.ref[Any]], loss: Any) -> bool:
    found = known.get(id(loss))
    return found is not None and found() is loss


def _add(known: dict[int, weakref.ref[Any]], loss: Any) -> None:
    key = id(loss)
    with contextlib.suppress(TypeError):  # of a class with slots, which is asked each time
        known[key] = weakref.ref(loss, lambda _: known.pop(key, None))
