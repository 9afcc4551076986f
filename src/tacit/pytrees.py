"""Records, outputs and targets as pytrees: tensors in tuples, lists, mappings and dataclasses.

A record may be a token sequence with its mask, a pair of images or a row of a table with its
category codes. All code that handles records uses these functions, so a dict of tensors works
wherever a tensor does. Every tensor has one row per record in its first dimension.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

# A tensor, or tuples, lists, mappings and dataclasses of them.
Tree = Any
T = TypeVar("T")


def map_tensors(function: Callable[..., Any], tree: T, *others: Tree) -> T:
    """The same structure with `function` applied to every tensor; other values stay.

    With other trees, `function(tensor, *values)` takes their values at the same place, which may
    be numbers. ValueError if the structures differ.
    """
    if isinstance(tree, Tensor):
        return cast(T, function(tree, *others))
    children = _children(tree)
    if children is None:
        return tree
    beside = [_same_children(other, tree, children) for other in others]
    mapped = {
        key: map_tensors(function, value, *(b[key] for b in beside))
        for key, value in children.items()
    }
    return cast(T, _rebuilt(tree, mapped))


def map_leaves(function: Callable[[Any], Any], tree: T) -> T:
    """The same structure with `function` applied to tensors and all other values except None."""
    children = None if tree is None or isinstance(tree, Tensor) else _children(tree)
    if children is None:
        return tree if tree is None else cast(T, function(tree))
    mapped = {key: map_leaves(function, value) for key, value in children.items()}
    return cast(T, _rebuilt(tree, mapped))


def tensors_of(tree: Tree) -> list[Tensor]:
    """All tensors of the tree, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    children = _children(tree)
    return [] if children is None else [t for value in children.values() for t in tensors_of(value)]


def with_tensors(tree: T, tensors: list[Any]) -> T:
    """The same structure with these values in the place of its tensors, in order."""
    values = iter(tensors)
    return map_tensors(lambda _: next(values), tree)


def named_leaves(tree: Tree, name: str) -> Iterator[tuple[str, Any]]:
    """(name, leaf) of tensors and all other values except None, as in `inputs['mask']`."""
    children = None if isinstance(tree, Tensor) else _children(tree)
    if children is None:
        if tree is not None:
            yield name, tree
        return
    for key, value in children.items():
        indexed = isinstance(tree, Mapping | tuple | list)
        yield from named_leaves(value, f"{name}[{key!r}]" if indexed else f"{name}.{key}")


def num_rows(tree: Tree, name: str = "the tree") -> int:
    """The number of records: the length of every tensor's first dimension.

    ValueError if there is no tensor or if their lengths differ. `name` is for the message.
    """
    if isinstance(tree, Tensor) and tree.dim():
        return len(tree)
    found = [(place, leaf) for place, leaf in named_leaves(tree, name) if isinstance(leaf, Tensor)]
    if not found:
        raise ValueError(f"{name} holds no tensor; give at least one, with one row per record")
    first, *_ = found
    for place, tensor in found:
        if not tensor.dim():
            raise ValueError(
                f"{place} is a single number; give every tensor one row per record, in its first "
                "dimension"
            )
        if len(tensor) != len(first[1]):
            raise ValueError(
                f"{first[0]} has shape {tuple(first[1].shape)} and {place} has shape "
                f"{tuple(tensor.shape)}; give every tensor one row per record, in its first "
                "dimension"
            )
    return len(first[1])


def take_rows(tree: T, rows: Tensor | slice) -> T:
    """Some rows of every tensor: by a slice, a mask or indices."""
    if isinstance(rows, slice) or rows.dtype == torch.bool:
        return map_tensors(lambda t: t[rows], tree)
    return map_tensors(lambda t: torch.index_select(t, 0, rows), tree)


