"""The state of a pass besides weights and records: random generators and a model's buffers.

`PassState` saves and restores it, so that a pass can be run again. `SteadyDraws` makes random draws
the same for every record, so that results can be compared between batches of different sizes.
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
from tacit.torch_internals import TorchDispatchMode, schema_of, tables_of, version_of

T = TypeVar("T")


class PassState:
    """Saves the states of generators, and a model's buffers and attributes, to restore them later.

    Generators are those of the process, for the device of `inputs`, and those that modules hold.
    Without inputs none is saved. With `names`, only modules that hold these buffers are saved.
    Spectral normalisation moves its buffers in every pass, from its weights alone, so a pass that
    is run twice must begin both times from the same ones. A module whose buffers are restored gets
    its attributes back too: one of them may say that a cache is filled.
    """

    def __init__(
        self,
        inputs: Tree | None,
        model: nn.Module | None = None,
        names: frozenset[str] | None = None,
    ) -> None:
        paths = None if names is None else {name.rpartition(".")[0] for name in names}
        modules = () if model is None or paths == set() else model.named_modules()
        self._inputs, self._model, self._names = inputs, model, names
        self._holders = {
            path: (module, dict(vars(module)))
            for path, module in modules
            if not isinstance(module, torch.jit.ScriptModule)  # whose attributes are out of reach
            if paths is None or path in paths
        }
        self._held_buffers = self._current_buffers()
        self._entries = {
            name: (version_of(buffer), buffer.detach().clone())
            for name, buffer in self._held_buffers.items()
            if buffer is not None and not is_lazy(buffer)
        }
        values = (value for _, held in self._holders.values() for value in held.values())
        generators = [] if inputs is None else [*_of_the_process(inputs), *map(_own, values)]
        self._draws = [(*pair, pair[0]()) for pair in generators if pair is not None]

    def _current_buffers(self) -> dict[str, Tensor | None]:
        return {
            f"{path}.{name}".lstrip("."): buffer
            for path, (module, _) in self._holders.items()
            for name, buffer in tables_of(module).buffers.items()
        }

    def drew(self) -> bool:
        """Whether any generator has drawn since this state was saved."""
        return any(not _same_state(before, get()) for get, _, before in self._draws)

    def changed(self) -> frozenset[str]:
        """The names of the buffers that were written since. It reads their values."""
        before, now = self._held_buffers, self._current_buffers()
        replaced = {name for name, buffer in before.items() if now.get(name, self) is not buffer}
        written = {name for name in self._entries if self._is_written(name)}
        names = (now.keys() - before.keys()) | replaced | written
        return frozenset(names if self._names is None else names & self._names)

    def _is_written(self, name: str) -> bool:
        (version, entries), buffer = self._entries[name], self._held_buffers[name]
        assert buffer is not None
        return version_of(buffer) != version or not same_tensors(buffer, entries)

    def attributes_changed(self) -> bool:
        return any(
            vars(module).keys() != before.keys()
            or any(vars(module)[name] is not value for name, value in before.items())
            for module, before in self._holders.values()
        )

    def restore_draws(self) -> None:
        for _, put, before in self._draws:
            put(before)

    def restore_entries(self) -> None:
        """Restore generators and the buffers' entries. Attributes stay, for checks to compare."""
        self.restore_draws()
        for name in self._entries:
            self._restore_entries_of(name)

    def _restore_entries_of(self, name: str) -> None:
        (_, entries), buffer = self._entries[name], self._held_buffers[name]
        assert buffer is not None
        if not same_tensors(buffer, entries):  # a write would spoil the caller's own graphs
            buffer.detach().copy_(entries)

    def restore(self, names: Iterable[str] | None = None, *, copies: bool = False) -> None:
        """Restore generators, and these buffers with their modules' attributes.

        By default, all buffers that have changed. With `copies`, the present buffers keep their
        entries, and copies take their places in the modules.
        """
        self.restore_draws()
        for name in self.changed() if names is None else names:
            path, _, own = name.rpartition(".")
            module, attributes = self._holders[path]
            _replace_attributes(module, attributes)
            if name not in self._held_buffers:
                tables_of(module).buffers.pop(own, None)
                continue
            tables_of(module).buffers[own] = self._held_buffers[name]
            if name in self._entries and copies:
                tables_of(module).buffers[own] = self._entries[name][1].clone()
            elif name in self._entries:
                self._restore_entries_of(name)

    def restore_all(self) -> None:
        for module, attributes in self._holders.values():
            _replace_attributes(module, attributes)
        self.restore({*self._held_buffers, *self._current_buffers()})

    @contextmanager
    def as_before(self, names: frozenset[str]) -> Iterator[None]:
        """Restore generators and modules that hold these buffers while the context lasts.

        Writes to the buffers are lost. Tensors that a graph has saved are not touched.
        """
        now = PassState(self._inputs, self._model)
        try:
            self.restore(names, copies=True)
            yield
        finally:
            now.restore_all()


def from_one_start(passes: Iterable[T], model: nn.Module) -> Iterator[T]:
    """The passes' results, where each pass begins from the same buffers.

    Only the writes of the last pass stay. The number of passes in a step depends on the number of
    records, which is private. So a buffer that counts passes counts steps instead, and no record's
    gradient depends on the passes before its own.
    """
    names = frozenset(current_watch(model).public)
    start, end = PassState(None, model, names), None
    for result in passes:
        yield result
        end = PassState(None, model, names)
        start.restore(names)
    if end is not None:
        end.restore(names)


def _replace_attributes(module: nn.Module, by: dict[str, Any]) -> None:
    vars(module).clear()
    vars(module).update(by)


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

    Uniform and normal draws become a constant, coins become 1 if they can (dropout keeps all), and
    permutations keep the order. So a model with random draws can run in batches of different sizes
    and give comparable results. Other kinds of draws are unchanged.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **kwargs)
        steady = _STEADY.get(func.overloadpacket.__name__)
        if steady is None:  # a fused kernel of attention draws by itself
            names = [argument.name for argument in schema_of(func).arguments[: len(args)]]
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
