"""What a pass begins from besides weights and records, to run it again: generators and buffers.

`State` takes both back. `SteadyDraws` makes random draws the same for every record, so that a
model can be asked for the same answers in batches of other sizes.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tacit.checks.side_effects import current_watch, same_tensors
from tacit.pytrees import Tree, device_of
from tacit.torch_internals import TorchDispatchMode, version_of

T = TypeVar("T")


class State:
    """The generators' states and a model's buffers and attributes now, to be taken back later.

    Generators are those of the process, for the device of `inputs`, and those that modules hold;
    without inputs there are none. With `names`, only the modules that hold these buffers are kept.
    Spectral normalisation moves its buffers in every pass, from its weights alone, so a pass that
    is run twice must begin both times from the same ones. A module whose buffers are taken back
    gets its attributes back too: one of them may say that a cache is filled.
    """

    def __init__(
        self,
        inputs: Tree | None,
        model: nn.Module | None = None,
        names: frozenset[str] | None = None,
    ) -> None:
        paths = None if names is None else {name.rpartition(".")[0] for name in names}
        modules = () if model is None or paths == set() else model.named_modules()
        self._names = names
        self._held = {
            path: _Held(module)
            for path, module in modules
            if not isinstance(module, torch.jit.ScriptModule)  # which keeps all out of reach
            if paths is None or path in paths
        }
        own = [v for held in self._held.values() for v in held.attributes.values()]
        generators = [] if inputs is None else [*_of_the_process(inputs), *map(_own, own)]
        self._draws = [(*pair, pair[0]()) for pair in generators if pair is not None]

    def drew(self) -> bool:
        """Whether any generator has drawn since."""
        return any(not _same_state(before, get()) for get, _, before in self._draws)

    def changed(self) -> frozenset[str]:
        """The names of the buffers that were written since. Reads their values."""
        found = {
            f"{path}.{name}".lstrip(".")
            for path, held in self._held.items()
            for name in held.written()
        }
        return frozenset(found if self._names is None else found & self._names)

    def attributes_changed(self) -> bool:
        return any(held.attributes_changed() for held in self._held.values())

    def restore_draws(self) -> None:
        for _, put, before in self._draws:
            put(before)

    def restore(self, names: frozenset[str] | None = None) -> None:
        """Generators, and these buffers with their modules' attributes; by default, the changed."""
        self.restore_draws()
        for held, own in self._holders(self.changed() if names is None else names):
            held.restore(own)

    def restore_entries(self) -> None:
        """Generators, and what buffers hold. Not attributes: what a model keeps is looked for."""
        self.restore_draws()
        for held in self._held.values():
            held.restore_entries()

    def restore_all(self) -> None:
        self.restore_draws()
        for held in self._held.values():
            held.restore({*held.buffers, *held.module._buffers})

    @contextmanager
    def as_before(self, names: frozenset[str]) -> Iterator[None]:
        """Within it, generators and modules that hold these buffers are as they were.

        What is written to the buffers is lost, and no tensor that a graph has saved is touched.
        """
        now = [(get, put, get()) for get, put, _ in self._draws]
        modules = [held.module for held in self._held.values()]
        of_modules = [(module, dict(vars(module)), dict(module._buffers)) for module in modules]
        try:
            self.restore_draws()
            for held, own in self._holders(names):
                held.restore(own, copies=True)
            yield
        finally:
            for _, put, state in now:
                put(state)
            for module, attributes, buffers in of_modules:
                _replace(vars(module), attributes)
                _replace(module._buffers, buffers)

    def _holders(self, names: Iterable[str]) -> Iterator[tuple[_Held, list[str]]]:
        """The modules that hold these buffers, each with its own names of them."""
        found: dict[str, list[str]] = {}
        for name in sorted(names):
            path, _, own = name.rpartition(".")
            found.setdefault(path, []).append(own)
        return ((self._held[path], own) for path, own in found.items())


def from_one_start(passes: Iterable[T], model: nn.Module) -> Iterator[T]:
    """What the passes give, each begun from the same buffers; what the last one wrote stays.

    How many passes a step takes depends on the number of records, which is private. So a buffer
    that counts passes counts steps, and no record's gradient depends on the passes before its own.
    """
    names = frozenset(current_watch(model).public)
    start, end = State(None, model, names), None
    for found in passes:
        yield found
        end = State(None, model, names)
        start.restore(names)
    if end is not None:
        end.restore(names)


