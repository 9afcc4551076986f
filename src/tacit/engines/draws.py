"""What a pass begins from besides weights and records, to run it again: generators and buffers."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tacit.checks.side_effects import allowed_writes
from tacit.pytrees import Tree, device_of

T = TypeVar("T")


class Draws:
    """The generators' states now; `restore` makes them draw the same numbers again."""

    def __init__(self, inputs: Tree) -> None:
        device = device_of(inputs)
        self._torch = torch.get_rng_state()
        self._device = device
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False)

    def moved(self) -> bool:
        """Whether PyTorch's generators have drawn since."""
        if self._cuda is not None and not torch.equal(
            self._cuda, torch.cuda.get_rng_state(self._device)
        ):
            return True
        return not torch.equal(self._torch, torch.get_rng_state())

    def moved_in_python(self) -> bool:
        """Whether Python's or NumPy's generator has drawn since: nothing makes them steady."""
        numpy = repr(np.random.get_state(legacy=False)) != repr(self._numpy)
        return numpy or random.getstate() != self._python

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


GENERATORS = torch.Generator, np.random.Generator, random.Random


class OwnDraws:
    """The state of a generator that a model holds, as `Draws` has those of the process."""

    def __init__(self, generator: Any) -> None:
        self._generator, self._before = generator, self._state(generator)

    def moved(self) -> bool:
        now = self._state(self._generator)
        if isinstance(now, Tensor):
            return not torch.equal(now, self._before)
        return repr(now) != repr(self._before)

    def restore(self) -> None:
        if isinstance(self._generator, torch.Generator):
            self._generator.set_state(self._before)
        elif isinstance(self._generator, random.Random):
            self._generator.setstate(self._before)
        else:
            self._generator.bit_generator.state = self._before

    @staticmethod
    def _state(generator: Any) -> Any:
        if isinstance(generator, torch.Generator):
            return generator.get_state()
        if isinstance(generator, random.Random):
            return generator.getstate()
        return copy.deepcopy(generator.bit_generator.state)


class Buffers:
    """A model's buffers now; `restore` takes back what passes have written since.

    Spectral normalisation moves its buffers in every pass, from its weights alone. A pass that is
    run twice must begin both times from the same ones. With `names`, only those are kept. A module
    whose buffers are taken back gets its attributes back too: one of them may say that a cache is
    filled.
    """

    def __init__(self, model: nn.Module, names: frozenset[str] | None = None) -> None:
        self._names = names
        modules = model.named_modules() if names is None or names else ()
        self._held = {
            path: _Held(module)
            for path, module in modules
            if not isinstance(module, torch.jit.ScriptModule)  # which keeps them out of reach
            if names is None or any(name.rpartition(".")[0] == path for name in names)
        }

    def changed(self) -> frozenset[str]:
        """The names of the buffers that were written since. Reads their values."""
        found: set[str] = set()
        for path, held in self._held.items():
            found |= {f"{path}.{name}".lstrip(".") for name in held.written()}
        return frozenset(found if self._names is None else found & self._names)

    def restore(self, names: frozenset[str] | None = None) -> None:
        """Take back what was written to these buffers, by default to all that have changed."""
        for path, own in _by_module(self.changed() if names is None else names).items():
            self._held[path].restore(own)

    @contextmanager
    def as_before(self, names: frozenset[str]) -> Iterator[None]:
        """Within it, modules that hold these buffers are as they were, with copies of the buffers.

        What is written to the copies is lost, and no tensor that a graph has saved is touched.
        """
        modules = [held.module for held in self._held.values()]
        now = [(module, dict(vars(module)), dict(module._buffers)) for module in modules]
        try:
            for path, own in _by_module(names).items():
                self._held[path].put_copies(own)
            yield
        finally:
            for module, attributes, buffers in now:
                vars(module).clear()
                vars(module).update(attributes)
                module._buffers.clear()
                module._buffers.update(buffers)


