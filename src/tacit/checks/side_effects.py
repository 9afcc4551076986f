"""A step over private records must leave nothing behind in the model but its gradient.

`watched_step` lasts as long as a step. It compares buffers and parameters before and after, and
keeps what is known of a model from step to step: how many steps it took, which buffers it may
write, and whether its records are proved to stay apart. `function_kind` tells whether a loss is the
one that was checked. `require_isolated_views` checks an augmentation.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tacit.checks.certificate import MAY_REWRITE, refuse_rewriting
from tacit.checks.model_table import Place, addresses_and_versions, table_of
from tacit.errors import MixesRecords
from tacit.pytrees import Tree, flat_rows, take_rows

_MOST_KEYS = 64


@dataclass
class Watch:
    """The steps of one model under one key, and what was found of it before them."""

    steps: int = 0
    public: set[str] = field(default_factory=set)  # buffers that it may write
    proved: bool = False  # that records stay apart in a batch


_watches: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Watch]] = weakref.WeakKeyDictionary()
_open: list[tuple[nn.Module, Watch]] = []  # the steps that are running


@contextmanager
def watched_step(
    model: nn.Module,
    check: Callable[[], bool] | None = None,
    key: Hashable = None,
    *,
    certified: bool = True,
) -> Iterator[None]:
    """Raise MixesRecords if a buffer or a parameter is written while this lasts.

    Both are saved with the model, so what a forward pass writes there (a running mean, a codebook,
    a count) would be released without noise. The tensors' version counters are compared around
    every step, which waits for no device. Kernels that update running statistics and writes through
    `.data` do not move those counters. So entries are compared too: of buffers on the CPU at every
    step; of everything else at steps 1, 2, 4, 8 ….

    Buffers that a certified pass writes with public numbers (`allow_writes`) are exempt under the
    same key: a cache of angles, a count of passes, the vectors of spectral normalisation. They are
    not exempt in a step that runs another program than the `certified` one.

    `check` runs before steps 1, 8, 64, 512 … of the model under the same `key`, settings and hooks,
    so that what a model does only after many passes is found. It returns whether its records could
    tell; where they could not, it runs again before the next step.
    """
    before = table_of(model)
    for module in before.modules:
        if isinstance(module, MAY_REWRITE):
            refuse_rewriting(module, model)
    key = key, before.settings
    watches = _watches.setdefault(model, {})
    if key not in watches and len(watches) >= _MOST_KEYS:  # hooks that are new in each step
        watches.clear()
    watch = watches.setdefault(key, Watch())
    step = watch.steps + 1
    due = step & (step - 1) == 0
    could_tell = True
    if not certified:
        watch.public = set()
    _open.append((model, watch))
    try:
        if due and check is not None and step.bit_length() % 3 == 1:  # a power of 8
            could_tell = check()
        tensors = (table_of(model) if due else before).tensors
        versions = addresses_and_versions(tensors)
        copies = {
            place: tensor.detach().clone()
            for place, tensor in tensors.items()
            if due or (tensor.device.type == "cpu" and not isinstance(tensor, nn.Parameter))
        }
        yield
    finally:
        _open.pop()
    _refuse_writes(model, versions, copies, watch.public if certified else ())
    watch.steps = step if could_tell else step - 1


def allow_writes(model: nn.Module, names: Collection[str]) -> None:
    """Exempt these buffers in steps like the running one: what is written is public.

    Call it with what a pass under shadow memory has proved.
    """
    for watch in _watches_of(model):
        watch.public.update(names)


def allowed_writes(model: nn.Module) -> frozenset[str]:
    """The buffers that the running step may write."""
    return frozenset(name for watch in _watches_of(model) for name in watch.public)


def current_watch(model: nn.Module) -> Watch:
    """What is known of the model in the running step; an empty Watch outside of steps."""
    return next(iter(_watches_of(model)), Watch())


def _watches_of(model: nn.Module) -> list[Watch]:
    return [watch for watched, watch in reversed(_open) if watched is model]


def _refuse_writes(
    model: nn.Module,
    before: dict[Place, tuple[int, int]],
    copies: dict[Place, Tensor],
    public: Collection[str],
) -> None:
    tensors = table_of(model).tensors
    after, written = addresses_and_versions(tensors), set[Place]()
    if before != after:
        written = {p for p in before | after if before.get(p) != after.get(p)}
    written |= {
        place
        for place, copy in copies.items()
        if place in tensors and not same_tensors(copy, tensors[place])
    }
    for path, module in model.named_modules() if written and public else ():
        names = (name for name in module._buffers if f"{path}.{name}".lstrip(".") in public)
        written -= {(id(module), name) for name in names}
    if written:
        raise MixesRecords(
            f"{_name_of(min(written), model)} was written during a pass over private records, and "
            "would be saved without noise; keep such a state out of training, or in evaluation "
            "mode, and write what depends on weights alone in a callback, after the step"
        )


def _name_of(place: Place, model: nn.Module) -> str:
    holder, name = place
    for path, module in model.named_modules():
        if id(module) == holder:
            kind = "buffer" if name in module._buffers else "parameter"
            return f"{kind} {f'{path}.{name}' if path else name!r}"
    return f"tensor {name!r}"


def same_tensors(a: Tensor, b: Tensor) -> bool:
    """Equal to the last entry, where NaN equals NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


