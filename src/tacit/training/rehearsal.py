"""A rehearsal: do model, loss and records go together? Asked before anything is charged.

A few records run through the model in evaluation mode, and every distinct target through the loss,
so that a mistake (another number of features, labels beyond the classes, targets that are text
codes, a column of NaN) ends in one sentence instead of an error from deep inside a step, after a
run was planned on the ledger. What is seen here goes into errors and warnings on the screen of
whoever runs it, and never into a run: neither notes nor reports depend on it, and what runs is a
copy of the model and of the loss.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import torch
from torch import Tensor, nn

from tacit.columns import columns_of
from tacit.data.augmentation import Augmentation
from tacit.engines.pass_state import PassState
from tacit.engines.plain_programs import uncompiled
from tacit.engines.programs import Operators
from tacit.errors import TacitError
from tacit.losses.record_loss import losses_of, name_of, needs_pre_activations
from tacit.losses.registry import Task, task_of, torch_loss
from tacit.losses.tailored import watched
from tacit.pytrees import (
    Tree,
    call_model,
    logits_of,
    map_tensors,
    named_leaves,
    num_rows,
    take_rows,
    tensors_of,
)
from tacit.queries.bounded_gradient import Loss
from tacit.queries.views import ViewBatches
from tacit.records import Records
from tacit.sources import ArrayRows, DatasetRows
from tacit.statistics.tracking import evaluating

_RUN = 4  # records that run through the model
_MOST_NUMBERS = 1 << 26  # of inputs and targets that are looked at; of more, rows from all over
_MOST_ROWS_READ = 256
_MOST_TARGETS = 256  # distinct targets that are given to the loss


def rehearse(
    model: nn.Module | None,
    loss: Loss,
    records: Records,
    called: str,
    augmentation: Augmentation | None = None,
) -> None:
    """Raise ValueError unless the model takes these records, and the loss their targets.

    Without a model only the numbers in the records are looked at. `called` says in errors which
    records they are. With an `augmentation` the model sees a view of
    each record. A record with NaN contributes nothing to a
    gradient, and its loss is no number; a warning says that there are some, and not how many.
    """
    if len(records) == 0:
        warnings.warn(f"{called} are an empty set", stacklevel=3)
        return
    _require_own_rows(records, called)
    some = _from_all_over(records)
    usable = _require_numbers(some, called)
    rows = usable.nonzero().flatten()[:_RUN] if bool(usable.any()) else torch.arange(_RUN)
    few = some.take(rows[rows < num_rows(some.inputs)].to(some.device))
    copied = None if model is None else _copied(model, loss)
    if copied is None:
        return
    model, loss = copied
    state = PassState(few.inputs)
    try:
        seen = replace(few, inputs=ViewBatches(augmentation).first(few.inputs))
        with evaluating(model), torch.enable_grad(), watched(model, loss):
            outputs = _run(model, seen, called)
            losses_B = _losses(loss, outputs, few.targets, called, some.targets)
            if not needs_pre_activations(loss):  # which are those of the records that ran
                with torch.no_grad():
                    _require_targets(loss, outputs, some, called)
    finally:
        state.restore_draws()
    _require_gradient(loss, losses_B)
    if not bool(torch.isfinite(losses_B.detach()).any()):
        raise ValueError(
            f"{name_of(loss)} is {float(losses_B.detach()[0])} for {called}, and a record whose "
            "loss is not finite contributes nothing; scale the inputs and targets, or give the "
            "loss what it expects (probabilities for BCELoss, logits for BCEWithLogitsLoss)"
        )


def _copied(model: nn.Module, loss: Loss) -> tuple[nn.Module, Loss] | None:
    """Copies of both that only the rehearsal sees; None of what cannot be copied.

    A pass over private records may write into a model: a layer that takes its scale from the first
    records that it meets, a cache. In the model itself such a write would be in the released
    weights, without noise; in a step it is refused. What cannot be copied is not rehearsed. What
    is kept elsewhere, such as in a global list, is noted by `Operators` as left behind, and a step
    that reads it is refused.
    """
    try:
        return copy.deepcopy((model, loss))
    except Exception:  # whatever an object of the user's raises
        return None


def _from_all_over(records: Records) -> Records:
    """At most `_MOST_NUMBERS` numbers: every so many records, where there are more; in memory."""
    of_one = records.take(slice(0, 1))
    width = sum(t.numel() for t in (*tensors_of(of_one.inputs), *tensors_of(of_one.targets)))
    stride = -(-len(records) * width // _MOST_NUMBERS)
    if records.is_lazy:  # each of them is read from disk
        stride = max(stride, -(-len(records) // _MOST_ROWS_READ))
    return (records if stride <= 1 else records.take(slice(None, None, stride))).read()


def _require_own_rows(records: Records, called: str) -> None:
    """Raise ValueError where a source's rows depend on which others are read with them.

    Then a record would move the gradients of all others. A dataset's items are read one by one.
    """
    columns = columns_of((records.inputs, records.targets))
    for rows in dict.fromkeys(column.lazy for column in columns):
        if isinstance(rows.source, ArrayRows | DatasetRows):
            continue
        few = torch.arange(0, len(rows), max(1, len(rows) // _RUN))[:_RUN]
        together = rows.read(few)
        alone = [rows.read(few[i : i + 1]) for i in range(len(few))]
        for whole, parts in zip(together, zip(*alone, strict=True), strict=True):
            if not torch.equal(whole.nan_to_num(), torch.cat(parts).nan_to_num()):
                raise ValueError(
                    f"a row of {called} is another when it is read alone than beside other rows, "
                    "and the guarantee needs it to be a function of its number; leave what depends "
                    "on the other rows, and random draws, out of read_rows"
                )


# ---- numbers -------------------------------------------------------------------------------------


def _require_numbers(records: Records, called: str) -> Tensor:
    """Which records are finite; an error where a column, or all records, have NaN."""
    count = num_rows(records.inputs)
    finite_B = torch.ones(count, dtype=torch.bool)
    nan_B = torch.zeros(count, dtype=torch.bool)
    trees = ((records.inputs, "inputs"), (records.targets, "targets"))
    for place, column in (leaf for tree, name in trees for leaf in named_leaves(tree, name)):
        if not (column.is_floating_point() or column.is_complex()):
            continue
        rows = column.reshape(count, -1)
        finite_BD = torch.isfinite(rows)
        if bool(finite_BD.all()):
            continue
        finite_B &= finite_BD.all(dim=1).cpu()
        nan_BD = torch.isnan(rows)
        nan_B |= nan_BD.any(dim=1).cpu()
        for entry in nan_BD.all(dim=0).nonzero().flatten()[:1].tolist():
            name = _column_name(records, place, entry)
            of = f"column {name} of {place}" if rows.shape[1] > 1 else place
            raise ValueError(
                f"{of} is NaN in all of {called}, and a record with NaN contributes nothing to a "
                f"gradient; leave the column out, or fill it: torch.nan_to_num({place})"
            )
    if bool(nan_B.all()):
        raise ValueError(
            f"all of {called} hold NaN, and a record with NaN contributes nothing to a gradient; "
            "fill them with a number that you choose beforehand, such as torch.nan_to_num(inputs)"
        )
    if bool(nan_B.any()):
        warnings.warn(
            f"some of {called} hold NaN, and such a record contributes nothing to a gradient; fill "
            "them with a number that you choose beforehand, such as torch.nan_to_num(inputs)",
            stacklevel=4,
        )
    return finite_B


def _column_name(records: Records, place: str, entry: int) -> str:
    names = records.feature_names if place == "inputs" else None
    return repr(names[entry]) if names is not None and entry < len(names) else str(entry)


# ---- the model -----------------------------------------------------------------------------------


def _run(model: nn.Module, few: Records, called: str) -> Tree:
    try:
        with uncompiled(), Operators(tensors_of(few.inputs)):
            outputs = call_model(model, few.inputs)
    except (TacitError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ValueError(
            f"the model cannot be run on {called} ({_first_line(error)}). {_advice(model, few)}"
        ) from error
    return outputs


def _advice(model: nn.Module, few: Records) -> str:
    """What one would compare: the types and shapes of the inputs, and those of the parameters."""
    described = ", ".join(
        f"{place} of shape {tuple(t.shape[1:])} and type {_kind(t)}"
        for place, t in named_leaves(few.inputs, "inputs")
    )
    kinds = {_kind(p) for p in model.parameters()}
    floating = any(p.is_floating_point() for p in model.parameters())
    odd = [place for place, t in named_leaves(few.inputs, "inputs") if not t.is_floating_point()]
    embeds = any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in model.modules())
    remedy = "give inputs that model(inputs[:2]) takes, or a model that is made for them"
    if floating and odd and not embeds and not any(t.is_complex() for t in tensors_of(few.inputs)):
        remedy = f"give {odd[0]}.float(), or a model that is made for whole numbers"
    return f"One record has {described}; the parameters are {' and '.join(sorted(kinds))}: {remedy}"


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _first_line(error: BaseException) -> str:
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


def _require_gradient(loss: Loss, losses_B: Tensor) -> None:
    if not losses_B.requires_grad:
        raise ValueError(
            f"{name_of(loss)} of the model's outputs does not depend on any trainable parameter; "
            "leave detach() and torch.no_grad() out of the model and the loss"
        )


# ---- the loss ------------------------------------------------------------------------------------


def _losses(loss: Loss, outputs: Tree, targets: Tree, called: str, among: Tree) -> Tensor:
    """The loss of each record, or an error that says what does not fit among all targets."""
    try:
        with uncompiled(), Operators(tensors_of(targets)):
            return losses_of(loss, outputs, targets)
    except (TacitError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if _is_ours(error):
            raise
        raise ValueError(_explained(error, loss, outputs, among, called)) from error


def _is_ours(error: Exception) -> bool:
    """Whether the error was raised by Tacit, and so says what to do."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
    return isinstance(error, ValueError) and name.startswith("tacit.")


