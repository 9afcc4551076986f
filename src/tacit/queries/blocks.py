"""Which parameters are clipped together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from tacit.queries.bounded_gradient import trainable

Blocks = tuple[tuple[str, ...], ...]


def all_together(model: nn.Module) -> Blocks:
    """One block of everything: flat clipping."""
    return (tuple(trainable(model)),)


def by_layer(model: nn.Module) -> Blocks:
    """One block a module that owns parameters: a layer's weight with its bias."""
    layers: dict[str, list[str]] = {}
    for name in trainable(model):
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    return tuple(tuple(names) for names in layers.values())


def by_parameter(model: nn.Module) -> Blocks:
    """One block a parameter tensor."""
    return tuple((name,) for name in trainable(model))


def by_prefix(model: nn.Module, groups: Mapping[str, Sequence[str]]) -> Blocks:
    """One block a named group of modules: {"body": ["conv1", "conv2"], "head": ["fc"]}."""
    taken: dict[str, str] = {}
    blocks = []
    for group, prefixes in groups.items():
        names = tuple(
            name
            for name in trainable(model)
            if any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)
        )
        for name in names:
            if name in taken:
                raise ValueError(f"{name!r} is in both {taken[name]!r} and {group!r}; choose one")
            taken[name] = group
        blocks.append(names)
    check_cover(tuple(blocks), model)
    return tuple(blocks)


def check_cover(blocks: Blocks, model: nn.Module) -> None:
    """Every trainable parameter must be in exactly one block; what is left out has no bound."""
    listed = [name for block in blocks for name in block]
    known = set(trainable(model))
    unknown = sorted(set(listed) - known)
    missing = sorted(known - set(listed))
    if unknown or missing or len(listed) != len(set(listed)):
        raise ValueError(
            "blocks must hold every trainable parameter exactly once; "
            f"missing: {missing or 'none'}; not trainable or unknown: {unknown or 'none'}; "
            f"listed {len(listed)} names, {len(set(listed))} of them different"
        )