class _Held:
    """One module's attributes and buffers, with the buffers' versions and entries."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.attributes = module, dict(vars(module))
        self.buffers = dict(module._buffers)
        self._before = {
            name: (buffer, version_of(buffer), buffer.detach().clone())
            for name, buffer in self.buffers.items()
            if buffer is not None and not is_lazy(buffer)
        }

    def written(self) -> list[str]:
        now = self.module._buffers
        return [
            name
            for name in {**self.buffers, **now}
            if (name in now) != (name in self.buffers)
            or now[name] is not self.buffers[name]
            or (name in self._before and self._is_written(name))
        ]

    def _is_written(self, name: str) -> bool:
        buffer, version, entries = self._before[name]
        return version_of(buffer) != version or not same_tensors(buffer, entries)

    def attributes_changed(self) -> bool:
        now, before = vars(self.module), self.attributes
        return now.keys() != before.keys() or any(now[n] is not v for n, v in before.items())

    def restore_entries(self) -> None:
        for buffer, _, entries in self._before.values():
            if not same_tensors(buffer, entries):  # a write would spoil the caller's own graphs
                buffer.detach().copy_(entries)

    def restore(self, names: Iterable[str], copies: bool = False) -> None:
        _replace(vars(self.module), self.attributes)
        for name in names:
            held = self.buffers.get(name)
            if name in self._before:
                buffer, _, entries = self._before[name]
                held = entries.clone() if copies else buffer
                if not copies and not same_tensors(buffer, entries):
                    buffer.detach().copy_(entries)
            if name in self.buffers:
                self.module._buffers[name] = held
            else:
                self.module._buffers.pop(name, None)


def _replace(table: dict[str, Any], by: dict[str, Any]) -> None:
    table.clear()
    table.update(by)


_Generator = tuple[Callable[[], Any], Callable[[Any], Any]]  # its state, and how to set it


def _of_the_process(inputs: Tree) -> Iterator[_Generator]:
    device = device_of(inputs)
    yield torch.get_rng_state, torch.set_rng_state
    yield random.getstate, random.setstate
    yield lambda: np.random.get_state(legacy=False), np.random.set_state
    if device.type == "cuda":
        yield (
            lambda: torch.cuda.get_rng_state(device),
            lambda state: torch.cuda.set_rng_state(state, device),
        )


def _own(value: Any) -> _Generator | None:
    """A generator that a module holds."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return lambda: copy.deepcopy(bits.state), lambda state: setattr(bits, "state", state)
    return None


def _same_state(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else repr(one) == repr(other)


class SteadyDraws(TorchDispatchMode):
    """Random numbers that are the same for every record, place and batch size.

    Uniform and normal draws are a constant, coins fall on one if they can (dropout keeps all),
    permutations keep the order. So a model with random draws can be asked twice, in batches of
    other sizes. Draws of other kinds are left as they are.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **kwargs)
        steady = _STEADY.get(func.overloadpacket.__name__)
        if steady is None:  # a fused kernel of attention draws by itself
            names = [argument.name for argument in func._schema.arguments[: len(args)]]
            pairs = zip(names, args, strict=True)
            args = tuple(0.0 if name == "dropout_p" else value for name, value in pairs)
            return func(*args, **kwargs | ({"dropout_p": 0.0} if "dropout_p" in kwargs else {}))
        return steady(*args, **{name: v for name, v in kwargs.items() if name != "generator"})


def _new(value: float) -> Callable[..., Tensor]:
    return lambda size, **options: torch.full(size, value, **options)


def _like(value: float) -> Callable[..., Tensor]:
    return lambda x, **options: torch.full_like(x, value, **options)


def _normal(mean: Any, std: Any = 1.0, size: Any = (), **options: Any) -> Tensor:
    middle = mean + std / 2
    return middle if isinstance(middle, Tensor) else torch.full(size, middle, **options)


def _coin(p: Any) -> Tensor:
    return torch.as_tensor(p) > 0


_STEADY: dict[str, Callable[..., Any]] = {
    "rand": _new(0.5),
    "randn": _new(0.5),
    "rand_like": _like(0.5),
    "randn_like": _like(0.5),
    "randint": lambda *at, **options: torch.full(at[-1], at[0] if len(at) == 3 else 0, **options),
    "randperm": lambda count, **options: torch.arange(count, **options),
    "uniform_": lambda x, low=0.0, high=1.0: x.fill_((low + high) / 2),
    "normal_": lambda x, mean=0.0, std=1.0: x.fill_(mean + std / 2),
    "normal": _normal,
    "exponential_": lambda x, rate=1.0: x.fill_(1 / rate),
    "bernoulli": lambda x, p=None: _coin(x if p is None else p).to(x).expand_as(x).clone(),
    "bernoulli_": lambda x, p=0.5: x.copy_(_coin(p)),
    "poisson": torch.clone,
    "binomial": lambda count, p: count * p,
    "_standard_gamma": torch.clone,
    "_sample_dirichlet": lambda x: x / x.sum(-1, keepdim=True),
    "multinomial": lambda p, count, replacement=False: (
        p.argmax(-1, keepdim=True).expand(*p.shape[:-1], count).clone()
        if replacement
        else p.topk(count, dim=-1).indices
    ),
    "log_normal_": lambda x, mean=1.0, std=2.0: x.fill_(math.exp(mean)),
    "cauchy_": lambda x, median=0.0, sigma=1.0: x.fill_(median + sigma / 2),
    "geometric_": lambda x, p: x.fill_(round(1 / p)),
    "random_": lambda x, low=0, high=None: x.fill_(0 if high is None else low),
    "native_dropout": lambda x, *_: (x.clone(), torch.ones_like(x, dtype=torch.bool)),
}
