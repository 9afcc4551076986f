"""What every loss is: one number per record, which depends on that record alone.

`RecordLoss` is the base class, `LipschitzLoss` the one of losses whose gradient is bounded. Losses
are added and multiplied by numbers (`WeightedSum`), may follow the epoch (`Scheduled`), and a loss
of your own may declare its constant (`WithConstant`). `loss_constant` finds the constant of any.

`losses_of` gives the loss of each record, whatever the loss's reduction over records. Losses whose
records stay apart by construction are evaluated on the whole batch at once; any other that gives
one number is evaluated on batches of one record.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch.func import vmap

from tacit.errors import UnboundedLayer, argument
from tacit.losses.registry import Task, task_of, torch_loss
from tacit.pytrees import Tree, logits_of, map_leaves, named_leaves, tensors_of, with_tensors

Kind = TypeVar("Kind")


class RecordLoss(abc.ABC):
    """ℓ(h, y) of each record by itself. A call gives the mean over the records.

    A record's number depends on no other record, on no class count and on no statistic of the
    batch; else one record could move everyone's gradient, and no constant would hold.
    `a * X + b * Y` is a weighted sum of two losses.

    It takes one tensor of outputs and one of targets: if the model returns several, its `logits`.
    For a loss of several outputs write a function: see "Several outputs" in docs/extending.md.

    `task` says what the loss trains for, and so which metrics a report may show. If it is None, a
    report shows the mean loss, and an accuracy only where the records declare classes and the
    model has one output per class.
    """

    task: ClassVar[Task | None] = None

    def task_for(self, outputs: Tensor, targets: Tensor) -> Task | None:
        """The task for such outputs and targets; `task`, unless the loss serves several."""
        return self.task

    @abc.abstractmethod
    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """ℓ(h_i, y_i) for each record i: (B, …) and (B, …) to (B,)."""

    def __call__(self, outputs: Tree, targets: Tree) -> Tensor:
        return self.per_record(*tensors_for(self, outputs, targets)).mean()

    def __mul__(self, weight: float) -> WeightedSum:
        return weighted_sum([(float(weight), self)])

    __rmul__ = __mul__

    def __add__(self, other: RecordLoss) -> WeightedSum:
        if not isinstance(other, RecordLoss):
            return NotImplemented
        return weighted_sum([(1.0, self), (1.0, other)])


class LipschitzLoss(RecordLoss):
    """A loss whose gradient in one record's outputs has a largest norm."""

    @abc.abstractmethod
    def lipschitz_for(self, num_outputs: int) -> float:
        """max ‖∇_h ℓ(h, y)‖₂ over all outputs h of one record and all targets y.

        `num_outputs` is how many numbers h has, which the network's shape makes public.
        """


def loss_constant(loss: object, num_outputs: int) -> float:
    """The largest norm of one record's loss gradient in its outputs; UnboundedLayer if unknown."""
    constant = loss_constant_or_none(loss, num_outputs)
    if constant is not None:
        return constant
    raise UnboundedLayer(
        f"the loss {name_of(loss)!r} has no known Lipschitz constant; use one of tacit.losses, "
        "such as CrossEntropy(), say what it is with tacit.losses.WithConstant(loss, lipschitz), "
        "or clip the loss gradient with Clipless(gradient_clip=…)"
    )


def loss_constant_or_none(loss: object, num_outputs: int) -> float | None:
    """The constant that the loss declares: `lipschitz_for(num_outputs)`, else `lipschitz`.

    PyTorch's own losses have none: a record chooses its targets, and cross-entropy of a soft label
    of 10⁶, or of many positions summed, has no gradient of norm √2.
    """
    declared = getattr(loss, "lipschitz_for", None)
    constant = getattr(loss, "lipschitz", None) if declared is None else declared(num_outputs)
    return None if constant is None else float(constant)


@dataclass(frozen=True)
class ClippedLoss:
    """A loss whose gradient in the outputs is clipped to norm `max_norm`, record by record."""

    loss: object
    max_norm: float

    def lipschitz_for(self, num_outputs: int) -> float:
        constant = loss_constant_or_none(self.loss, num_outputs)
        return self.max_norm if constant is None else min(self.max_norm, constant)


