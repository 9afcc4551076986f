"""Work on a GPU that is recorded once and replayed: hundreds of small launches become one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from tacit.tensor_float import float32_settings

Result = TypeVar("Result")
_FAR_AHEAD = 2**40

# Every module's own tables of parameters, children and hooks: most of its attributes, none plain.
_TABLES = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))
_PLAIN = (bool, int, float, str, tuple, list)


class CaptureFailed(RuntimeError):
    """The work waits for the GPU or does something else that a graph cannot hold."""


def capture(work: Callable[[], Result], warm_ups: int = 2, pool: Any = None) -> tuple[Any, Result]:
    """The graph of `work`, and what it returned: tensors that each replay writes anew.

    `work` must read and write the same tensors each time and wait for nothing. It is run
    `warm_ups` times first, on a stream of its own, so that libraries are ready to be recorded.
    Nothing of earlier backward passes may be left, nor what autocast has cast: a node of the graph
    of autograd that was made on another stream cannot be recorded.
    """
    gc.collect()
    cached = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        return _captured(work, warm_ups, pool)
    finally:
        torch.set_autocast_cache_enabled(cached)


def _captured(work: Callable[[], Result], warm_ups: int, pool: Any) -> tuple[Any, Result]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_ups):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool):
            found = work()
    except Exception as error:
        _usable_generator()
        if isinstance(error, torch.cuda.OutOfMemoryError) or not isinstance(error, RuntimeError):
            raise
        raise CaptureFailed(f"this work cannot be recorded: {error}") from error
    return graph, found


def _usable_generator() -> None:
    """A recording that failed leaves the generator waiting for its end: give it a new state.

    Far ahead of the old one, which graphs that were recorded before go on to draw from.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())
    generator.set_offset(generator.get_offset() + _FAR_AHEAD)


def side_by_side(works: Sequence[Callable[[], None]], streams: Sequence[Any]) -> None:
    """Work that does not meet, each on a stream of its own; what follows waits for all of it.

    In a recording these are branches of the graph, so small kernels of one run beside those of
    another. What each allocates is its stream's, and is not handed to another's.
    """
    here = torch.cuda.current_stream()
    for work, stream in zip(works, streams, strict=True):
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            work()
    for stream in streams:
        here.wait_stream(stream)


def state_of(model: nn.Module) -> Hashable:
    """What a recording of the model depends on: its tensors' places, its settings, the arithmetic.

    A setting that a layer computes with (a clip, a stride, a mode) is a number inside the graph.
    """
    places = tuple(
        tensor.data_ptr()
        for module in model.modules()
        for own in (module._parameters, module._buffers)
        for tensor in own.values()
        if tensor is not None
    )
    cast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    arithmetic = (float32_settings(), cast)
    return id(model), places, settings_of(model), arithmetic


def settings_of(model: nn.Module) -> Hashable:
    """Every module of the model, with its children and its attributes that are plain values.

    The children are named where they are: a module may be used once more, and is no new one.
    """
    return tuple(
        (
            type(m),
            id(m),
            tuple((name, id(child)) for name, child in m._modules.items()),
            *[
                (k, frozen(v))
                for k, v in vars(m).items()
                if k not in _TABLES and isinstance(v, _PLAIN)
            ],
        )
        for m in model.modules()
    )


def frozen(value: Any) -> Hashable:
    """Lists and tuples all the way down; what is neither they nor plain is known by its place."""
    if isinstance(value, tuple | list):
        return tuple(map(frozen, value))
    if isinstance(value, bool | int | float | str):
        return value
    return type(value), id(value)
