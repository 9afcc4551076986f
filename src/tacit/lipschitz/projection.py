"""Keeps constrained weights in their sets: after a step by projection, in a query by proof.

Weights of one shape and set are one batch of matrices. On a GPU the many small launches of a
projection are recorded once and replayed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
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


class Recorded:
    """Runs a function, on a GPU from its second use on as a CUDA graph.

    The function must read and write the same tensors in place each time, wait for nothing and
    return nothing. A recording is valid for one `key`: the tensors' addresses and all else that the
    function depends on. `holds` keeps those alive, so that no other tensor gets the same key.
    """

    def __init__(self) -> None:
        self._key: Hashable = None
        self._graph: Any = None
        self._holds: object = None

    def __call__(
        self, work: Callable[[], None], key: Hashable, holds: object, device: torch.device
    ) -> None:
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            work()
            return
        if self._key != key:
            self._graph, self._key, self._holds = None, key, holds
            work()
            return
        if self._graph is None:
            self._graph, _ = capture(work, warm_ups=1)
        self._graph.replay()


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
    layers = (m for m in model.modules() if isinstance(m, Constrained))
    return require_parameters(c for layer in layers for c in layer.constraints())


def require_parameters(constraints: Iterable[Constraint]) -> list[Constraint]:
    """Refuse weights that are computed from other parameters: they leave their set at once."""
    found = list(constraints)
    if not all(isinstance(c.parameter, nn.Parameter) for c in found):
        raise UnboundedLayer(
            "a constrained weight is computed from other parameters and cannot be projected; "
            "remove its parametrization, or train this model with PerSampleClip"
        )
    return found


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
class _Alike:
    """Weights of one shape in one set, their values when last certified, and their norms then."""

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

    def norms_by_distance(self, found: Tensor) -> Tensor:
        """‖W‖ ≤ ‖certified‖ + spread·‖W − certified‖_F: a proof that costs one subtraction.

        Exact where nothing has changed.
        """
        moved_L = (found.double() - self.certified).flatten(1).norm(dim=1)
        return self.norms_L + self.within.spread * moved_L * (1 + 2.0**-40)

    def write(self, stack: Tensor) -> None:
        copy_each(self.weights, list(stack.to(self.weights[0].dtype).unbind(0)))


class _Cluster:
    """Groups that share weights, or one group that shares none. A weight shrinks for all its sets.

    Shrinking never leaves a set, so one factor, the smallest of those that its sets require, serves
    all of them. The weight is certified as the model holds it, rounded to its type, and its norm is
    then within the limit: the next call leaves it as it is, bit for bit.
    """

    def __init__(self, groups: list[_Alike]) -> None:
        self.groups = groups
        self._places: dict[int, list[tuple[int, int]]] = {}
        for g, alike in enumerate(groups):
            for i, weight in enumerate(alike.weights):
                self._places.setdefault(weight.data_ptr(), []).append((g, i))

    def project(self) -> None:
        """Move the weights to their sets, roughly and in at least float32, and certify them."""
        for alike in self.groups:
            alike.write(alike.within.project(wide(alike.current())))
        self.certify()

    def certify(self) -> None:
        """Take every weight's norm, and shrink what is outside."""
        found = [alike.current() for alike in self.groups]
        norms = [a.within.norm_upper(w) for a, w in zip(self.groups, found, strict=True)]
        half = any(wide_dtype(w.dtype) != w.dtype for w in found)
        self._keep(*(self._shrunk_and_measured if half else self._shrunk)(found, norms))

    def check(self) -> None:
        """The same by the cheap proof, for weights that no known write has changed.

        A weight that has changed all the same is shrunk by more than necessary, which is sound.
        """
        found = [alike.current() for alike in self.groups]
        norms = [a.norms_by_distance(w) for a, w in zip(self.groups, found, strict=True)]
        if not self._all_inside(norms):
            self._keep(*self._shrunk(found, norms))

    def _shrunk(
        self, found: list[Tensor], norms: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Each weight times a factor f, and its new norm by proof.

        Factor and product are rounded, by at most 2·eps of each entry together, so with n the norm
        ‖round(f·W)‖ ≤ f·(n + spread·2·eps·‖W‖_F). f brings this to the limit.
        """
        reach = []
        for alike, w, n in zip(self.groups, found, norms, strict=True):
            size = w.double().flatten(1).norm(dim=1)
            reach.append(n + alike.within.spread * 2 * torch.finfo(w.dtype).eps * size)
        factors = self._factors(norms, reach, 1.0)
        held = [_times(w, f) for w, f in zip(found, factors, strict=True)]
        after = [
            torch.where(f < 1, f * r, n) for f, r, n in zip(factors, reach, norms, strict=True)
        ]
        return held, after

    def _shrunk_and_measured(
        self, found: list[Tensor], norms: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The same in half precision, where the proof would cost a tenth of the norm.

        The weight is shrunk, rounded and measured. If rounding moved it outside, it is shrunk a
        little more, always from the given weight. In the end it is halved, which rounds only
        numbers too small to matter.
        """
        held, scales = found, [torch.ones_like(n) for n in norms]
        for attempt in range(_ATTEMPTS):
            if self._all_inside(norms):
                return held, norms
            factors = self._factors(norms, norms, (1 + SLACK) * (1 - (attempt + 1) * 2.0**-8))
            scales = [s * f for s, f in zip(scales, factors, strict=True)]
            held = [_times(w, s) for w, s in zip(found, scales, strict=True)]
            norms = [a.within.norm_upper(w) for a, w in zip(self.groups, held, strict=True)]
        halves = [f.clamp_min(0.5) for f in self._factors(norms, norms, 0.5)]
        held = [_times(w, f) for w, f in zip(held, halves, strict=True)]
        return held, [a.within.norm_upper(w) for a, w in zip(self.groups, held, strict=True)]

    def _factors(self, norms: list[Tensor], reach: list[Tensor], share: float) -> list[Tensor]:
        """1 for a weight inside its sets, else the factor from `reach` to a share of the norm."""
        each = [
            torch.where(n <= alike.limit, 1.0, share * alike.within.max_norm / r.clamp_min(1e-300))
            for alike, n, r in zip(self.groups, norms, reach, strict=True)
        ]
        if len(each) == 1:
            return each
        least = {
            key: torch.stack([each[g][i] for g, i in places]).amin()
            for key, places in self._places.items()
        }
        return [torch.stack([least[w.data_ptr()] for w in a.weights]) for a in self.groups]

    def _all_inside(self, norms: list[Tensor]) -> bool:
        """Whether all are inside; False on a GPU, where the answer would have to be waited for."""
        if norms[0].device.type != "cpu":
            return False
        return all(bool((n <= a.limit).all()) for a, n in zip(self.groups, norms, strict=True))

    def _keep(self, held: list[Tensor], norms: list[Tensor]) -> None:
        for alike, w, n in zip(self.groups, held, norms, strict=True):
            alike.write(w)
            alike.certified.copy_(w)
            alike.norms_L.copy_(n)


_ATTEMPTS = 3


def _times(stack: Tensor, factor_L: Tensor) -> Tensor:
    """Each weight times its factor, rounded once; half precision in float32."""
    exact = wide(stack)
    factors = factor_L.to(exact.dtype).view((len(stack),) + (1,) * (stack.dim() - 1))
    return (exact * factors).to(stack.dtype)


class _Keeper:
    """The constrained weights of one model, and the recorded graphs of what is done to them."""

    def __init__(self, key: object, groups: list[_Alike]) -> None:
        self.key = key
        self.clusters = _clusters(groups)
        self._weights = [w for alike in groups for w in alike.weights]
        self._device = self._weights[0].device
        on_gpu = self._device.type == "cuda"
        self._streams = [torch.cuda.Stream(self._device) for _ in self.clusters if on_gpu]
        self._projecting, self._certifying, self._checking = Recorded(), Recorded(), Recorded()
        self._versions: list[int] | None = None

    def project(self) -> None:
        self._run(self._projecting, _Cluster.project)

    def enforce(self) -> None:
        """Use the cheap proof if no known write has changed the weights since the last time.

        PyTorch counts writes, except those through `.data`, which the proof covers.
        """
        if self._versions == self._versions_now():
            self._run(self._checking, _Cluster.check)
        else:
            self._run(self._certifying, _Cluster.certify)

    def _versions_now(self) -> list[int]:
        return [version_of(w) for w in self._weights]

    def _run(self, recorded: Recorded, work: Callable[[_Cluster], None]) -> None:
        def all_clusters() -> None:
            if not self._streams:
                for cluster in self.clusters:
                    work(cluster)
                return
            # One stream per cluster, whose matrices are too small to fill a GPU. In a recording
            # these are branches of the graph, and memory of a stream is not handed to another.
            here = torch.cuda.current_stream()
            for cluster, stream in zip(self.clusters, self._streams, strict=True):
                stream.wait_stream(here)
                with torch.cuda.stream(stream):
                    work(cluster)
            for stream in self._streams:
                here.wait_stream(stream)

        # No autocast and no TensorFloat-32: an orthogonal matrix needs all of its digits.
        with torch.no_grad(), no_autocast(self._device), ieee_float32():
            recorded(all_clusters, self.key, self, self._device)
        self._versions = self._versions_now()


def _clusters(groups: list[_Alike]) -> list[_Cluster]:
    """A cluster for each group whose weights are in no other, and one for all that share some."""
    uses = Counter(w.data_ptr() for alike in groups for w in alike.weights)

    def is_shared(alike: _Alike) -> bool:
        return any(uses[w.data_ptr()] > 1 for w in alike.weights)

    found = [_Cluster([alike]) for alike in groups if not is_shared(alike)]
    shared = [alike for alike in groups if is_shared(alike)]
    return [*found, _Cluster(shared)] if shared else found


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
        keeper = _KEEPERS[model] = _Keeper(key, _alike(constraints))
    return keeper


def _alike(constraints: list[Constraint]) -> list[_Alike]:
    members: dict[object, tuple[WeightSet, list[Tensor]]] = {}
    for c in constraints:
        p = c.parameter
        key = (c.within, p.shape, p.dtype, p.device)
        _, held = members.setdefault(key, (c.within, []))
        if not any(p is other for other in held):
            held.append(p)
    return [_Alike(within, held) for within, held in members.values()]
