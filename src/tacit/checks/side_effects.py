"""A step over private records must leave nothing behind in the model but its gradient.

`watched_step` lasts as long as a step. It compares buffers and parameters before and after, and
keeps what is known of a model from step to step: how many steps it took, which buffers it may
write, and whether its records are proved to stay apart. What it knows holds for one program:
`contents_of` and `function_kind` tell whether model and loss are the ones that were checked.
`require_isolated_views` checks an augmentation.
"""

from __future__ import annotations

import functools
import operator
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tacit.checks.isolation import refuse_rewriting
from tacit.errors import MixesRecords
from tacit.pytrees import Tree, calls_so_far, flat_rows, take_rows
from tacit.torch_internals import (
    children_and_parameters,
    foreign_hooks,
    lists_parameters_plainly,
    process_wide_hooks,
    tables_of,
    version_of,
)

_MOST_KEYS = 64


@dataclass
class Watch:
    """The steps of one model under one key, and what was proved of the model before them."""

    steps: int = 0
    public: set[str] = field(default_factory=set)  # buffers that it may write
    proved: bool = False  # that records stay apart in a batch
    # What the model held, and how many calls of models there had been then.
    walked: tuple[Contents, int] | None = None


_watches: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Watch]] = weakref.WeakKeyDictionary()
_open: list[tuple[nn.Module, Watch]] = []  # the steps that are running


@contextmanager
def watched_step(
    model: nn.Module,
    check: Callable[[], bool] | None = None,
    key: Hashable = None,
    *,
    proved: bool = True,
    replays: bool = False,
) -> Iterator[None]:
    """Raise MixesRecords if a buffer or a parameter is written while this lasts.

    Both are saved with the model, so what a forward pass writes there (a running mean, a codebook,
    a count) would be released without noise. The tensors' version counters are compared around
    every step, which waits for no device. Kernels that update running statistics and writes through
    `.data` do not move those counters. So entries are compared too: of buffers on the CPU at every
    step; of everything else at steps 1, 2, 4, 8 ….

    Buffers that a pass provably writes with public numbers (`Watch.public`) are exempt under the
    same key: a cache of angles, a count of passes, the vectors of spectral normalisation. They are
    not exempt in a step that is not `proved`: one that runs another program.

    `check` runs before steps 1, 8, 64, 512 … of the model under the same `key`, settings and hooks,
    to find what a model does only after many passes. It returns whether it was conclusive. If it
    was not, for lack of records, it runs again before the next step.

    With `replays`, no code but that of the model can write to it in this step: no augmentation and
    no source that reads records runs. Then a step in which no model is called, because recordings
    are replayed, walks over its modules once.
    """
    # Whether a module rewrites weights follows from its settings and from this.
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    contents = contents_of(model)
    key = key, contents.settings, distributed
    watches = _watches.setdefault(model, {})
    watch = watches.get(key)
    if watch is None:
        if len(watches) >= _MOST_KEYS:  # hooks that are new in each step
            watches.clear()
        watch = watches[key] = Watch()
    step = watch.steps + 1
    due = step & (step - 1) == 0
    if due:
        refuse_rewriting(model)
    conclusive = True
    if not proved:
        watch.public = set()
    _open.append((model, watch))
    try:
        if due and check is not None and step.bit_length() % 3 == 1:  # a power of 8
            conclusive = check()
            contents = contents_of(model)
        before = contents.tensors()
        places = _addresses_and_versions(before)
        copies = {
            name: tensor.detach().clone()
            for name, tensor in before.items()
            if due or (tensor.device.type == "cpu" and not isinstance(tensor, nn.Parameter))
        }
        watch.walked = (contents, calls_so_far()) if replays else None
        yield
        after = contents_of(model).tensors()
    finally:
        watch.walked = None
        _open.pop()
    places_after, written = _addresses_and_versions(after), set[str]()
    if places_after != places:
        written = {name for name, _ in places.items() ^ places_after.items()}
    written |= {n for n, c in copies.items() if n in after and not same_tensors(c, after[n])}
    if proved:
        written -= watch.public
    if written:
        name = min(written)
        kind = "parameter" if isinstance((before | after)[name], nn.Parameter) else "buffer"
        raise MixesRecords(
            f"{kind} {name!r} was written during a pass over private records, and would be saved "
            "without noise; keep such a state out of training, or in evaluation mode, and write "
            "what depends on weights alone in a callback, after the step"
        )
    watch.steps = step if conclusive else step - 1


def current_step(model: nn.Module) -> object | None:
    """An object that stands for the model's running step; None outside of steps."""
    return next((step for step in reversed(_open) if step[0] is model), None)


