"""One forward and one backward pass that hand each layer's input and output gradient to its rule.

No parameter requires a gradient while the tape runs, so autograd computes none of the unclipped
weight gradients. The outputs of layers that nothing before them makes differentiable become the
leaves of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tacit.errors import UnsupportedModule

# Called with (module, positional arguments, keyword arguments, output gradient).
Arrival = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Tensor], None]


class Tape:
    """Watches some modules of a model through hooks that last as long as `recording`."""

    def __init__(self, model: nn.Module, watched: list[nn.Module], on_arrival: Arrival) -> None:
        self.model = model
        self.watched = watched
        self.on_arrival = on_arrival
        self.calls: dict[nn.Module, int] = {}
        self._forward_done = False
        self._arriving = False
        self._leaves: list[tuple[Tensor, nn.Module, tuple[Any, ...], dict[str, Any]]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(_frozen(self.model))
            stack.enter_context(_out_of_place(self.model))
            for module in self.watched:
                handle = module.register_forward_hook(self._seen, with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def backward(self, total: Tensor) -> None:
        """Run the backward pass of a scalar; arrivals happen on the way, from last to first."""
        self._forward_done = True
        leaves = [leaf for leaf, *_ in self._leaves]
        if not leaves:
            return
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
        for (_, module, args, kwargs), grad in zip(self._leaves, grads, strict=True):
            if grad is not None:
                self._arrived(module, args, kwargs, grad)

    def _seen(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor):
            raise UnsupportedModule(
                f"{type(module).__name__} returns {type(output).__name__}, not a tensor; "
                "name engine=PerRecord() for this model"
            )
        if self._arriving or not torch.is_grad_enabled():
            return
        if self._forward_done:
            # A checkpointed block runs again in the backward pass: its graph must be the same one.
            if not first.requires_grad:
                first.requires_grad_()
            return
        self.calls[module] = self.calls.get(module, 0) + 1
        args = tuple(a.detach() if isinstance(a, Tensor) else a for a in args)
        kwargs = {n: v.detach() if isinstance(v, Tensor) else v for n, v in kwargs.items()}
        if first.requires_grad:
            first.register_hook(lambda grad: self._arrived(module, args, kwargs, grad))
        else:
            first.requires_grad_()
            self._leaves.append((first, module, args, kwargs))

    def _arrived(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], grad: Tensor
    ) -> None:
        self._arriving = True  # a rule may run the module again: that is not another use
        try:
            with torch.no_grad():
                self.on_arrival(module, args, kwargs, grad.detach())
        finally:
            self._arriving = False


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No parameter requires a gradient meanwhile."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


@contextmanager
def _out_of_place(model: nn.Module) -> Iterator[None]:
    """In-place activations write into a new tensor meanwhile: a leaf cannot be overwritten."""
    changed = [m for m in model.modules() if getattr(m, "inplace", False) is True]
    for module in changed:
        setattr(module, "inplace", False)  # noqa: B010 (modules type their attributes as tensors)
    try:
        yield
    finally:
        for module in changed:
            setattr(module, "inplace", True)  # noqa: B010