@dataclass(frozen=True)
class WithConstant:
    """`loss`, declared to have a gradient of norm at most `lipschitz` in one record's outputs.

    The privacy of a clipless run rests on that number. `attack_constant` looks for a longer
    gradient; finding none proves nothing. `task` says what the loss trains for, if `loss` itself
    does not.
    """

    loss: Callable[[Tensor, Tensor], Tensor]
    lipschitz: float
    task: Task | None = None

    def __post_init__(self) -> None:
        positive("lipschitz", self.lipschitz)

    def lipschitz_for(self, num_outputs: int) -> float:
        """The declared constant, whatever the number of outputs."""
        return self.lipschitz

    def task_for(self, outputs: Tensor, targets: Tensor) -> Task | None:
        return task_of(self.loss, outputs, targets) if self.task is None else self.task

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(outputs, targets)


@runtime_checkable
class Scheduled(Protocol):
    """A loss that depends on the epoch, and so belongs to one run.

    The epoch is a public number: how often each record is expected to have taken part by now. The
    trainer sets it before each step. In your own loop, call `loss.at(epoch)`.
    """

    def at(self, epoch: float) -> None:
        """Make this the loss of that epoch, 0 at the beginning."""
        ...

    def fresh(self) -> Self:
        """The same loss at epoch 0, sharing nothing that changes."""
        ...


def fresh(loss: Kind) -> Kind:
    """The loss at epoch 0; itself, if it is not `Scheduled`."""
    return loss.fresh() if isinstance(loss, Scheduled) else loss


