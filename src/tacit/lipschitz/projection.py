"""Keeps constrained weights in their sets: after a step by projection, in a query by proof.

Weights of one shape and set are one batch of matrices. On a GPU the many small launches of a
projection are recorded once and replayed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tacit.engines.recorder import capture
from tacit.errors import UnboundedLayer
from tacit.lipschitz.sets import SLACK, WeightSet
from tacit.precision import ieee_float32
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
    certified: Tensor
    norms_L: Tensor

    @property
    def limit(self) -> float:
        return self.within.max_norm * (1 + SLACK)

    def current(self) -> Tensor:
        return torch.stack([w.detach() for w in self.weights])

    def project(self) -> None:
        """Move the weights to the set, roughly; half precision is projected in float32."""
        found = self.current()
        self.write(self.within.project(found.to(_wide(found.dtype))))

    def norms_by_distance(self, found: Tensor) -> Tensor:
        """‖W‖ ≤ ‖certified‖ + spread·‖W − certified‖_F: a proof that costs one subtraction.

        Exact where nothing has changed.
        """
        moved_L = (found.double() - self.certified).flatten(1).norm(dim=1)
        return self.norms_L + self.within.spread * moved_L * (1 + 2.0**-40)

    def remember(self, held: Tensor, norms_L: Tensor) -> None:
        self.certified.copy_(held)
        self.norms_L.copy_(norms_L)

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
        for alike in self.groups:
            alike.project()
        self.certify()

    def certify(self) -> None:
        """Take every weight's norm, and shrink what is outside."""
        found = [alike.current() for alike in self.groups]
        norms = [a.within.norm_upper(w) for a, w in zip(self.groups, found, strict=True)]
        if any(_wide(w.dtype) != w.dtype for w in found):
            self._keep(*self._shrunk_and_measured(found, norms))
        else:
            self._keep(*self._shrunk(found, norms))

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
        held = [_times(w, f).to(w.dtype) for w, f in zip(found, factors, strict=True)]
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
            held = [_times(w, s).to(w.dtype) for w, s in zip(found, scales, strict=True)]
            norms = [a.within.norm_upper(w) for a, w in zip(self.groups, held, strict=True)]
        halves = [f.clamp_min(0.5) for f in self._factors(norms, norms, 0.5)]
        held = [_times(w, f).to(w.dtype) for w, f in zip(held, halves, strict=True)]
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
            alike.remember(w, n)


_ATTEMPTS = 3


def _times(stack: Tensor, factor_L: Tensor) -> Tensor:
    """Each weight times its factor, half precision in float32."""
    wide = stack.to(_wide(stack.dtype))
    return wide * factor_L.to(wide.dtype).view((len(stack),) + (1,) * (stack.dim() - 1))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _Keeper:
    """The constrained weights of one model, and the recorded graphs of what is done to them."""

    def __init__(self, key: object, groups: list[_Alike]) -> None:
        self.key = key
        self.groups = groups
        self.clusters = _clusters(groups)
        self._projecting, self._certifying, self._checking = Recorded(), Recorded(), Recorded()
        self._versions: list[int] | None = None
        self._branches: list[torch.cuda.Stream] = []

    def project(self) -> None:
        self._run(self._projecting, _Cluster.project)
        self._versions = self._versions_now()

    def enforce(self) -> None:
        """Use the cheap proof if no known write has changed the weights since the last time.

        PyTorch counts writes, except those through `.data`, which the proof covers.
        """
        if self._versions == self._versions_now():
            self._run(self._checking, _Cluster.check)
        else:
            self._run(self._certifying, _Cluster.certify)
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        return [version_of(w) for alike in self.groups for w in alike.weights]

    def _streams(self, device: torch.device) -> list[torch.cuda.Stream]:
        """One per cluster: their matrices are too small to fill a GPU, and need not wait."""
        if not self._branches:
            self._branches = [torch.cuda.Stream(device) for _ in self.clusters]
        return self._branches

    def _run(self, recorded: Recorded, work: Callable[[_Cluster], None]) -> None:
        device = self.groups[0].certified.device

        def all_clusters() -> None:
            works = [partial(work, cluster) for cluster in self.clusters]
            if device.type == "cuda":
                _side_by_side(works, self._streams(device))
            else:
                for one in works:
                    one()

        with _plain_arithmetic(device.type):
            recorded(all_clusters, self.key, self, device)


def _side_by_side(
    works: Sequence[Callable[[], None]], streams: Sequence[torch.cuda.Stream]
) -> None:
    """Independent work, each on a stream of its own; later work waits for all of it.

    In a recording these are branches of the graph, so their small kernels run side by side. Memory
    that a stream allocates is not handed to another.
    """
    here = torch.cuda.current_stream()
    for work, stream in zip(works, streams, strict=True):
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            work()
    for stream in streams:
        here.wait_stream(stream)


def _clusters(groups: list[_Alike]) -> list[_Cluster]:
    """A cluster for each group whose weights are in no other, and one for all that share some."""
    uses = Counter(place for alike in groups for place in {w.data_ptr() for w in alike.weights})
    apart = [all(uses[w.data_ptr()] == 1 for w in alike.weights) for alike in groups]
    pairs = list(zip(groups, apart, strict=True))
    found = [_Cluster([group]) for group, alone in pairs if alone]
    shared = [group for group, alone in pairs if not alone]
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
    return [
        _Alike(
            within,
            held,
            torch.zeros_like(torch.stack([p.detach() for p in held])),
            torch.zeros(len(held), dtype=torch.float64, device=held[0].device),
        )
        for within, held in members.values()
    ]


@contextmanager
def _plain_arithmetic(device_type: str) -> Iterator[None]:
    """No autocast and no TensorFloat-32: an orthogonal matrix needs all of its digits."""
    with torch.no_grad(), torch.autocast(device_type, enabled=False), ieee_float32():
        yield