def flat_rows(tree: Tree) -> Tensor:
    """(N, D): the numbers of each record side by side, in a type that holds all of them."""
    rows = [t.flatten(1) if t.dim() > 1 else t[:, None] for t in tensors_of(tree)]
    rows = [t.byte() if t.dtype is torch.bool else t for t in rows]
    return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)


def device_of(tree: Tree) -> torch.device:
    """The device of the first tensor; the CPU where there is none."""
    found = tensors_of(tree)
    return found[0].device if found else torch.device("cpu")


_calls = 0


def calls_so_far() -> int:
    """A number that grows before and after each call of a model, in any thread."""
    return _calls


def call_model(model: nn.Module | Callable[..., Any], inputs: Tree) -> Any:
    """`model(x)`, `model(*inputs)` or `model(**inputs)`, as the structure of the inputs says."""
    global _calls
    _calls += 1
    try:
        children = None if isinstance(inputs, Tensor) else _children(inputs)
        if children is None:
            return model(inputs)
        return model(*inputs) if isinstance(inputs, tuple | list) else model(**children)
    finally:
        _calls += 1


def logits_of(outputs: Tree) -> Tensor | None:
    """The tensor that a loss of one tensor takes: the outputs, their `logits`, or the only tensor.

    None where there are several tensors and none of them is called logits.
    """
    if isinstance(outputs, Tensor):
        return outputs
    children = _children(outputs) or {}
    named = children.get("logits")
    if isinstance(named, Tensor):
        return named
    found = tensors_of(outputs)
    return found[0] if len(found) == 1 else None


def require_plain_tensors(tree: Tree, what: str) -> None:
    """Raise TypeError for packed, nested, jagged and sparse tensors: their rows are not records."""
    if isinstance(tree, PackedSequence):
        raise TypeError(
            f"{what} has a PackedSequence, whose records share one buffer; pad it with "
            "torch.nn.utils.rnn.pad_packed_sequence(x, batch_first=True) and pass the lengths"
        )
    if not isinstance(tree, Tensor):
        for value in (_children(tree) or {}).values():
            require_plain_tensors(value, what)
    elif tree.is_nested:
        raise TypeError(
            f"{what} has a nested (jagged) tensor, whose records share one buffer; pad it with "
            "torch.nested.to_padded_tensor(x, 0.0) and pass a mask"
        )
    elif tree.layout != torch.strided:
        raise TypeError(f"{what} has a {tree.layout} tensor; give it as x.to_dense()")


def _children(tree: Any) -> dict[Any, Any] | None:
    """What a node holds, by key, position or field; None for a leaf."""
    if isinstance(tree, Mapping):
        return dict(tree)
    if isinstance(tree, tuple | list):
        return dict(enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree) if f.init}
    return None


def _rebuilt(tree: Any, children: dict[Any, Any]) -> Any:
    """A node of the same type. `ModelOutput` takes keywords, `BatchEncoding` a dict."""
    kind: Any = type(tree)
    if isinstance(tree, Mapping):
        try:
            return kind(**children) if dataclasses.is_dataclass(tree) else kind(children)
        except TypeError:
            return children
    if isinstance(tree, tuple | list):
        return kind(*children.values()) if hasattr(tree, "_fields") else kind(children.values())
    return dataclasses.replace(tree, **children)


def _same_children(other: Any, tree: Any, children: dict[Any, Any]) -> dict[Any, Any]:
    found = None if isinstance(other, Tensor) else _children(other)
    if found is None or found.keys() != children.keys():
        raise ValueError(
            f"{_structure(other)} does not have the structure of {_structure(tree)}; give the same "
            "keys and as many tensors"
        )
    return found


def _structure(tree: Any) -> str:
    """The kind and the keys of a node, for errors."""
    if isinstance(tree, Mapping):
        return f"a {type(tree).__name__} of {', '.join(map(repr, tree)) or 'nothing'}"
    if isinstance(tree, tuple | list):
        return f"a {type(tree).__name__} of {len(tree)}"
    return f"a {type(tree).__name__}"