def _explained(error: Exception, loss: Loss, outputs: Tree, targets: Tree, called: str) -> str:
    """What the loss was given, what it takes, and what to give."""
    h, y = logits_of(outputs), tensors_of(targets)
    name = name_of(loss)
    known = (torch_loss(loss) or ("", None))[0]
    if h is not None and len(y) == 1 and h.dim() > 1:
        (only,), count = y, h.shape[1]
        by_class = task_of(loss, h, only) is Task.CLASSIFICATION
        whole = not only.is_floating_point() and only.dtype is not torch.bool
        if whole and isinstance(error, IndexError | RuntimeError) and _is_range(error):
            least, most = int(only.min()), int(only.max())
            remedy = (
                "give targets - targets.min()"
                if least < 0
                else f"give it {most + 1}, or targets that begin at 0"
            )
            return (
                f"targets of {called} reach from {least} to {most}, and the model has {count} "
                f"output{'s' if count > 1 else ''}, one per class from 0; {remedy}"
            )
        if by_class and h.dim() == 2 and only.shape[1:] == (1,):
            return (
                f"targets of {called} have shape (1,) per record, and {name} takes one class per "
                "record; give targets.squeeze(1)"
            )
        if by_class and h.dim() == only.dim() + 1 and only.dtype is not torch.int64:
            return (
                f"targets of {called} are {_kind(only)}, and {name} takes classes as whole "
                "numbers of type int64; give targets.long()"
            )
        if by_class and h.shape[1:] == only.shape[1:] and whole:
            remedy = "give classes as numbers, targets.argmax(1), or probabilities, targets.float()"
        elif h[:1].numel() == only[:1].numel() and not only.is_floating_point():
            remedy = "give targets.float()"
        elif known == "binary_cross_entropy":
            remedy = "use BCEWithLogitsLoss(), which takes outputs that are not probabilities"
        else:
            remedy = "use a loss that takes these, in this order: loss(outputs, targets)"
    else:
        remedy = "use a loss that takes these, in this order: loss(outputs, targets)"
    shapes = "; ".join(
        f"{place} have shape {tuple(t.shape[1:])} and type {_kind(t)}"
        for tree, name_of_tree in ((outputs, "outputs"), (targets, "targets"))
        for place, t in named_leaves(tree, name_of_tree)
        if isinstance(t, Tensor)
    )
    return f"{name} cannot take {called} ({_first_line(error)}). Of one record, {shapes}: {remedy}"