# --- augmentations ----------------------------------------------------------------------------

_MOST_VIEWS = 64


def require_isolated_views(
    transform: object, views_of: Callable[[Tree], Tensor], x: Tree, views: int
) -> bool:
    """Raise MixesRecords if a record's views depend on the other records, now or earlier.

    Random halves of up to 64 records are exchanged for other records, under equal draws. A
    transform with a generator of its own is refused, unless its rows are declared to be apart.
    Returns whether the records could tell.
    """
    x = take_rows(x, slice(_MOST_VIEWS))
    numbers = flat_rows(x)
    if len(numbers) == 0:
        return False

    def made(rows: Tensor) -> Tensor:
        return views_of(take_rows(x, rows)).unflatten(0, (-1, views))

    device = numbers.device
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(0)).to(device)
    every, half = torch.arange(len(numbers), device=device), (len(numbers) + 1) // 2
    expected = made(every)
    made(every.flip(0))
    if not same_tensors(expected, made(every)):
        raise MixesRecords(
            f"the augmentation {transform!r} gives other views of the same records with the same "
            "seeds: it remembers earlier ones, or draws from a generator of its own; draw from "
            "torch's generator, or declare Augmentation(..., rows_apart=True)"
        )
    for stay, go in ((order[:half], order[half:]), (order[half:], order[:half])):
        for rows in _exchanged(stay, go, numbers):
            if not same_tensors(expected[stay], made(rows)[stay]):
                raise MixesRecords(
                    f"the augmentation {transform!r} lets other records into a record's views, so "
                    "no record's share of the gradient is bounded; use one that works on each row "
                    "alone"
                )
    return not same_tensors(numbers, numbers[:1].expand_as(numbers))


def _exchanged(stay: Tensor, go: Tensor, x: Tensor) -> Iterator[Tensor]:
    """Rows with those of `go` exchanged: for other records, among themselves, and for one."""
    by_sum = stay[x[stay].double().reshape(len(stay), -1).sum(dim=1).argsort()]
    ones = torch.cat([by_sum[-1:], by_sum[:1], stay[:2]])
    for instead in (stay[: len(go)], go.flip(0), *ones.split(1)):
        rows = torch.arange(len(x), device=stay.device)
        rows[go] = instead if len(instead) == len(go) else instead[:1]
        yield rows


# --- losses -----------------------------------------------------------------------------------


def function_kind(value: Any, _inside: tuple[int, ...] = ()) -> Hashable:
    """What a function or an object does, as far as Python decides: code or type, and flags.

    Flags are defaults, captured variables, arguments of a partial and attributes that are bool,
    str, int or None. What is made anew for each step with the same flags has the same kind.
    """
    if id(value) in _inside:  # a function that calls itself holds itself
        return None
    inside = (*_inside, id(value))

    def flags(values: Iterable[Any]) -> Hashable:
        return tuple(_flag(v, inside) for v in values)

    def named_flags(values: dict[str, Any] | None) -> Hashable:
        return tuple((name, _flag(v, inside)) for name, v in sorted((values or {}).items()))

    if isinstance(value, functools.partial):
        kind = function_kind(value.func, inside)
        return kind, flags(value.args), named_flags(value.keywords)
    if isinstance(value, types.MethodType):
        return function_kind(value.__func__, inside), function_kind(value.__self__, inside)
    if isinstance(value, types.FunctionType):
        defaults = flags(value.__defaults__ or ()), named_flags(value.__kwdefaults__)
        return value.__code__, *defaults, flags(map(_contents, value.__closure__ or ()))
    if isinstance(value, types.BuiltinFunctionType):
        return value.__module__, value.__qualname__
    if isinstance(value, nn.Module):
        held = [item for module in value.modules() for item in vars(module).items()]
    else:
        held = list(getattr(value, "__dict__", {}).items())
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return kind, tuple((n, _flag(v, inside)) for n, v in held if isinstance(v, _DECIDES))


# What an attribute says of what its object does, unlike what the object works with.
_DECIDES = (
    *(bool, str, int, type(None)),
    *(types.FunctionType, types.MethodType, functools.partial, nn.Module),
)


def _flag(value: Any, inside: tuple[int, ...]) -> Hashable:
    if type(value) in (bool, str, int, type(None)):
        return type(value), value
    if type(value) is tuple:
        return tuple(_flag(v, inside) for v in value)
    is_code = callable(value) and not isinstance(value, Tensor)
    return function_kind(value, inside) if is_code else None


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
