"""What all clipping queries share: blocks, and the constants used in a step.

A public set is one that the guarantee does not cover: it must not hold private records.

What all clipping queries share: blocks, and the constants in force at a step.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from tacit.checks.side_effects import function_kind
from tacit.engines.book_keeping import PerRecord
from tacit.engines.clipping import (
    Clipped,
    ClipRule,
    ClipTask,
    Engine,
    accumulator,
    coarsest,
    flattened,
    sum_dtype,
)
from tacit.engines.draws import from_one_start
from tacit.engines.model_certificate import certify
from tacit.errors import NotPublic
from tacit.lipschitz.rounding import public_rows, slack_of_sum
from tacit.losses.record_loss import needs_pre_activations
from tacit.pytrees import Tree, flat_rows, tensors_of
from tacit.queries.bounded_gradient import (
    Blocks,
    BoundedGradient,
    Loss,
    Statistic,
    all_together,
    blocks_from,
    check_cover,
    trainable,
)
from tacit.queries.thresholds import (
    AdaptiveNorm,
    Constants,
    Estimates,
    FromPublic,
    LayerFactors,
    LayerwiseNorms,
    Thresholds,
    as_max_norms,
)
from tacit.queries.thresholds import MaxNorm as OwnNorm
from tacit.records import Records
from tacit.sampling.batch import Batch
from tacit.sampling.scheme import Unit

_ROWS_TO_COMPARE = 64
_CHUNK = 1 << 23  # entries at once
_ROUNDING = 1e-10  # of a sum in float64, with much to spare


def require_public(public: Records, private: Records) -> None:
    """Raise NotPublic if `public` is, or was copied from, the private records.

    What is computed from a public set goes out without noise, so a private record in it would be
    released as it is. Refused are: the same memory; one name with record ids in common, which is
    how `split_public` numbers the two sides; and copies, where most of the rows that are compared
    are found among the private ones. A few equal rows pass: datasets have duplicates.
    """
    if len(public) == 0:
        raise NotPublic(f"the public set {public.name!r} is empty; give it records")
    remedy = "hold public records out before training, with split_public(records, share)"
    if _shares_memory(public.inputs, private.inputs):
        raise NotPublic(f"the public set {public.name!r} is private data itself; {remedy}")
    if public.name == private.name and _ids_meet(public, private):
        raise NotPublic(
            f"the public set and the private records are both {public.name!r} and have record ids "
            f"in common; {remedy}"
        )
    if found_among(public, private) > 0.5:
        raise NotPublic(
            f"most records of the public set {public.name!r} are among the private ones; {remedy}"
        )


def _shares_memory(public: Tree, private: Tree) -> bool:
    return any(
        a.device == b.device and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        for a, b in product(tensors_of(public), tensors_of(private))
        # One row for everybody, such as a mask of ones, is nobody's own.
        if len(b) and a.stride(0) and b.stride(0)
    )


def _ids_meet(public: Records, private: Records) -> bool:
    return bool(torch.isin(public.record_ids.cpu(), private.record_ids.cpu()).any())


def found_among(public: Records, private: Records) -> float:
    """The share of some public rows that equal a private row, input for input."""
    if public.shape != private.shape or len(private) == 0:
        return 0.0
    stride = -(-len(public) // _ROWS_TO_COMPARE)  # from all over
    held = flat_rows(private.inputs)
    some = flat_rows(public.take(slice(None, None, stride)).inputs).to(held)
    if held.shape[1] == 0:
        return 0.0
    # Where one number of two rows differs, so do the rows; the others are compared in full.
    draws = torch.Generator().manual_seed(0)
    weights = torch.randn(held.shape[1], generator=draws, dtype=torch.float64).to(held.device)
    numbers = _one_number(held, weights)
    slacks = _ROUNDING * _one_number(some.double().abs(), weights.abs())
    found = 0
    for row, wanted, slack in zip(some, _one_number(some, weights), slacks, strict=True):
        found += _is_among(row, held, (numbers - wanted).abs() <= slack)
    return found / len(some)


def _one_number(rows: Tensor, weights: Tensor) -> Tensor:
    """A combination of each row's entries, in float64; what is not finite counts as a number."""
    chunks = (
        torch.nan_to_num(chunk.double(), 0.0, 1e300, -1e300) @ (weights / len(weights))
        for chunk in rows.split(_rows_at_once(rows))
    )
    return torch.cat(list(chunks))


