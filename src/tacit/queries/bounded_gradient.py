"""A sum of gradients that knows how far one record can move it.

A `GradientQuery` turns a batch into a `BoundedGradient`: blocks of parameters, each with the sum of
its gradients and a bound on one unit's share, and one public divisor. Everything after it (noise,
ledger, training) is the same for all queries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self, runtime_checkable

from torch import Tensor, nn

from tacit.budget import Relation
from tacit.checks.side_effects import named_parameters_of
from tacit.sampling.sampler import Batch
from tacit.sampling.scheme import Unit
from tacit.torch_internals import unflattened


@dataclass(frozen=True)
class Block:
    """Some parameters, the sum of their gradients, and the bound on one unit's share of it.

    `bound` is the largest L2 norm that one sampled unit (a record, or a mini-set) adds to the
    sum, as a public constant. `factors` are public numbers that the sums of the parameters were
    multiplied by; what is released is divided by them again, after the noise. `active` are public
    masks: entries outside them are zero in every unit's contribution, and are released as zero.
    The repr leaves tensors out: the sums have no noise yet.
    """

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...] = field(repr=False)
    sums: tuple[Tensor, ...] = field(repr=False)
    bound: float
    factors: tuple[float, ...] | None = None
    active: tuple[Tensor | None, ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        assert len(self.names) == len(self.parameters) == len(self.sums)
        assert self.bound >= 0
        assert self.factors is None or len(self.factors) == len(self.names)
        assert self.active is None or len(self.active) == len(self.names)

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.parameters)


def blocks_from(
    total: Tensor,
    parameters: Mapping[str, nn.Parameter],
    blocks: Sequence[tuple[str, ...]],
    bounds: Sequence[float],
    factors: Sequence[float] | None = None,
    active: Mapping[str, Tensor] | None = None,
) -> tuple[Block, ...]:
    """Blocks over one vector that holds all sums, in the parameters' order.

    With `factors` m_h, one per block, everything is one block with one bound: that of the whole
    vector (m_1·g_1 | … | m_L·g_L).
    """
    assert total.numel() == sum(p.numel() for p in parameters.values())
    sums = dict(zip(parameters, unflattened(total, list(parameters.values())), strict=True))
    times: dict[str, float] | None = None
    if factors is not None:
        times = {n: m for names, m in zip(blocks, factors, strict=True) for n in names}
        sums = {n: t * times[n] for n, t in sums.items()}
        blocks = (tuple(times),)
    return tuple(
        Block(
            names=names,
            parameters=tuple(parameters[n] for n in names),
            sums=tuple(sums[n] for n in names),
            bound=bound,
            factors=None if times is None else tuple(times[n] for n in names),
            active=None if not active else tuple(active.get(n) for n in names),
        )
        for names, bound in zip(blocks, bounds, strict=True)
    )


@dataclass(frozen=True)
class Statistic:
    """A sum over records that a query needs for its next step, released with the gradient.

    To the mechanism it is one more block, without parameters: `value` is one number, `bound` the
    most that one unit adds to it, and `std` the deviation of its noise, a public constant that
    the query fixes. The noisy number, and nothing else, is handed to `observe` when the step has
    been charged; what the query makes of it is post-processing.
    """

    name: str
    value: Tensor = field(repr=False)
    bound: float
    std: float
    observe: Callable[[float], None] = field(repr=False)

    def __post_init__(self) -> None:
        assert self.value.dim() == 0
        assert self.bound >= 0
        assert self.std > 0


@dataclass(frozen=True)
class BoundedGradient:
    """The sums of a step, in blocks, and the L2 sensitivity of each.

    `unit` is what the bounds are for: one record's contribution, or one mini-set's. `divisor` is
    public: the expected number of units, never the real one. `released` are called, without an
    argument, when the step has been charged and drawn: a query that changes from step to step
    advances then, and not when it is merely called.

        bounded = query(model, loss, batch)
        bounded.sensitivities(Relation.REPLACE_ONE)  # Δ_h, the L2 sensitivity of each block's sum
    """

    blocks: tuple[Block, ...]
    divisor: float
    unit: Unit = Unit.RECORD
    statistics: tuple[Statistic, ...] = ()
    released: tuple[Callable[[], None], ...] = field(default=(), repr=False)

    def sensitivities(self, relation: Relation) -> list[float]:
        """The L2 sensitivity Δ_h of each block's sum.

        Adding or removing a record adds or removes its contribution: Δ = bound. Replacing it
        takes one contribution away and adds another: Δ = 2·bound. Any change to a record inside
        a mini-set turns one contribution of the set into another: Δ = 2·bound.
        """
        return [self._factor(relation) * block.bound for block in self.blocks]

    def statistic_sensitivities(self, relation: Relation) -> list[float]:
        """The same for each statistic."""
        return [self._factor(relation) * statistic.bound for statistic in self.statistics]

    def _factor(self, relation: Relation) -> int:
        return 1 if relation is Relation.ADD_OR_REMOVE_ONE and self.unit is Unit.RECORD else 2


class Loss(Protocol):
    """Maps outputs and targets of some records to a scalar, or to one number per record."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor: ...