def current_watch(model: nn.Module) -> Watch:
    """The watch of the model's running step; an empty Watch outside of steps."""
    return next((watch for watched, watch in reversed(_open) if watched is model), Watch())


def _addresses_and_versions(tensors: dict[str, Tensor]) -> dict[str, tuple[int, int]]:
    """What changes when a tensor is replaced or written to, except through `.data`."""
    return {name: (tensor.data_ptr(), version_of(tensor)) for name, tensor in tensors.items()}


def same_tensors(a: Tensor, b: Tensor) -> bool:
    """Equal to the last entry, where NaN equals NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


# --- the contents of a model, to notice changes -----------------------------------------------

_MOST_CHANGES = 8
_FLAGS: tuple[type, ...] = (bool, str, int, type(None))
_COMPUTED_WITH = frozenset({bool, int, float, str, tuple, list})

# The integers that modules hold as attributes: the last value, and how often it has changed.
_integers: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[int, int]]] = (
    weakref.WeakKeyDictionary()
)


class Contents:
    """What a model holds, from one walk over its modules. It keeps no module alive.

    Attributes:
        settings: hooks, and what a branch of Python would test: attributes that are bool, str, int
            or None. An int that has changed eight times is a counter and says nothing any more.
            Nor does a float: temperatures are annealed in every step.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        self._modules = [weakref.ref(module) for module in modules.values()]
        # The tables of a scripted module give new objects each time.
        self._is_scripted = any(isinstance(m, torch.jit.ScriptModule) for m in modules.values())
        self._objects = [] if self._is_scripted else _objects_in(list(modules.values()))
        self._tree = [] if self._is_scripted else _tree_of(list(modules.values()))
        values = [_values_in(module) for module in modules.values()]
        self._frozen = [tuple(map(frozen, of_module)) for of_module in values]
        # Constants are kept, so that no other value can have the identity of one of them.
        self._constants = [value for v in values for value in v if _is_constant(value)]
        # Lists are compared by what they hold.
        self._lists = [
            (weakref.ref(module), name, frozen(value))
            for module in modules.values()
            for name, value in vars(module).items()
            if type(value) in _COMPUTED_WITH and not _is_constant(value)
        ]
        # A function among the attributes may be a `forward` of this one module.
        self._functions = tuple(
            (name, id(value))
            for module in modules.values()
            for name, value in vars(module).items()
            if callable(value) and not isinstance(value, nn.Module)
        )
        self._hooks = tuple(process_wide_hooks())
        # While this is current, the modules have these same tables.
        self._tensors = [
            (f"{path}.{name}" if path else name, table, name)
            for path, module in modules.items()
            for table in _tensors_in(module)
            for name in dict(table.items())
        ]
        # The first name of each parameter, and where it is held.
        held: dict[int, tuple[str, dict[str, Any], str]] = {}
        for path, module in modules.items():
            table = tables_of(module).parameters
            for name, parameter in table.items():
                if parameter is not None:
                    full = f"{path}.{name}" if path else name
                    held.setdefault(id(parameter), (full, table, name))
        self._of_parameters = list(held.values())
        self.settings: Hashable = (*map(_settings_in, modules.values()), *self._hooks)

    def is_current(self) -> bool:
        """Whether another walk would find the same."""
        if self._is_scripted:
            return False
        modules = self._living_modules()
        return (
            modules is not None
            and _objects_in(modules) == self._objects
            and all(frozen(vars(m())[name]) == held for m, name, held in self._lists)
            and tuple(process_wide_hooks()) == self._hooks
        )

    def has_same_parameters(self) -> bool:
        """Whether `named_parameters` of PyTorch would give what `parameters` gives.

        A fifth of `is_current`: modules and parameters are compared, and no attribute. False where
        a class or an object has its own way to list its modules or parameters.
        """
        modules = None if self._is_scripted else self._living_modules()
        if modules is None or _tree_of(modules) != self._tree:
            return False
        return lists_parameters_plainly(modules)

    def _living_modules(self) -> list[nn.Module] | None:
        """The modules; None if one of them is gone."""
        modules = [module() for module in self._modules]
        return None if None in modules else modules  # type: ignore[return-value]

    def parameters(self) -> dict[str, nn.Parameter]:
        """Each parameter by its first name, as `named_parameters` gives them."""
        return {full: table[name] for full, table, name in self._of_parameters}

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers, by the first name of the module that holds them."""
        every = ((full, table[name]) for full, table, name in self._tensors)
        return {
            name: t
            for name, t in every
            if type(t) is nn.Parameter or (t is not None and not is_lazy(t))
        }

    def recorded_state(self) -> Hashable:
        """What a recording of a step depends on: addresses, types, settings computed with."""
        addresses = tuple(tensor.data_ptr() for tensor in self.tensors().values())
        return addresses, self.settings, tuple(self._frozen), self._functions


_latest_contents: weakref.WeakKeyDictionary[nn.Module, Contents] = weakref.WeakKeyDictionary()


def contents_of(model: nn.Module) -> Contents:
    """What a model holds now. Its modules are walked again only if one holds another object.

    A walk over ResNet-18 takes half a millisecond, and its compiled step three.
    """
    walked = current_watch(model).walked if _open else None
    if walked is not None and walked[1] == calls_so_far():
        return walked[0]
    contents = _latest_contents.get(model)
    if contents is None or not contents.is_current():
        contents = _latest_contents[model] = Contents(model)
    return contents


def named_parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """`dict(model.named_parameters())`, at a tenth of the cost where nothing has changed.

    PyTorch walks over a model in ten microseconds a module, and a step asks several times.
    """
    contents = _with_parameters_of(model)
    return dict(model.named_parameters()) if contents is None else contents.parameters()


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """`list(model.parameters())`; see `named_parameters_of`."""
    contents = _with_parameters_of(model)
    return list(model.parameters() if contents is None else contents.parameters().values())


def _with_parameters_of(model: nn.Module) -> Contents | None:
    """What lists the model's parameters; None where only the model itself can list them."""
    contents = _latest_contents.get(model)
    if contents is None or not contents.has_same_parameters():
        contents = contents_of(model)
        if not contents.has_same_parameters():
            return None
    return contents


