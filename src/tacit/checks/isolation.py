"""Do records stay apart, and is nothing remembered? Asked of real records, under equal draws.

*Statefulness.* A pass over some records is repeated after passes over others: whole, two rows and
one row at a time. From equal generator states it must give the same, as the first pass that the
model sees and as a later one.

*Isolation.* The losses of half of the records, and their gradients in their inputs, must stay when
the other half is replaced by others, permuted, or replaced by copies of one. Their gradient in the
others' inputs must be zero: autograd gives an exact zero where no number of one record reaches
another, so a mixture of a millionth is seen without any value made up. What only a large value
brings about (the largest of a batch, above a floor) is asked for with inputs times 10⁴, but only of
models that turn no input into an index.

*Batch size.* A record's output must not depend on how many records are beside it.

Not seen: what no record of the probe brings about, and what a model does only after many passes,
until the next of steps 1, 8, 64 ….
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tacit.batch import Batch
from tacit.checks.gradients import Losses, Sums, require_gradients
from tacit.checks.probe import (
    MOST_RECORDS,
    OTHER_SHAPE,
    SAME_SHAPE,
    IndexCasts,
    NoDropout,
    Probe,
    Seen,
    agree,
    any_missing,
    probe_records,
    probing,
)
from tacit.checks.program_state import ProgramState
from tacit.checks.side_effects import same_tensors
from tacit.data.augmentation import Augmentation
from tacit.errors import MixesRecords, UnsupportedModule

_MOST_IN_A_PASS = 16  # records, when it is asked whether passes are remembered
_MOST_VIEWED = 64
_LOUD = 1e4
# A gradient in others' inputs below this share of the own one is a zero.
_ZERO = 1e-12

# What is computed of some records: tensors with one row per record, or one row in all.
Pass = Callable[[Tensor, Tensor], Sequence[Tensor]]


def require_isolated(
    model: nn.Module,
    loss: object,
    parameters: dict[str, nn.Parameter],
    batch: Batch,
    seen: Seen,
    losses: Losses,
    *,
    remedy: str,
    sums: Sums | None = None,
    one_by_one: bool = False,
) -> bool:
    """Raise MixesRecords or UnsupportedModule unless each record's gradient is of that record.

    `seen` makes of inputs what the model is given, one view of each record.
    `losses` gives one loss per record of some inputs and targets. An engine that calls the model
    with one record at a time (`one_by_one`) keeps records apart by construction, and is asked for
    statefulness alone. `sums` are an engine's clipped sums, to be compared with autograd's.

    Returns whether the records could tell.
    """

    def require(probe: Probe) -> None:
        _require_stateless(probe, _gradients(parameters, losses), 1 if one_by_one else None)
        if not one_by_one:
            _require_apart(probe, losses, remedy)

    def check(most: int) -> bool:
        # Missing values are NaN to many models, which may fill them in from other records.
        if any_missing(batch, most):
            with probing(model, loss, parameters, batch, seen, most, finite=False) as probe:
                if probe is not None:
                    require(probe)
        with probing(model, loss, parameters, batch, seen, most) as probe:
            if probe is None:
                return False
            require(probe)
            return one_by_one or sums is None or require_gradients(probe, losses, sums)

    return _where_it_fits(check, batch)


def require_sets_isolated(
    model: nn.Module,
    loss: object,
    parameters: dict[str, nn.Parameter],
    batch: Batch,
    seen: Seen,
    gradient: Callable[[Tensor, Tensor], Mapping[str, Tensor]],
    set_size: int,
) -> bool:
    """Raise MixesRecords unless a set's `gradient` is of that set alone.

    Each set has a pass of its own, in which its records may meet: only what is remembered could
    bring another set in. Returns whether the records could tell.
    """

    def run(x: Tensor, y: Tensor) -> list[Tensor]:
        return [g.detach().reshape(1, -1) for g in gradient(x, y).values()]

    def check(most: int) -> bool:
        told = False
        for finite in (False, True) if any_missing(batch, most) else (True,):
            with probing(model, loss, parameters, batch, seen, most, finite) as probe:
                if probe is not None:
                    _require_stateless(probe, run, set_size)
                    told = True
        return told

    return _where_it_fits(check, batch)


def require_views_apart(augmentation: Augmentation, batch: Batch) -> bool:
    """Raise MixesRecords if a record's views depend on the other records, now or earlier.

    Random halves of up to 64 records are exchanged for other records, under equal draws. A
    transform with a generator of its own is refused, unless its rows are declared to be apart.
    Returns whether the records could tell.
    """
    if augmentation.rows_apart:
        return True
    x = probe_records(batch)[0][:_MOST_VIEWED]
    if len(x) == 0:
        return False
    state = ProgramState(device=x.device)

    def views(rows: Tensor) -> Tensor:
        state.restore_draws()
        return augmentation.views_of(x[rows]).unflatten(0, (-1, augmentation.views))

    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).to(x.device)
    every, half = torch.arange(len(x), device=x.device), (len(x) + 1) // 2
    try:
        expected = views(every)
        views(every.flip(0))
        if not same_tensors(expected, views(every)):
            raise MixesRecords(
                f"the augmentation {augmentation.transform!r} gives other views of the same "
                "records with the same seeds: it remembers earlier ones, or draws from a generator "
                "of its own; draw from torch's generator, or declare Augmentation(..., "
                "rows_apart=True)"
            )
        for stay, go in ((order[:half], order[half:]), (order[half:], order[:half])):
            for rows in _exchanged(stay, go, x):
                if not same_tensors(expected[stay], views(rows)[stay]):
                    raise MixesRecords(
                        f"the augmentation {augmentation.transform!r} lets other records into a "
                        "record's views, so no record's share of the gradient is bounded; use one "
                        "that works on each row alone"
                    )
    finally:
        state.restore_draws()
    return not same_tensors(x, x[:1].expand_as(x))


def _where_it_fits(check: Callable[[int], bool], batch: Batch) -> bool:
    """As many records as a check wants; fewer only where memory ends, since fewer see less."""
    try:
        return check(MOST_RECORDS)
    except torch.OutOfMemoryError:
        few = max(2, batch.max_physical or 2)
    warnings.warn(
        f"the check of the model does not fit into memory with up to {MOST_RECORDS} records; it "
        f"runs with {few}, and does not see what only more of them bring about",
        stacklevel=2,
    )
    return check(few)


def _require_stateless(probe: Probe, run: Pass, most: int | None) -> None:
    """Ask for some records first of all, and again after passes over others of several sizes."""
    x, y = probe.inputs, probe.targets
    half = min((len(x) + 1) // 2, most or _MOST_IN_A_PASS, _MOST_IN_A_PASS)
    others, pair, last = (slice(-n, None) for n in (min(half, len(x) - half), 2, 1))
    following = slice(half, half + 1)
    if most == 1:
        others = pair = following
    # One record alone, of ordinary size: beside a huge one, all that is remembered is a rounding.
    middle = int(x.double().reshape(len(x), -1).norm(dim=1).argsort()[len(x) // 2])

    def go(rows: slice) -> Sequence[Tensor]:
        return run(x[rows], y[rows])

    for asked in (slice(half), slice(middle, middle + 1)):
        probe.state.restore()
        answers = [go(asked)]
        probe.state.restore()
        for history in ((others, pair, following, last), (following, others), (last,)):
            for rows in history:
                go(rows)
            probe.state.restore_draws()
            answers.append(go(asked))
        if not all(agree(answers[0], answer, SAME_SHAPE) for answer in answers[1:]):
            raise MixesRecords(
                f"{type(probe.model).__name__} (or its loss) is stateful: the same records give "
                "something else after others were seen, so earlier records, without noise, are in "
                "later gradients. Remove what is kept from pass to pass, or do not update it in "
                "training; if it draws random numbers, draw them from torch's generator"
            )


def _require_apart(probe: Probe, losses: Losses, remedy: str) -> None:
    x, y = probe.inputs, probe.targets
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).to(x.device)
    first, second = order[: (len(x) + 1) // 2], order[(len(x) + 1) // 2 :]

    def apart() -> bool:
        with IndexCasts() as casts:
            expected = _look(probe, losses, x, y, first, second)
        if expected.crosses or not _any_size(probe):
            return False
        # A backward pass may mix cotangents: the others' losses count ten thousand times here.
        probe.state.restore_draws()
        weights_B = torch.ones(len(x), device=x.device)
        weights_B[second] = _LOUD
        _, together, _ = _differentiate({}, losses, x, y, weights_B=weights_B)
        if not agree(expected.rows[1:], [g[first] for g in together], SAME_SHAPE):
            return False
        for rows in _exchanged(first, second, x):
            if not _same(expected, _look(probe, losses, x[rows], y[rows], first, second)):
                return False
        back = _look(probe, losses, x, y, second, first)
        rows = next(_exchanged(second, first, x))
        if back.crosses or not _same(back, _look(probe, losses, x[rows], y[rows], second, first)):
            return False
        scripted = any(isinstance(m, torch.jit.ScriptModule) for m in probe.model.modules())
        if not x.is_floating_point() or casts.found or scripted:
            return True
        loud = x.clone()
        loud[second] *= _LOUD
        try:
            louder = _look(probe, losses, loud, y, first, second)
        except Exception:  # no record has such values: a model that refuses them is not at fault
            return True
        return _same(expected, louder)

    probe.state.restore()
    if not apart():
        raise UnsupportedModule(
            f"records meet inside {type(probe.model).__name__}: what one of them gives changes "
            f"with the others, so no record's share is bounded. {remedy}"
        )


@dataclass(frozen=True)
class _Look:
    """What some records give, and whether their gradient reaches the inputs of others."""

    rows: list[Tensor]
    crosses: bool


def _look(probe: Probe, losses: Losses, x: Tensor, y: Tensor, stay: Tensor, go: Tensor) -> _Look:
    probe.state.restore_draws()
    losses_B, inputs, _ = _differentiate({}, losses, x, y, stay)
    norms = [[_finite_norm(g[rows]) for rows in (stay, go)] for g in inputs]
    crosses = any(bool(other > _ZERO * own) for own, other in norms)
    return _Look([losses_B[stay], *(g[stay] for g in inputs)], crosses)


def _finite_norm(rows: Tensor) -> Tensor:
    """A zero cotangent times a number that is not finite is NaN, and yet no record's."""
    return torch.where(rows.isfinite(), rows, 0.0).double().norm()