@dataclass(frozen=True)
class WeightedSum(RecordLoss):
    """ℓ = Σ_j w_j·ℓ_j. Made by `weighted_sum`, or by writing a * X + b * Y."""

    parts: tuple[RecordLoss, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.parts or len(self.parts) != len(self.weights):
            raise ValueError(
                f"{len(self.weights)} weights for {len(self.parts)} losses; give one per loss, and "
                "at least one loss"
            )
        if not all(map(math.isfinite, self.weights)):
            raise ValueError(f"weights are {self.weights}; give finite numbers")

    @property
    def needs_pre_activations(self) -> bool:
        return any(needs_pre_activations(part) for part in self.parts)

    def task_for(self, outputs: Tensor, targets: Tensor) -> Task | None:
        """The task of the parts that declare one; None where they disagree."""
        declared = {part.task_for(outputs, targets) for part in self.parts} - {None}
        return declared.pop() if len(declared) == 1 else None

    def at(self, epoch: float) -> None:
        for part in self.parts:
            if isinstance(part, Scheduled):
                part.at(epoch)

    def fresh(self) -> Self:
        return replace(self, parts=tuple(fresh(part) for part in self.parts))

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        # `losses_of`, not `per_record`: one of the parts may be a user's.
        losses = (losses_of(part, outputs, targets) for part in self.parts)
        weighted = [w * l_B for w, l_B in zip(self.weights, losses, strict=True)]
        return torch.stack(weighted).sum(dim=0)


@dataclass(frozen=True)
class LipschitzSum(WeightedSum, LipschitzLoss):
    """A weighted sum of losses that all have a constant.

    ‖Σ_j w_j·∇ℓ_j‖ ≤ Σ_j |w_j|·L_j, the triangle inequality.
    """

    parts: tuple[LipschitzLoss, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        for part in self.parts:
            if not isinstance(part, LipschitzLoss):
                raise ValueError(
                    f"{type(part).__name__} has no Lipschitz constant, so the sum has none; use "
                    "WeightedSum"
                )

    def lipschitz_for(self, num_outputs: int) -> float:
        pairs = zip(self.weights, self.parts, strict=True)
        return math.fsum(abs(w) * part.lipschitz_for(num_outputs) for w, part in pairs)


def weighted_sum(terms: Sequence[tuple[float, RecordLoss]]) -> WeightedSum:
    """Σ_j w_j·ℓ_j. It has a constant if all its parts have one; sums inside are opened."""
    parts: list[RecordLoss] = []
    weights: list[float] = []
    for weight, part in terms:
        if isinstance(part, WeightedSum):
            parts += part.parts
            weights += [weight * w for w in part.weights]
        else:
            parts.append(part)
            weights.append(weight)
    bounded = all(isinstance(part, LipschitzLoss) for part in parts)
    kind: type[WeightedSum] = LipschitzSum if bounded else WeightedSum
    return kind(tuple(parts), tuple(weights))


def needs_pre_activations(loss: object) -> bool:
    """Whether the loss can only be called inside `watched`."""
    return bool(getattr(loss, "needs_pre_activations", False))


def name_of(loss: object) -> str:
    """The loss's name, for messages."""
    return str(getattr(loss, "__name__", type(loss).__name__))


def positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{argument(name)} is {value}; give a number above 0")


def tensors_for(loss: object, outputs: Tree, targets: Tree) -> tuple[Tensor, Tensor]:
    """What a loss of two tensors takes: the logits of the outputs, and the only target."""
    if isinstance(outputs, Tensor) and isinstance(targets, Tensor):
        return outputs, targets
    name = name_of(loss)
    h, y = logits_of(outputs), tensors_of(targets)
    if h is None:
        raise ValueError(
            f"{name} takes one tensor, and the model returns {len(tensors_of(outputs))}, none of "
            "them called logits; give a function of your own, such as "
            f"lambda out, y: {name}(out[0], y)"
        )
    if len(y) != 1:
        raise ValueError(
            f"{name} takes one tensor of targets, and the records have {len(y)}; give "
            "Records(inputs, targets=...), the tokens themselves for a language model, or a loss "
            "that is a function of your own"
        )
    return h, y[0]


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
    if type(loss) is WithConstant:
        return losses_of(loss.loss, outputs, targets)
    if isinstance(loss, RecordLoss):
        h, y = tensors_for(loss, outputs, targets)
        # By exact type, since a user's subclass may let records meet.
        ours = type(loss).__module__.startswith("tacit.losses.")
        return loss.per_record(h, y) if ours else _one_by_one(loss, h, y)
    known = _pytorch_loss(loss)
    if known is not None:
        h, y = tensors_for(loss, outputs, targets)
        losses_B = _pytorch_losses(*known, h, y)
        return _one_by_one(loss, h, y) if losses_B is None else losses_B
    rows = _num_records(outputs, targets)
    if rows == 0 or loss in _one_number:
        return _one_by_one(loss, outputs, targets)
    value = loss(outputs, targets)
    if isinstance(value, Tensor) and value.dim() == 0 and rows > 1:
        _one_number.add(loss)
        return _one_by_one(loss, outputs, targets)
    return _one_per_record(value, rows, name_of(loss))


def _pytorch_loss(loss: Any) -> tuple[str, Callable[..., Tensor], dict[str, Any]] | None:
    """The function's name, the unreduced form and the options, if the loss is one of PyTorch's."""
    function, options = loss, {}
    if isinstance(loss, functools.partial):
        function, options = loss.func, loss.keywords
        if loss.args or {"reduce", "size_average"} & set(options):
            return None
    known = torch_loss(function)
    if known is None:
        return None
    if not isinstance(function, nn.Module):
        return known[0], functools.partial(loss, reduction="none"), {"reduction": "mean", **options}
    if function is not loss or "forward" in vars(loss):
        return None
    # A copy, so that the user's own keeps its reduction; `copy.copy` takes 20 µs.
    unreduced = type(loss).__new__(type(loss))
    vars(unreduced).update(vars(loss), reduction="none")
    return known[0], unreduced, {n: getattr(loss, n) for n in _OPTIONS if hasattr(loss, n)}


def _pytorch_losses(
    name: str, unreduced: Callable[..., Tensor], options: dict[str, Any], h: Tensor, y: Tensor
) -> Tensor | None:
    """ℓ_i of each record; None where the batch might not be its records one by one."""
    by_class = name in ("cross_entropy", "nll_loss")
    weights = [w for w in map(options.get, ("weight", "pos_weight")) if w is not None]
    # Weights of B rows meet other records.
    if not by_class and name not in _BY_ROW and h.shape != y.shape:
        y = _beside(name, h, y)
    pairs = h.shape == y.shape and all(w.dim() < h.dim() for w in weights)
    if not (by_class or pairs or name in _BY_ROW):
        return None
    losses, reduction = unreduced(h, y), options["reduction"]
    if reduction == "none":
        return _one_per_record(losses, len(h), name)
    losses_BT = losses.flatten(1) if losses.dim() > 1 else losses.unsqueeze(1)
    if reduction != "mean":
        return losses_BT.sum(dim=1)
    if not by_class or y.is_floating_point():
        return losses_BT.mean(dim=1)
    # Σ_t ℓ_t / Σ_t w(y_t) over the positions t that are not ignored.
    weight, ignored = options.get("weight"), options.get("ignore_index", -100)
    if weight is None and y.dim() == 1:
        return losses_BT.squeeze(1)
    y_BT = y.reshape(len(y), -1)
    counted_BT = y_BT != ignored
    if weight is None:
        total_B = counted_BT.sum(dim=1)
    else:
        if y_BT.shape[1] == 1:
            warnings.warn(_WEIGHTS_CANCEL, stacklevel=3)
        weights_BT = weight[torch.where(counted_BT, y_BT, 0)]
        total_B = torch.where(counted_BT, weights_BT, 0.0).sum(dim=1)
    return losses_BT.sum(dim=1) / torch.where(total_B > 0, total_B, 1)


def _beside(name: str, h: Tensor, y: Tensor) -> Tensor:
    """The targets in the shape of the outputs, if both have the same numbers of each record.

    (B, 1) beside (B,) would be compared in B² pairs, each record with all others.
    """
    outputs, targets = h.shape[1:], y.shape[1:]
    if [d for d in outputs if d != 1] == [d for d in targets if d != 1]:
        return y.reshape(len(y), *outputs)
    raise ValueError(
        f"{name} compares outputs with targets one by one, and of one record the outputs have "
        f"shape {tuple(outputs)} and the targets {tuple(targets)}; give the model one output per "
        "target"
    )


_WEIGHTS_CANCEL = (
    "class weights with reduction='mean' cancel: the mean of one record divides by its own weight; "
    "give reduction='none', and each record's loss is multiplied by the weight of its class"
)
_OPTIONS = ("reduction", "weight", "pos_weight", "ignore_index")
_BY_ROW = ("multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss")


class _LossSet:
    """Losses by identity, which it does not keep alive."""

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[Any]] = {}

    def __contains__(self, loss: object) -> bool:
        reference = self._references.get(id(loss))
        return reference is not None and reference() is loss

    def add(self, loss: Any) -> None:
        key = id(loss)
        with contextlib.suppress(TypeError):  # of a class with slots, which is never remembered
            self._references[key] = weakref.ref(loss, lambda _: self._references.pop(key, None))


# Losses that gave a single number, and those that vmap cannot take: finding out again costs a pass
# over the outputs. Batches of one are right for every loss, so a loss that behaves otherwise later
# only loses time.
_one_number, _loops = _LossSet(), _LossSet()


def _one_by_one(loss: Callable[..., Tensor], outputs: Tree, targets: Tree) -> Tensor:
    """The loss of batches of one record: exact for every loss."""
    rows = _num_records(outputs, targets)
    leaves = (*named_leaves(outputs, "outputs"), *named_leaves(targets, "targets"))
    left_out = [place for place, leaf in leaves if not _has_rows(leaf, rows)]
    tree: Any = (outputs, targets)
    if left_out:  # such as a mean over all records, which no record may see
        tree = map_leaves(lambda leaf: leaf if _has_rows(leaf, rows) else None, tree)
    tensors = tensors_of(tree)
    if rows == 0:
        return tensors[0].flatten()

    def of_one(*record: Tensor) -> Tensor:
        h, y = with_tensors(tree, [t.unsqueeze(0) for t in record])
        return _one_per_record(loss(h, y), 1, name_of(loss)).squeeze(0)

    if loss not in _loops:
        try:
            return vmap(of_one, randomness="different")(*tensors)
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
    try:
        losses_B = torch.stack([of_one(*(t[i] for t in tensors)) for i in range(rows)])
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
    if loss not in _loops:
        _loops.add(loss)
        warnings.warn(
            f"torch.vmap cannot take {name_of(loss)} ({reason}), so it runs once per record: "
            "exact, and slow; have it return one number per record",
            stacklevel=2,
        )
    return losses_B


def _one_per_record(value: Any, rows: int, name: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} returns {value!r}; return one number per record")
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