def _tensors_in(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """A module's own parameters, and its own buffers."""
    tables = tables_of(module)
    return tables.parameters, tables.buffers


def _objects_in(modules: list[nn.Module]) -> list[Any]:
    """The modules' classes, and names and identities of what they hold.

    That is their attributes, tensors, children and hooks. The list is made without a loop in
    Python, since this is asked in every step.
    """
    every = [vars(module) for module in modules]
    tables = list(filter(None, chain.from_iterable(map(_tables_in, every))))
    return [*map(type, modules), *_names_and_identities(every), *_names_and_identities(tables)]


def _tree_of(modules: list[nn.Module]) -> list[Any]:
    """Like `_objects_in`, of children and parameters alone."""
    tables = list(filter(None, chain.from_iterable(map(children_and_parameters, modules))))
    return [*map(type, modules), *_names_and_identities(tables)]


def _names_and_identities(tables: list[dict[str, Any]]) -> Iterator[Any]:
    """Which tables these are, how much each holds, under which names, and which objects."""
    values = chain.from_iterable(map(dict.values, tables))
    return chain(map(id, tables), map(len, tables), chain.from_iterable(tables), map(id, values))


_TABLES = [name for name, value in vars(nn.Module()).items() if isinstance(value, dict)]
_every_table = operator.itemgetter(*_TABLES)


def _tables_in(attributes: dict[str, Any]) -> tuple[dict[str, Any] | None, ...]:
    try:
        return _every_table(attributes)
    except KeyError:  # an object that was made by an older PyTorch
        return tuple(map(attributes.get, _TABLES))


def _values_in(module: nn.Module) -> list[Any]:
    """The numbers, texts and lists that a module computes with."""
    return [value for value in vars(module).values() if type(value) in _COMPUTED_WITH]


def _is_constant(value: Any) -> bool:
    """Whether it holds the same as long as it is the same object."""
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return isinstance(value, bool | int | float | str)


def _settings_in(module: nn.Module) -> Hashable:
    flags = tuple(
        (name, value)
        for name, value in vars(module).items()
        if type(value) in _FLAGS and not _is_counter(module, name, value)
    )
    return type(module), id(module), flags, tuple(foreign_hooks(module))


def _is_counter(module: nn.Module, name: str, value: Any) -> bool:
    if type(value) is not int:
        return False
    integers = _integers.setdefault(module, {})
    before, changes = integers.get(name, (value, 0))
    changes += before != value
    integers[name] = value, changes
    return changes > _MOST_CHANGES


def values_of(function: Any) -> Hashable:
    """The numbers, texts and lists that a loss or a rule holds, and of a module its tensors too."""
    if isinstance(function, nn.Module):
        return contents_of(function).recorded_state()
    values = getattr(function, "__dict__", {}).values()
    return tuple(frozen(value) for value in values if type(value) in _COMPUTED_WITH)


def frozen(value: Any) -> Hashable:
    """A value to compare: plain values and tuples; other objects by their type and identity."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return tuple(map(frozen, value))
    return type(value), id(value)


# --- the code and flags of a loss, to notice changes ------------------------------------------


def function_kind(value: Any, _inside: tuple[int, ...] = ()) -> Hashable:
    """A key for what a function or an object does: its code or type, and its flags.

    Flags are defaults, captured variables, arguments of a partial and attributes that are bool,
    str, int or None. Two objects that are made in the same way, with the same flags, have one kind.
    """
    if id(value) in _inside:  # a function that calls itself holds itself
        return None
    inside = (*_inside, id(value))
    what: Hashable
    flags: tuple[Any, ...] = ()
    if isinstance(value, functools.partial):
        what = function_kind(value.func, inside)
        flags = value.args, tuple(sorted(value.keywords.items()))
    elif isinstance(value, types.MethodType):
        what = function_kind(value.__func__, inside), function_kind(value.__self__, inside)
    elif isinstance(value, types.FunctionType):
        what = value.__code__
        captured = tuple(map(_contents, value.__closure__ or ()))
        named = tuple(sorted((value.__kwdefaults__ or {}).items()))
        flags = value.__defaults__ or (), named, captured
    elif isinstance(value, types.BuiltinFunctionType):
        what = value.__module__, value.__qualname__
    else:
        what = f"{type(value).__module__}.{type(value).__qualname__}"
        holders = value.modules() if isinstance(value, nn.Module) else [value]
        held = [item for holder in holders for item in getattr(holder, "__dict__", {}).items()]
        flags = tuple((name, flag) for name, flag in held if isinstance(flag, _DECIDES))
    return what, _flag(flags, inside)


# What an attribute says of what its object does, unlike what the object works with.
_DECIDES = *_FLAGS, types.FunctionType, types.MethodType, functools.partial, nn.Module


def _flag(value: Any, inside: tuple[int, ...]) -> Hashable:
    if type(value) in _FLAGS:
        return type(value), value
    if type(value) is tuple:
        return tuple(_flag(inner, inside) for inner in value)
    is_code = callable(value) and not isinstance(value, Tensor)
    return function_kind(value, inside) if is_code else None


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


# --- augmentations ----------------------------------------------------------------------------

_MOST_VIEWS = 64


def require_isolated_views(
    transform: object, views_of: Callable[[Tree], Tensor], x: Tree, views: int
) -> bool:
    """Raise MixesRecords if a record's views depend on the other records, now or earlier.

    Random halves of up to 64 records are exchanged for other records, under equal draws. A
    transform with a generator of its own is refused, unless its rows are declared to be apart.
    Returns whether that was conclusive: records that are all equal show nothing.
    """
    x = take_rows(x, slice(_MOST_VIEWS))
    numbers = flat_rows(x)
    if len(numbers) == 0:
        return False

    def views_at(rows: Tensor) -> Tensor:
        return views_of(take_rows(x, rows)).unflatten(0, (-1, views))

    device = numbers.device
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(0)).to(device)
    every, half = torch.arange(len(numbers), device=device), (len(numbers) + 1) // 2
    expected = views_at(every)
    views_at(every.flip(0))
    if not same_tensors(expected, views_at(every)):
        raise MixesRecords(
            f"the augmentation {transform!r} gives other views of the same records with the same "
            "seeds: it remembers earlier ones, or draws from a generator of its own; draw from "
            "torch's generator, or declare Augmentation(..., rows_apart=True)"
        )
    for stay, go in ((order[:half], order[half:]), (order[half:], order[:half])):
        for rows in _exchanged(stay, go, numbers):
            if not same_tensors(expected[stay], views_at(rows)[stay]):
                raise MixesRecords(
                    f"the augmentation {transform!r} lets other records into a record's views, so "
                    "no record's share of the gradient is bounded; use one that works on each row "
                    "alone"
                )
    return not same_tensors(numbers, numbers[:1].expand_as(numbers))


def _exchanged(stay: Tensor, go: Tensor, x: Tensor) -> Iterator[Tensor]:
    """Index rows in which `go` is replaced: by other records, by each other, and by one record."""
    by_sum = stay[x[stay].double().reshape(len(stay), -1).sum(dim=1).argsort()]
    ones = torch.cat([by_sum[-1:], by_sum[:1], stay[:2]])
    for instead in (stay[: len(go)], go.flip(0), *ones.split(1)):
        rows = torch.arange(len(x), device=stay.device)
        rows[go] = instead if len(instead) == len(go) else instead[:1]
        yield rows
