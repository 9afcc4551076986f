"""Keeps constrained weights in their sets: after a step by projection, in a query by proof.

Weights of one shape and set are one batch of matrices. On a GPU the many small launches of a
projection are recorded once and replayed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tacit.engines.recorder import capture
from tacit.errors import UnboundedLayer
from tacit.lipschitz.sets import SLACK, WeightSet
from tacit.precision import ieee_float32, no_autocast, wide, wide_dtype
from tacit.torch_internals import copy_each, version_of


@dataclass(frozen=True)
class Constraint:
    """A parameter, and the set that its layer's bounds assume it to be in."""

    parameter: Tensor
    within: WeightSet


@runtime_checkable
class Constrained(Protocol):
    """A layer whose answers hold only while its parameters are in certain sets."""

    def constraints(self) -> list[Constraint]: ...


def constraints_of(model: nn.Module) -> list[Constraint]:
    """The constraints of all layers. A weight that two layers share is in both sets."""
    # `isinstance` takes ten times as long for a protocol, and this is asked in every step.
    layers: Iterable[Any] = (m for m in model.modules() if hasattr(type(m), "constraints"))
    return require_parameters(c for layer in layers for c in layer.constraints())


def require_parameters(constraints: Iterable[Constraint]) -> list[Constraint]:
    """Refuse weights that are computed from other parameters: they leave their set at once."""
    checked = list(constraints)
    if not all(isinstance(c.parameter, nn.Parameter) for c in checked):
        raise UnboundedLayer(
            "a constrained weight is computed from other parameters and cannot be projected; "
            "remove its parametrization, or train this model with PerSampleClip"
        )
    return checked


def project(model: nn.Module) -> None:
    """Project every constrained weight of the model onto its set, and certify it.

    Call it after an optimizer's step. It is post-processing and costs no privacy. Weights of one
    shape and set are one batch of matrices, and on a GPU all of it is one recorded graph, so the
    cost does not depend on the batch of records. A model without constraints stays as it is.
    """
    keeper = _keeper_of(model)
    if keeper is not None:
        keeper.project()


def enforce(model: nn.Module, constraints: list[Constraint] | None = None) -> None:
    """Shrink every constrained weight that is not certified to be in its set; keep the others.

    A query does this before it relies on the bounds, so that projecting cannot be forgotten. It
    passes the constraints of the program that it runs; the default are those of the model's layers.
    """
    keeper = _keeper_of(model, constraints)
    if keeper is not None:
        keeper.enforce()


@dataclass
class _Group:
    """Weights of one shape in one set, with their last certified values and norms."""

    within: WeightSet
    weights: list[Tensor]

    def __post_init__(self) -> None:
        self.certified = torch.zeros_like(self.current())
        self.norms_L = self.certified.new_zeros(len(self.weights), dtype=torch.float64)

    @property
    def limit(self) -> float:
        return self.within.max_norm * (1 + SLACK)

    def current(self) -> Tensor:
        return torch.stack([w.detach() for w in self.weights])

    def norms_by_distance(self, stack: Tensor) -> Tensor:
        """‖W‖ ≤ ‖certified‖ + spread·‖W − certified‖_F: a proof that costs one subtraction.

        Exact where nothing has changed.
        """
        moved_L = (stack.double() - self.certified).flatten(1).norm(dim=1)
        return self.norms_L + self.within.spread * moved_L * (1 + 2.0**-40)

    def write(self, stack: Tensor) -> None:
        copy_each(self.weights, list(stack.to(self.weights[0].dtype).unbind(0)))