def _same(a: _Look, b: _Look) -> bool:
    return not b.crosses and agree(a.rows, b.rows, SAME_SHAPE)


def _gradients(parameters: dict[str, nn.Parameter], losses: Losses) -> Pass:
    """Losses of the records, their gradients in the inputs, and the sum's in the parameters."""

    def run(x: Tensor, y: Tensor) -> list[Tensor]:
        losses_B, inputs, weights = _differentiate(parameters, losses, x, y, slice(None))
        return [losses_B, *inputs, *weights]

    return run


def _differentiate(
    parameters: dict[str, nn.Parameter],
    losses: Losses,
    x: Tensor,
    y: Tensor,
    rows: Tensor | slice = slice(None),
    weights_B: Tensor | None = None,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Losses of all; gradients of the (weighted) sum over `rows`, in inputs and parameters."""
    with torch.enable_grad():
        x = x.detach().clone().requires_grad_(x.is_floating_point())
        losses_B = losses(x, y)
        sources = [t for t in (x, *parameters.values()) if t.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(sources)
        if sources and losses_B.requires_grad:
            counted_B = losses_B if weights_B is None else losses_B * weights_B.to(losses_B)
            found = torch.autograd.grad(counted_B[rows].sum(), sources, allow_unused=True)
    pairs = [(t, g) for t, g in zip(sources, found, strict=True) if g is not None]
    weights = [g.to_dense().reshape(1, -1) for t, g in pairs if t is not x]
    return losses_B.detach(), [g for t, g in pairs if t is x], weights


def _exchanged(stay: Tensor, go: Tensor, x: Tensor) -> Iterator[Tensor]:
    """Rows with those of `go` exchanged: for other records, among themselves, and for one.

    The one is each of the two with the largest and the smallest sum of inputs, and some others:
    many copies of a record fill what counts records of its kind.
    """
    by_sum = stay[x[stay].double().reshape(len(stay), -1).sum(dim=1).argsort()]
    ones = torch.cat([by_sum[-1:], by_sum[:1], stay[:2]])
    for instead in (stay[: len(go)], go.flip(0), *ones.split(1)):
        rows = torch.arange(len(x), device=stay.device)
        rows[go] = instead if len(instead) == len(go) else instead[:1]
        yield rows


def _any_size(probe: Probe) -> bool:
    """Whether outputs are the same one, two and many records at a time.

    Draws differ with the shape, so dropout is the identity here; a model that draws in another way
    (stochastic depth) cannot be asked.
    """
    x = probe.inputs[:_MOST_IN_A_PASS]
    probe.state.restore_draws()
    with NoDropout():
        whole = _outputs(probe.model, x)
        if probe.state.drawn():
            return True
        parts = [slice(1), slice(2), slice(-2, None), slice(-1, None)]
        return all(
            agree([t[rows] for t in whole], _outputs(probe.model, x[rows]), OTHER_SHAPE)
            for rows in parts
        )


def _outputs(model: nn.Module, x: Tensor) -> list[Tensor]:
    found = tree_leaves(model(x))
    kept = [t for t in found if isinstance(t, Tensor) and t.dim() > 0 and len(t) == len(x)]
    return [t.detach() for t in kept]