def _rows_at_once(rows: Tensor) -> int:
    return max(1, _CHUNK // rows.shape[1])


def _is_among(row: Tensor, held: Tensor, candidates: Tensor) -> bool:
    places = candidates.nonzero().flatten()
    return any(
        bool((held[some] == row).all(dim=1).any()) for some in places.split(_rows_at_once(held))
    )


MaxNorm = OwnNorm | FromPublic


class Frozen(Protocol):
    """Who says which entries of the parameters still move: see `Sparsification`."""

    def active(self, model: nn.Module) -> Mapping[str, Tensor]:
        """A public mask of each parameter that has frozen entries."""
        ...


@dataclass(frozen=True)
class InForce:
    """The constants of one step, and what is to be released beside the gradient or after it."""

    constants: Constants
    thresholds: Thresholds | None = None
    estimates: Estimates | None = None

    @property
    def counted(self) -> bool:
        return self.thresholds is not None and bool(self.thresholds.adaptive)

    @property
    def released(self) -> tuple[Callable[[], None], ...]:
        return () if self.estimates is None else (self.estimates.advance,)

    def statistics(self, counts: Tensor, divisor: float) -> tuple[Statistic, ...]:
        return () if self.thresholds is None else self.thresholds.statistics(counts, divisor)


class ClippedQuery(abc.ABC):
    """Blocks and constants of a query that clips; one such query is one run's (`fresh`)."""

    @property
    def unit(self) -> Unit:
        """What one clipped contribution is of."""
        return Unit.RECORD

    def __init__(
        self,
        max_norm: MaxNorm,
        blocks: Blocks | Callable[[nn.Module], Blocks] | None,
        rule: ClipRule,
        frozen: Frozen | None,
    ) -> None:
        public = isinstance(max_norm, LayerwiseNorms | LayerFactors)
        self.max_norm = max_norm if public else as_max_norms(max_norm)  # type: ignore[arg-type]
        self.blocks = blocks
        self.rule = rule
        self.frozen = frozen
        self._thresholds: Thresholds | None = None
        self._estimates: Estimates | None = None

    def fresh(self) -> Self:
        """The same query at its first constants: what a run begins with."""
        other = copy.copy(self)
        other._thresholds = None
        other._estimates = None
        return other

    @property
    def thresholds(self) -> tuple[tuple[float, ...], ...]:
        """Where some adapt: each C, from the first to the one in force. Public."""
        return tuple(map(tuple, self._thresholds.paths)) if self._thresholds else ()

    @property
    def estimates(self) -> tuple[tuple[int, tuple[float, ...]], ...]:
        """Where constants come from a public set: (step, the e_h found there). Public."""
        return tuple(self._estimates.path) if self._estimates else ()

    def blocks_of(self, model: nn.Module) -> Blocks:
        if self.blocks is None:
            return all_together(model)
        blocks = self.blocks(model) if callable(self.blocks) else self.blocks
        check_cover(blocks, model)
        return blocks

    def _task(
        self,
        model: nn.Module,
        loss: Loss,
        blocks: Blocks,
        constants: Constants | None = None,
        *,
        views: int = 1,
        counted: bool = False,
    ) -> ClipTask:
        """What an engine is asked; without constants, for norms alone."""
        found = constants or Constants((1.0,) * len(blocks))
        return ClipTask(
            model,
            loss,
            trainable(model),
            blocks,
            found.norms,
            self.rule,
            views,
            counted=counted,
            factors=found.factors,
            active=self._active(model),
        )

    def _bounded(
        self, task: ClipTask, now: InForce, found: Iterable[Clipped], divisor: float
    ) -> BoundedGradient:
        """The clipped sums of all pieces, with their bounds and what is released beside them.

        A block's bound is C_h·(1 + s): s is what rounding can make of a sum over so many records
        (`tacit.lipschitz.rounding`), 0.2% in float32 and 10⁻¹¹ in float64.
        """
        first = next(iter(task.parameters.values()), None)
        wide = torch.float64 if first is None else sum_dtype(first.device)
        total: Tensor | None = None
        counts: Tensor | None = None
        for piece in from_one_start(found, task.model):
            flat = flattened(piece.sums, task.parameters) if piece.flat is None else piece.flat
            part = flat.to(wide, copy=piece.flat is not None)  # a recording writes there again
            total = part if total is None else total.add_(part)
            if piece.counts:
                those = torch.stack(piece.counts).to(wide)
                counts = those if counts is None else counts + those
        if total is None:
            total = accumulator(task.parameters.values())
        if counts is None:
            counts = total.new_zeros(len(now.constants.norms))
        added_in = coarsest(p.dtype for p in task.parameters.values())
        larger = 1 + slack_of_sum(added_in, public_rows(divisor))
        bounds = [larger * norm for norm in now.constants.norms]
        factors = now.constants.factors
        return BoundedGradient(
            blocks=blocks_from(total, task.parameters, task.blocks, bounds, factors, task.active),
            divisor=divisor,
            unit=self.unit,
            statistics=now.statistics(counts, divisor),
            released=now.released,
        )

    def _active(self, model: nn.Module) -> Mapping[str, Tensor]:
        return {} if self.frozen is None else self.frozen.active(model)

    def _in_force(self, model: nn.Module, loss: Loss, blocks: Blocks, batch: Batch) -> InForce:
        if isinstance(self.max_norm, LayerwiseNorms | LayerFactors):
            return self._from_public(self.max_norm, model, loss, blocks, batch)
        thresholds = self._thresholds_of(blocks)
        return InForce(Constants(thresholds.norms), thresholds)

    def _from_public(
        self, source: FromPublic, model: nn.Module, loss: Loss, blocks: Blocks, batch: Batch
    ) -> InForce:
        held = self._estimates = self._estimates or Estimates(source)
        if id(batch.records.inputs) not in held.checked:
            require_public(source.public, batch.records)
            held.checked = {id(batch.records.inputs)}
        if held.due:
            some = source.public.take(slice(source.records)).to(batch.indices.device)
            held.take(self._expected_norms(model, loss, blocks, some))
        found = held.constants()
        if len(found.factors or found.norms) != len(blocks):
            raise ValueError(
                f"this query follows the norms of {len(found.factors or found.norms)} blocks, and "
                f"was given a model of {len(blocks)}; make a query for each model"
            )
        return InForce(found, estimates=held)

    @abc.abstractmethod
    def _expected_norms(
        self, model: nn.Module, loss: Loss, blocks: Blocks, public: Records
    ) -> list[float]:
        """e_h of each block, of what this query clips, on public records."""

    def _thresholds_of(self, blocks: Blocks) -> Thresholds:
        """The thresholds in force: new ones for constants, the run's own where some adapt."""
        each = self.max_norm
        assert isinstance(each, float | AdaptiveNorm | tuple)
        asked = each if isinstance(each, tuple) else (each,) * len(blocks)
        if len(asked) != len(blocks):
            raise ValueError(
                f"{len(asked)} values of max_norm for {len(blocks)} blocks; give one a block"
            )
        new = Thresholds(asked)
        if not new.adaptive:
            return new
        held = self._thresholds = self._thresholds or new
        if len(held.asked) != len(blocks):
            raise ValueError(
                f"this query follows the norms of {len(held.asked)} blocks, and was given a model "
                f"of {len(blocks)}; make a query for each model"
            )
        return held


def check_records(
    task: ClipTask, engine: Engine, batch: Batch, seen: Callable[[Tree], Tree]
) -> bool:
    """Raise unless each record's gradient is of that record alone; see `engines`."""
    return certify(task, batch, seen, alone=int(isinstance(engine, PerRecord)))


def check_key(task: ClipTask, *more: object) -> Hashable:
    """What a check depends on, apart from the model: who computes what of which loss."""
    kinds = tuple(map(function_kind, (task.loss, *more)))
    return kinds, tuple(task.parameters), needs_pre_activations(task.loss)


def mean_norms(norms: list[list[Tensor]]) -> list[float]:
    """The mean of each block's norms over all units of all pieces, leaving out what is not finite.

    Waits for the device once.
    """
    means = []
    for of_block in zip(*norms, strict=True):
        every = torch.cat([n.detach().double().reshape(-1) for n in of_block])
        finite = every.isfinite()
        means.append(torch.where(finite, every, 0.0).sum() / finite.sum())
    return torch.stack(means).tolist()