class _Cluster:
    """Groups that share weights, or one group that shares none. A weight shrinks for all its sets.

    Shrinking never leaves a set, so one factor, the smallest of those that its sets require, serves
    all of them. The weight is certified as the model holds it, rounded to its type, and its norm is
    then within the limit: the next call leaves it as it is, bit for bit.

    Lists of tensors have one entry per group, which has one row or number per weight.
    """

    def __init__(self, groups: list[_Group]) -> None:
        self.groups = groups
        self._places: dict[int, list[tuple[int, int]]] = {}
        for g, group in enumerate(groups):
            for i, weight in enumerate(group.weights):
                self._places.setdefault(weight.data_ptr(), []).append((g, i))

    def project(self) -> None:
        """Move the weights to their sets, roughly and in at least float32, and certify them."""
        for group in self.groups:
            group.write(group.within.project(wide(group.current())))
        self.certify()

    def certify(self) -> None:
        """Take every weight's norm, and shrink what is outside."""
        stacks = [group.current() for group in self.groups]
        norms = self._norms(stacks)
        half = any(wide_dtype(w.dtype) != w.dtype for w in stacks)
        self._keep(*(self._shrunk_and_measured if half else self._shrunk)(stacks, norms))

    def check(self) -> None:
        """The same by the cheap proof, for weights that no known write has changed.

        A weight that has changed all the same is shrunk by more than necessary, which is sound.
        """
        stacks = [group.current() for group in self.groups]
        norms = [g.norms_by_distance(w) for g, w in zip(self.groups, stacks, strict=True)]
        if not self._all_inside(norms):
            self._keep(*self._shrunk(stacks, norms))

    def _norms(self, stacks: list[Tensor]) -> list[Tensor]:
        return [g.within.norm_upper(w) for g, w in zip(self.groups, stacks, strict=True)]

    def _shrunk(
        self, stacks: list[Tensor], norms: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Each weight times a factor f, and its new norm by proof.

        Factor and product are rounded, by at most 2·eps of each entry together, so with n the norm
        ‖round(f·W)‖ ≤ f·(n + spread·2·eps·‖W‖_F). f brings this to the limit.
        """
        reach = []
        for group, w, n in zip(self.groups, stacks, norms, strict=True):
            size = w.double().flatten(1).norm(dim=1)
            reach.append(n + group.within.spread * 2 * torch.finfo(w.dtype).eps * size)
        factors = self._factors(norms, reach, 1.0)
        after = [
            torch.where(f < 1, f * r, n) for f, r, n in zip(factors, reach, norms, strict=True)
        ]
        return _times(stacks, factors), after

    def _shrunk_and_measured(
        self, stacks: list[Tensor], norms: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The same in half precision, where the proof would cost a tenth of the norm.

        The weight is shrunk, rounded and measured. If rounding moved it outside, it is shrunk a
        little more, always from the given weight. In the end it is halved, which rounds only
        numbers too small to matter.
        """
        shrunk, scales = stacks, [torch.ones_like(n) for n in norms]
        for attempt in range(_ATTEMPTS):
            if self._all_inside(norms):
                return shrunk, norms
            factors = self._factors(norms, norms, (1 + SLACK) * (1 - (attempt + 1) * 2.0**-8))
            scales = [s * f for s, f in zip(scales, factors, strict=True)]
            shrunk = _times(stacks, scales)
            norms = self._norms(shrunk)
        shrunk = _times(shrunk, [f.clamp_min(0.5) for f in self._factors(norms, norms, 0.5)])
        return shrunk, self._norms(shrunk)

    def _factors(self, norms: list[Tensor], reach: list[Tensor], share: float) -> list[Tensor]:
        """1 for a weight inside its sets, else the factor from `reach` to a share of the norm."""
        factors = [
            torch.where(n <= group.limit, 1.0, share * group.within.max_norm / r.clamp_min(1e-300))
            for group, n, r in zip(self.groups, norms, reach, strict=True)
        ]
        if len(factors) == 1:
            return factors
        least = {
            key: torch.stack([factors[g][i] for g, i in places]).amin()
            for key, places in self._places.items()
        }
        return [torch.stack([least[w.data_ptr()] for w in g.weights]) for g in self.groups]

    def _all_inside(self, norms: list[Tensor]) -> bool:
        """Whether all are inside; False on a GPU, where the answer would have to be waited for."""
        if norms[0].device.type != "cpu":
            return False
        return all(bool((n <= g.limit).all()) for g, n in zip(self.groups, norms, strict=True))

    def _keep(self, stacks: list[Tensor], norms: list[Tensor]) -> None:
        for group, w, n in zip(self.groups, stacks, norms, strict=True):
            group.write(w)
            group.certified.copy_(w)
            group.norms_L.copy_(n)


_ATTEMPTS = 3


def _times(stacks: list[Tensor], factors: list[Tensor]) -> list[Tensor]:
    """Each weight times its factor, rounded once; half precision in float32."""
    products = []
    for stack, factor_L in zip(stacks, factors, strict=True):
        exact = wide(stack)
        factor = factor_L.to(exact.dtype).view((len(stack),) + (1,) * (stack.dim() - 1))
        products.append((exact * factor).to(stack.dtype))
    return products


class _Keeper:
    """The constrained weights of one model, and what is done to them.

    On a GPU each of `_Cluster`'s three methods runs as a CUDA graph from its second use on. They
    read and write the same tensors in place, wait for nothing and return nothing.
    """

    def __init__(self, key: object, groups: list[_Group]) -> None:
        self.key = key
        self.clusters = _clusters(groups)
        self._weights = [w for group in groups for w in group.weights]
        self._device = self._weights[0].device
        on_gpu = self._device.type == "cuda"
        self._streams = [torch.cuda.Stream(self._device) for _ in self.clusters if on_gpu]
        self._graphs: dict[Callable[[_Cluster], None], torch.cuda.CUDAGraph | None] = {}
        self._versions: list[int] | None = None

    def project(self) -> None:
        self._run(_Cluster.project)

    def enforce(self) -> None:
        """Use the cheap proof if no known write has changed the weights since the last time.

        PyTorch counts writes, except those through `.data`, which the proof covers.
        """
        self._run(_Cluster.check if self._versions == self._versions_now() else _Cluster.certify)

    def _versions_now(self) -> list[int]:
        return [version_of(w) for w in self._weights]

    def _run(self, work: Callable[[_Cluster], None]) -> None:
        # No autocast and no TensorFloat-32: an orthogonal matrix needs all of its digits.
        with torch.no_grad(), no_autocast(self._device), ieee_float32():
            if not self._streams or torch.cuda.is_current_stream_capturing():
                self._on_every_cluster(work)
            elif work not in self._graphs:
                self._graphs[work] = None
                self._on_every_cluster(work)
            else:
                graph = self._graphs[work]
                if graph is None:
                    graph, _ = capture(lambda: self._on_every_cluster(work), warm_ups=1)
                    self._graphs[work] = graph
                graph.replay()
        self._versions = self._versions_now()

    def _on_every_cluster(self, work: Callable[[_Cluster], None]) -> None:
        """On a GPU, one stream per cluster, whose matrices are too small to fill it.

        In a recording these are branches of the graph, and memory of a stream is not handed to
        another.
        """
        if not self._streams:
            for cluster in self.clusters:
                work(cluster)
            return
        here = torch.cuda.current_stream()
        for cluster, stream in zip(self.clusters, self._streams, strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                work(cluster)
        for stream in self._streams:
            here.wait_stream(stream)


def _clusters(groups: list[_Group]) -> list[_Cluster]:
    """A cluster for each group whose weights are in no other, and one for all that share some."""
    uses = Counter(w.data_ptr() for group in groups for w in group.weights)
    shares = [any(uses[w.data_ptr()] > 1 for w in group.weights) for group in groups]
    single = [_Cluster([group]) for group, shared in zip(groups, shares, strict=True) if not shared]
    linked = [group for group, shared in zip(groups, shares, strict=True) if shared]
    return [*single, _Cluster(linked)] if linked else single


# Weak, so that no model is kept alive.
_KEEPERS: WeakKeyDictionary[nn.Module, _Keeper] = WeakKeyDictionary()


def _keeper_of(model: nn.Module, constraints: list[Constraint] | None = None) -> _Keeper | None:
    if constraints is None:
        constraints = constraints_of(model)
    if not constraints:
        return None
    # By the parameter and its memory: another parameter may come to lie where one has gone.
    key = frozenset(
        (c.within, id(c.parameter), c.parameter.data_ptr(), c.parameter.dtype) for c in constraints
    )
    keeper = _KEEPERS.get(model)
    if keeper is None or keeper.key != key:
        _require_own_memory([c.parameter for c in constraints])
        groups: dict[tuple[Any, ...], dict[int, Tensor]] = defaultdict(dict)
        for c in constraints:
            alike = (c.within, c.parameter.shape, c.parameter.dtype, c.parameter.device)
            groups[alike].setdefault(id(c.parameter), c.parameter)
        keeper = _KEEPERS[model] = _Keeper(
            key, [_Group(alike[0], list(weights.values())) for alike, weights in groups.items()]
        )
    return keeper


def _require_own_memory(weights: list[Tensor]) -> None:
    """Refuse weights that lie partly over each other: shrinking one would stretch the other.

    Weights that begin at the same place shrink by one factor, and are allowed.
    """
    start = end = 0
    for weight in sorted(weights, key=Tensor.data_ptr):
        if start != weight.data_ptr() < end:
            raise UnboundedLayer(
                "two constrained weights lie partly over each other in memory, so neither can be "
                "kept in its set; give each its own, as in layer.weight = "
                "nn.Parameter(layer.weight.detach().clone())"
            )
        start = weight.data_ptr()
        steps = zip(weight.shape, weight.stride(), strict=True)
        size = 1 + sum((n - 1) * stride for n, stride in steps)
        end = max(end, start + size * weight.element_size())
