"""How the clipped sum over mini-sets is computed: set by set, or several sets at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor
from torch.func import grad, vmap

from tacit.batch import Batch, batch_of
from tacit.checks import refuse_mixing
from tacit.errors import UnsupportedModule
from tacit.queries.clipping import sum_dtype
from tacit.queries.engines import BookKeeping, Clipped, Engine, Task
from tacit.queries.engines.called_with import called_with
from tacit.queries.engines.per_record import clipped_rows, norms_of_blocks
from tacit.queries.engines.record_losses import losses_of
from tacit.queries.mini_sets.one_set import clipped_vector, norms_of_vector
from tacit.queries.mini_sets.set_gradients import MeanGradient, SetGradient
from tacit.queries.mini_sets.too_small import too_small_is_nothing


class SetEngine(Protocol):
    """Σ_j [g(w; S_j)]_C over some mini-sets, and the norms of g for public ones."""

    def clipped_sums(self, task: Task, gradient: SetGradient, sets: Sequence[Batch]) -> Clipped: ...

    def block_norms(
        self, task: Task, gradient: SetGradient, sets: Sequence[Batch]
    ) -> list[Tensor]: ...


class SetBySet:
    """Each mini-set in a pass of its own, with any g and any module. Of one set, it is the best."""

    def clipped_sums(self, task: Task, gradient: SetGradient, sets: Sequence[Batch]) -> Clipped:
        return added_up(clipped_vector(task, self._gradient(task, gradient, one)) for one in sets)

    def block_norms(self, task: Task, gradient: SetGradient, sets: Sequence[Batch]) -> list[Tensor]:
        each = [norms_of_vector(task, self._gradient(task, gradient, one)) for one in sets]
        return list(torch.stack(each, dim=1).unbind())

    @classmethod
    def _gradient(cls, task: Task, gradient: SetGradient, one: Batch) -> dict[str, Tensor]:
        return cls.gradient_of(task, gradient, one.inputs, one.targets)

    @staticmethod
    def gradient_of(
        task: Task, gradient: SetGradient, inputs: Tensor, targets: Tensor
    ) -> dict[str, Tensor]:
        """g of one set; zero where BatchNorm refuses so few records."""
        with too_small_is_nothing() as nothing:
            return gradient(task.model, task.loss, task.parameters, inputs, targets)
        assert nothing
        return {n: torch.zeros_like(p, requires_grad=False) for n, p in task.parameters.items()}


class SetsAtOnce:
    """Sets of one size side by side, by `vmap`: the mean gradient of each, BatchNorm included.

    Holds the gradients of `at_once` sets at the same time. For modules that `vmap` can take.
    """

    def __init__(self, at_once: int | None = None) -> None:
        self.at_once = at_once

    def clipped_sums(self, task: Task, gradient: SetGradient, sets: Sequence[Batch]) -> Clipped:
        return added_up(
            clipped_rows(task, self._gradients(task, gradient, alike))
            for alike in _by_size(sets, self.at_once)
        )

    def block_norms(self, task: Task, gradient: SetGradient, sets: Sequence[Batch]) -> list[Tensor]:
        found = [
            norms_of_blocks(task, self._gradients(task, gradient, alike))
            for alike in _by_size(sets, self.at_once)
        ]
        return [torch.cat(list(of_block)) for of_block in zip(*found, strict=True)]

    @staticmethod
    def _gradients(task: Task, gradient: SetGradient, sets: Sequence[Batch]) -> dict[str, Tensor]:
        _mean_only("SetsAtOnce", gradient)
        model, loss, parameters = task.model, task.loss, task.parameters
        fixed = {n: p.detach() for n, p in model.named_parameters() if n not in parameters}
        fixed |= dict(model.named_buffers())

        def loss_of_set(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return losses_of(loss, called_with(model, {**weights, **fixed}, (x,)), y).mean()

        weights = {n: p.detach() for n, p in parameters.items()}
        x_KS = torch.stack([one.inputs for one in sets])
        y_KS = torch.stack([one.targets for one in sets])
        each = vmap(grad(loss_of_set), in_dims=(None, 0, 0), randomness="different")
        with too_small_is_nothing() as nothing:
            return each(weights, x_KS, y_KS)
        assert nothing
        return {n: w.new_zeros((len(sets), *w.shape)) for n, w in weights.items()}


class SetsAsRecords:
    """Per-sample clipping's engine on sets whose records do not meet inside the model.

    The mean gradient of a set of s records is that of one record with s views, so book-keeping
    gives all sets in one forward and one backward pass. At s = 1 it *is* per-sample clipping. All
    sets go this way, also one that is alone in its size: book-keeping clips by upper bounds of
    norms, so a set that changed its way because of another's record would move as well.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine or BookKeeping()

    def clipped_sums(self, task: Task, gradient: SetGradient, sets: Sequence[Batch]) -> Clipped:
        _mean_only("SetsAsRecords", gradient)
        refuse_mixing(task.model)
        return added_up(
            self.engine.clipped_sums(replace(task, views=len(alike[0])), _joined(alike))
            for alike in _by_size(sets, None)
        )

    def block_norms(self, task: Task, gradient: SetGradient, sets: Sequence[Batch]) -> list[Tensor]:
        _mean_only("SetsAsRecords", gradient)
        refuse_mixing(task.model)
        found = [
            self.engine.block_norms(replace(task, views=len(alike[0])), _joined(alike))
            for alike in _by_size(sets, None)
        ]
        return [torch.cat(list(of_block)) for of_block in zip(*found, strict=True)]

    def forget(self) -> None:
        forget = getattr(self.engine, "forget", None)
        if forget is not None:
            forget()


def added_up(found: Iterable[Clipped]) -> Clipped:
    """Sums and counts of all parts, as new tensors: a next replay writes over a recording's.

    In float64 where the device has it, as parts may be thousands of sets.
    """
    sums: dict[str, Tensor] = {}
    counts: list[Tensor] = []
    for part in found:
        for name, value in part.sums.items():
            if name not in sums:
                sums[name] = torch.zeros_like(value, dtype=sum_dtype(value.device))
            sums[name] += value
        held = counts or [torch.zeros_like(count) for count in part.counts]
        counts = [c + d for c, d in zip(held, part.counts, strict=True)]
    return Clipped(sums, tuple(counts))


def _by_size(sets: Sequence[Batch], at_once: int | None) -> list[Sequence[Batch]]:
    """Sets of equal size together, at most `at_once` of them."""
    sizes: dict[int, list[Batch]] = {}
    for one in sets:
        sizes.setdefault(len(one), []).append(one)
    step = at_once or max(len(sets), 1)
    return [
        alike[start : start + step]
        for alike in sizes.values()
        for start in range(0, len(alike), step)
    ]


def _joined(sets: Sequence[Batch]) -> Batch:
    """The rows of all sets, one set after the other."""
    first = sets[0]
    return batch_of(
        torch.cat([one.inputs for one in sets]),
        torch.cat([one.targets for one in sets]),
        divisor=first.divisor,
        scheme=first.scheme,
    )


def _mean_only(engine: str, gradient: SetGradient) -> None:
    if not isinstance(gradient, MeanGradient):
        raise UnsupportedModule(
            f"{engine} computes mean gradients, and was asked for {gradient!r}; "
            "use engine=SetBySet()"
        )