def _is_range(error: Exception) -> bool:
    """As PyTorch says it of a class, an index or a one-hot code beyond the outputs."""
    said = str(error)
    words = ("out of bounds", "out of range", "Class values must be", "index out")
    return any(word in said for word in words)


def _require_targets(loss: Loss, outputs: Tree, some: Records, called: str) -> None:
    """The loss takes every distinct target, beside the outputs of one record."""
    targets, h = tensors_of(some.targets), logits_of(outputs)
    if h is not None and len(targets) == 1 and h.dim() == 2 and h.shape[1] > 1:
        by_class = task_of(loss, h, targets[0][: len(h)]) is Task.CLASSIFICATION
        if by_class and some.num_classes is not None and h.shape[1] < some.num_classes:
            raise ValueError(
                f"{called} declare {some.num_classes} classes, and the model has {h.shape[1]} "
                f"outputs; give it {some.num_classes}, one per class"
            )
    if not targets:
        return
    _require_probabilities(loss, some, called)
    rows = _distinct(targets, num_rows(some.targets))
    if not len(rows):
        return

    def repeated(column: Tensor) -> Tensor:
        # Outputs without a row per record, such as a mean over the batch, stay.
        return column[:1].detach().expand(len(rows), *column.shape[1:]) if column.dim() else column

    of_rows = take_rows(some.targets, rows.to(some.device))
    _losses(loss, map_tensors(repeated, outputs), of_rows, called, some.targets)