def from_one_start(passes: Iterable[T], model: nn.Module) -> Iterator[T]:
    """What the passes give, each begun from the same buffers; what the last one wrote stays.

    How many passes a step takes depends on the number of records, which is private. So a buffer
    that counts passes counts steps, and no record's gradient depends on the passes before its own.
    """
    names = allowed_writes(model)
    start, end = Buffers(model, names), None
    for found in passes:
        yield found
        end = Buffers(model, names)
        start.restore(names)
    if end is not None:
        end.restore(names)


class _Held:
    """One module's attributes and buffers, with the buffers' versions and entries."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self._attributes = module, dict(vars(module))
        self._buffers = dict(module._buffers)
        self._before = {
            name: (buffer._version, buffer.detach().clone())
            for name, buffer in self._buffers.items()
            if buffer is not None and not is_lazy(buffer)
        }

    def written(self) -> list[str]:
        now = self.module._buffers
        return [name for name in {**self._buffers, **now} if self._is_written(name, now)]

    def _is_written(self, name: str, now: dict[str, Tensor | None]) -> bool:
        buffer = now.get(name)
        if buffer is not self._buffers.get(name) or (name in now) != (name in self._buffers):
            return True
        if buffer is None or name not in self._before:
            return False
        version, entries = self._before[name]
        return buffer._version != version or not same_entries(buffer, entries)

    def restore(self, names: Sequence[str]) -> None:
        self._put_attributes()
        for name in names:
            if name in self._before:
                buffer, (_, entries) = self._buffers[name], self._before[name]
                assert buffer is not None
                buffer.detach().copy_(entries)
            self._put(name, self._buffers.get(name))

    def put_copies(self, names: Sequence[str]) -> None:
        self._put_attributes()
        for name in names:
            self._put(name, self._before[name][1].clone() if name in self._before else None)

    def _put_attributes(self) -> None:
        vars(self.module).clear()
        vars(self.module).update(self._attributes)

    def _put(self, name: str, buffer: Tensor | None) -> None:
        if name in self._buffers:
            self.module._buffers[name] = buffer
        else:
            self.module._buffers.pop(name, None)


def _by_module(names: frozenset[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        path, _, own = name.rpartition(".")
        found.setdefault(path, []).append(own)
    return found


class Start:
    """Where a pass begins: the generators' states and the model's buffers, of all or some names."""

    def __init__(self, inputs: Tree, model: nn.Module, names: frozenset[str] | None = None) -> None:
        self._draws, self._buffers = Draws(inputs), Buffers(model, names)

    def moved(self) -> bool:
        """Whether PyTorch's generators have drawn since."""
        return self._draws.moved()

    def restore(self) -> None:
        self._draws.restore()
        self._buffers.restore()


def same_entries(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())  # NaN equals NaN


_DROPOUTS = (
    "dropout",
    "alpha_dropout",
    "feature_alpha_dropout",
    "feature_dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
)


class NoDropout(TorchFunctionMode):
    """Dropout of every kind, called as a module or as a function, is the identity."""

    _functions = frozenset(
        getattr(place, name) for place in (F, torch) for name in _DROPOUTS if hasattr(place, name)
    )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._functions:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            # Fifth of its arguments.
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


class SteadyDraws(TorchDispatchMode):
    """Random numbers that are the same for every record, place and batch size.

    Uniform and normal draws are a constant, coins fall on their likelier side, permutations keep
    the order. So a model with random draws can be asked twice, in batches of other sizes. Draws of
    other kinds are left as they are.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        steady = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            steady = _STEADY.get(func.overloadpacket.__name__)
        if steady is None:
            return func(*args, **kwargs)
        return steady(*args, **{name: v for name, v in kwargs.items() if name != "generator"})


def _new(value: float) -> Callable[..., Tensor]:
    return lambda size, **options: torch.full(size, value, **options)


def _like(value: float) -> Callable[..., Tensor]:
    return lambda x, **options: torch.full_like(x, value, **options)


def _normal(mean: Any, std: Any = 1.0, size: Any = (), **options: Any) -> Tensor:
    middle = mean + std / 2
    return middle if isinstance(middle, Tensor) else torch.full(size, middle, **options)


def _coin(p: Any) -> Tensor:
    return torch.as_tensor(p) >= 0.5


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
