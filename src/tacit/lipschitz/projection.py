"""Keeps constrained weights in their sets: after a step by projection, in a query by proof."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tacit.cuda_graph import side_by_side
from tacit.errors import UnboundedLayer
from tacit.lipschitz.recorded import Recorded
from tacit.lipschitz.sets import WeightSet, shrinking, shrunk


@dataclass(frozen=True)
class Constraint:
    """A parameter, and the set that its layer's bounds take it to be in."""

    parameter: Tensor
    within: WeightSet


@runtime_checkable
class Constrained(Protocol):
    """A layer whose answers hold only while its parameters are in certain sets."""

    def constraints(self) -> list[Constraint]: ...


def constraints_of(model: nn.Module) -> list[Constraint]:
    """Those of all layers; of a weight that two layers share, both hold.

    Only a parameter can be kept in a set: a weight that is computed from another (by a
    parametrization, say) would be computed anew, outside it.
    """
    found = [c for m in model.modules() if isinstance(m, Constrained) for c in m.constraints()]
    for constraint in found:
        if not isinstance(constraint.parameter, nn.Parameter):
            raise UnboundedLayer(
                "a constrained weight is computed from other parameters and cannot be projected; "
                "remove its parametrization, or train this model with PerSampleClip"
            )
    return found


def project(model: nn.Module) -> None:
    """Project every constrained weight of the model onto its set, and certify it.

    For after an optimizer's step; post-processing, free of privacy. Weights of one shape and set
    are one batch of matrices, and on a GPU the whole is one recorded graph, so the cost does not
    depend on the batch of records. A model without constraints is left as it is.
    """
    keeper = _keeper_of(model)
    if keeper is not None:
        keeper.project()


def enforce(model: nn.Module, constraints: list[Constraint] | None = None) -> None:
    """Shrink every constrained weight that is not certified to be in its set; leave the others.

    What a query does before it relies on the bounds: then nobody can forget to project. It gives
    the constraints of the program that it runs; without them they are those of the model's layers.
    """
    keeper = _keeper_of(model, constraints)
    if keeper is not None:
        keeper.enforce()


@dataclass
class _Alike:
    """Weights of one shape in one set, as they were last certified, and their norms then."""

    within: WeightSet
    weights: list[Tensor]
    certified: Tensor
    norms_L: Tensor

    def now(self) -> Tensor:
        return torch.stack([w.detach() for w in self.weights])

    def keep(self, found: Tensor) -> None:
        """Certify these, shrink what is outside, write them to the model and remember them."""
        norms_L = self.within.norm_upper(found)
        held = shrunk(found, norms_L, self.within.max_norm)
        factor_L = shrinking(norms_L, self.within.max_norm, found.dtype)
        self.certified.copy_(held)
        self.norms_L.copy_(norms_L * factor_L * (1 + 4 * torch.finfo(found.dtype).eps))
        self._write(held)

    def check(self) -> None:
        """‖W‖ ≤ ‖certified‖ + spread·‖W − certified‖_F: a proof that costs one subtraction.

        Exact where nothing has changed. What has, without being projected, is shrunk by more than
        it need be; that is sound.
        """
        found = self.now()
        moved_L = (found.double() - self.certified).flatten(1).norm(dim=1)
        norms_L = self.norms_L + self.within.spread * moved_L * (1 + 2.0**-40)
        self._write(shrunk(found, norms_L, self.within.max_norm))

    def _write(self, stack: Tensor) -> None:
        torch._foreach_copy_(self.weights, list(stack.to(self.weights[0].dtype).unbind(0)))


class _Keeper:
    """The constrained weights of one model, and the graphs that look after them."""

    def __init__(self, key: object, groups: list[_Alike]) -> None:
        self.key = key
        self.groups = groups
        self.alone, self.shared = _apart(groups)
        self._projecting, self._certifying, self._checking = Recorded(), Recorded(), Recorded()
        self._versions: list[int] | None = None
        self._branches: list[torch.cuda.Stream] = []

    def project(self) -> None:
        self._run(self._projecting, lambda alike: alike.keep(alike.within.project(alike.now())), 2)
        self._versions = self._versions_now()

    def enforce(self) -> None:
        """By the cheap proof if nothing is known to have written to the weights since the last.

        PyTorch counts writes, except those through `.data`, which the proof is there for.
        """
        if self._versions == self._versions_now():
            self._run(self._checking, _Alike.check)
        else:
            self._run(self._certifying, lambda alike: alike.keep(alike.now()), 1)
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        return [w._version for alike in self.groups for w in alike.weights]

    def _streams(self, device: torch.device) -> list[torch.cuda.Stream]:
        """One a group: their matrices are too small to fill a GPU, and do not wait for others."""
        if not self._branches:
            self._branches = [torch.cuda.Stream(device) for _ in self.alone]
        return self._branches

    def _run(
        self, recorded: Recorded, work: Callable[[_Alike], None], shrink_again: int = 0
    ) -> None:
        """Groups that share a weight work in turn, and then `shrink_again` times certify it.

        Projecting onto one set can leave another; shrinking leaves none, so that after one round
        the weight is in all of its sets. The second round finds it there, and remembers it.
        """
        device = self.groups[0].certified.device

        def all_groups() -> None:
            if device.type == "cuda":
                side_by_side([partial(work, alike) for alike in self.alone], self._streams(device))
            else:
                for alike in self.alone:
                    work(alike)
            for alike in self.shared:
                work(alike)
            for _ in range(shrink_again):
                for alike in self.shared:
                    alike.keep(alike.now())

        with _plain_arithmetic(device.type):
            recorded(all_groups, self.key, self, device)


def _apart(groups: list[_Alike]) -> tuple[list[_Alike], list[_Alike]]:
    """The groups whose weights are in no other, and those that share some."""
    uses = Counter(place for alike in groups for place in {w.data_ptr() for w in alike.weights})
    shared = [any(uses[w.data_ptr()] > 1 for w in alike.weights) for alike in groups]
    pairs = list(zip(groups, shared, strict=True))
    return [g for g, common in pairs if not common], [g for g, common in pairs if common]


# Nothing is kept of a model that is gone.
_KEEPERS: WeakKeyDictionary[nn.Module, _Keeper] = WeakKeyDictionary()


def _keeper_of(model: nn.Module, constraints: list[Constraint] | None = None) -> _Keeper | None:
    if constraints is None:
        constraints = constraints_of(model)
    if not constraints:
        return None
    key = frozenset((c.within, c.parameter.data_ptr(), c.parameter.dtype) for c in constraints)
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
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.no_grad(), torch.autocast(device_type, enabled=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