class GradientQuery(Protocol):
    """Turns a batch into a bounded sum of gradients. The routes differ in nothing but the query.

    A query of your own has a `unit` and returns blocks whose `bound` no record can exceed:

        class SignedSum:
            unit = Unit.RECORD

            def __call__(self, model, loss, batch):
                (name, weight), = model.named_parameters()
                signs = torch.sign(torch.nan_to_num(batch.inputs.double()))
                if batch.mask is not None:  # padding rows must not count
                    signs = signs[batch.mask]
                total, bound = signs.sum(0).view_as(weight), weight.numel() ** 0.5
                block = Block((name,), (weight,), (total,), bound)
                return BoundedGradient((block,), divisor=batch.divisor)
    """

    @property
    def unit(self) -> Unit:
        """What its bounds are for; known before the first batch, so that noise can be planned."""
        ...

    def __call__(self, model: nn.Module, loss: Loss, batch: Batch) -> BoundedGradient: ...


@runtime_checkable
class Adapting(Protocol):
    """A query that changes with what was released, and so belongs to one run."""

    def fresh(self) -> Self:
        """The same query in its initial state, sharing nothing that changes."""
        ...


@runtime_checkable
class Recording(Protocol):
    """A query whose steps are recorded (`tacit.engines.recorder`)."""

    def expect(self, steps: int) -> None:
        """Announce how many steps are to come: long runs are worth compiling for."""

    def forget(self) -> None:
        """Free the memory of recorded steps."""


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training may change, by name, each once."""
    return {name: p for name, p in named_parameters_of(model).items() if p.requires_grad}


Blocks = tuple[tuple[str, ...], ...]


def all_together(model: nn.Module) -> Blocks:
    """One block for all parameters: flat clipping."""
    return (tuple(trainable(model)),)


def by_layer(model: nn.Module) -> Blocks:
    """One block per module that owns parameters: a layer's weight with its bias."""
    layers: dict[str, list[str]] = {}
    for name in trainable(model):
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    return tuple(tuple(names) for names in layers.values())


def by_parameter(model: nn.Module) -> Blocks:
    """One block per parameter tensor."""
    return tuple((name,) for name in trainable(model))


def by_prefix(model: nn.Module, groups: Mapping[str, Sequence[str]]) -> Blocks:
    """One block per named group of modules: {"body": ["conv1", "conv2"], "head": ["fc"]}."""
    taken: dict[str, str] = {}
    blocks = []
    for group, prefixes in groups.items():
        names = tuple(
            name
            for name in trainable(model)
            if any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)
        )
        for name in names:
            if name in taken:
                raise ValueError(f"{name!r} is in both {taken[name]!r} and {group!r}; choose one")
            taken[name] = group
        blocks.append(names)
    check_cover(tuple(blocks), model)
    return tuple(blocks)


def check_cover(blocks: Blocks, model: nn.Module) -> None:
    """Require every trainable parameter in exactly one block: one left out would have no bound."""
    listed = [name for block in blocks for name in block]
    known = set(trainable(model))
    unknown = sorted(set(listed) - known)
    missing = sorted(known - set(listed))
    if unknown or missing or len(listed) != len(set(listed)):
        raise ValueError(
            "blocks must hold every trainable parameter exactly once; "
            f"missing: {missing or 'none'}; not trainable or unknown: {unknown or 'none'}; "
            f"listed {len(listed)} names, {len(set(listed))} of them different"
        )