def _range(targets: list[Tensor]) -> tuple[float, float]:
    whole = [t for t in targets if not t.is_floating_point()] or targets
    return min(float(t.min()) for t in whole), max(float(t.max()) for t in whole)


def _distinct(targets: list[Tensor], count: int) -> Tensor:
    """Rows that hold the distinct whole-numbered targets; of many, the least and the largest."""
    rows: list[Tensor] = []
    for column in targets:
        if column.is_floating_point() or column.is_complex() or column.dtype is torch.bool:
            continue
        flat = column.reshape(count, -1)
        if not flat.shape[1]:
            continue
        values, inverse = flat.cpu().unique(return_inverse=True)
        if len(values) > _MOST_TARGETS:
            places = torch.stack([flat.argmin(), flat.argmax()]).cpu()
        else:  # one place of each value, whichever is written last
            places = torch.zeros(len(values), dtype=torch.int64)
            places[inverse.flatten()] = torch.arange(flat.numel())
        rows.append(places // flat.shape[1])
    return torch.cat(rows).unique() if rows else torch.zeros(0, dtype=torch.int64)


def _require_probabilities(loss: Loss, some: Records, called: str) -> None:
    """Binary cross-entropy of a target beyond 0 and 1 has no minimum, and PyTorch says nothing."""
    name = (torch_loss(loss) or ("", None))[0]
    if not name.startswith("binary_cross_entropy"):
        return
    least, most = _range(tensors_of(some.targets))
    if least < 0 or most > 1:
        raise ValueError(
            f"targets of {called} reach from {least:g} to {most:g}, and {name_of(loss)} takes "
            "numbers from 0 to 1; give classes as 0 and 1, such as (targets > 0).float()"
        )


def finite_weights(model: nn.Module) -> bool:
    """Whether all weights are finite. They were released, so that a run may say so."""
    return all(bool(torch.isfinite(p.detach()).all()) for p in model.parameters())
