"""One forward and one backward pass that hand each layer's input and output gradient to its rule.

No parameter requires a gradient while the tape runs, so autograd computes none of the unclipped
weight gradients. The graph begins instead at anchors: scalars that the outputs of the first layers
are made to depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map_only

from tacit.errors import UnsupportedModule
from tacit.queries.engines.attention import open_attention
from tacit.queries.engines.products import Products
from tacit.queries.engines.recurrent import open_cell, open_recurrent

# By exact type, as in `rules`: module, products, number of records, and the module's arguments.
OPEN: dict[type[nn.Module], Callable[..., Any]] = {
    nn.MultiheadAttention: open_attention,
    **dict.fromkeys((nn.RNN, nn.GRU, nn.LSTM), open_recurrent),
    **dict.fromkeys((nn.RNNCell, nn.GRUCell, nn.LSTMCell), open_cell),
}


@dataclass
class Call:
    """One use of a module: what went in, and the gradients of the tensors that came out.

    Of a module that was run in the open: its products, and the gradients at their places.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gradients: list[Tensor | None]
    products: Products | None = None

    def check_rows(self, tensor: Tensor, batch: int) -> None:
        """Raise UnsupportedModule unless there is one row a record."""
        if tensor.dim() == 0 or len(tensor) != batch:
            raise UnsupportedModule(
                f"{type(self.module).__name__} saw a tensor of shape {tuple(tensor.shape)} where "
                f"there are {batch} records; the first dimension must be the records (positions: "
                "positions.expand(len(x), -1)), or name engine=PerRecord()"
            )


class Tape:
    """Watches some modules of a model through hooks that last as long as `recording`."""

    def __init__(
        self,
        model: nn.Module,
        watched: list[nn.Module],
        batch: int,
        on_arrival: Callable[[Call], None],
    ) -> None:
        self.model = model
        self.batch = batch
        self.watched = watched
        self.on_arrival = on_arrival
        self.calls: dict[nn.Module, int] = {}
        self._forward_done = False
        self._arriving = False
        self._anchors: list[Tensor] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(_frozen(self.model))
            # Compiled code does not call hooks, and neither do the fused kernels of transformers.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(_no_fused_transformers())
            for module in self.watched:
                # First of all hooks: the others see, and use, the output that is handed out.
                handle = module.register_forward_hook(self._seen, prepend=True, with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def backward(self, total: Tensor) -> None:
        """Run the backward pass of a scalar; arrivals happen on the way, from last to first."""
        self._forward_done = True
        if self._anchors and total.requires_grad:
            torch.autograd.grad(total, self._anchors, allow_unused=True)

    def _seen(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        if self._arriving or not torch.is_grad_enabled():
            return output
        if any(isinstance(value, PackedSequence) for value in (*args, *kwargs.values(), output)):
            raise UnsupportedModule(
                f"{type(module).__name__} takes a PackedSequence, in which records are "
                "interleaved; give it padded sequences and mask the loss"
            )
        if type(module) in OPEN:
            return self._run_in_the_open(module, args, kwargs)
        alone = isinstance(output, Tensor)
        output = tree_map_only(Tensor, lambda t: self._handed_out(t, module, alone), output)
        # A checkpointed block runs again in the backward pass: that is not another use.
        if not self._forward_done:
            made = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
            args, kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
            self._record(made, Call(module, args, kwargs, []))
        return output

    def _run_in_the_open(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The module's output anew, by products that are seen; what it gave itself is dropped."""
        products = Products(module, self._product)
        output = OPEN[type(module)](module, products, self.batch, *args, **kwargs)
        if not self._forward_done:
            self._record(products.places(), Call(module, (), {}, [], products))
        return output

    def _handed_out(self, tensor: Tensor, module: nn.Module, alone: bool) -> Tensor:
        """The same numbers, such that a hook sees the gradient of all that uses them from here on.

        One output may be made from another; and a view that is overwritten loses its hooks.
        """
        if not tensor.is_floating_point():
            return tensor
        if not tensor.requires_grad:
            return self._anchored(tensor)
        if type(module) is nn.Linear:
            return self._product(tensor)
        return tensor if alone and not tensor._is_view() else tensor.clone()

    def _product(self, tensor: Tensor) -> Tensor:
        """The same for x Wᵀ + c, whose own backward pass does not mind if it is overwritten."""
        if not tensor.requires_grad:
            return self._anchored(tensor)
        return _same_numbers(None, tensor) if tensor._is_view() else tensor

    def _anchored(self, tensor: Tensor) -> Tensor:
        anchor = torch.zeros((), device=tensor.device, requires_grad=True)
        if not self._forward_done:
            self._anchors.append(anchor)
        return _same_numbers(anchor, tensor)

    def _record(self, places: list[Tensor], call: Call) -> None:
        """Have the gradients at these places arrive together."""
        kind = type(call.module).__name__
        if not places:
            raise UnsupportedModule(
                f"{kind} returns no tensor of real numbers; name engine=PerRecord() for this model"
            )
        self.calls[call.module] = self.calls.get(call.module, 0) + 1
        kept = [t for t in tree_leaves((call.args, call.kwargs)) if isinstance(t, Tensor)]
        kept += call.products.inputs() if call.products else []
        waiting = [(call, [(t, t._version) for t in kept])]
        del call, kept  # the graph holds its hooks to the end; it must not hold the inputs as well

        def arrived(gradients: Sequence[Tensor | None]) -> None:
            call, inputs = waiting.pop()
            if any(t._version != version for t, version in inputs):
                raise UnsupportedModule(
                    f"an input of {kind} was overwritten after it was read; write the result of "
                    "that in-place operation to a new tensor"
                )
            self._arrived(replace(call, gradients=list(gradients)))

        if len(places) == 1:
            places[0].register_hook(lambda gradient: arrived([gradient]))
        else:
            register_multi_grad_hook(places, arrived)

    def _arrived(self, call: Call) -> None:
        self._arriving = True  # a rule may run the module again: that is not another use
        try:
            with torch.no_grad():
                self.on_arrival(call)
        finally:
            self._arriving = False


class _Alias(torch.autograd.Function):
    """A tensor's numbers, made to depend on it and on a scalar whose gradient nobody wants."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor | None, tensor: Tensor) -> Tensor:
        # Not a view: what comes next may write into it.
        return tensor.data

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        needs_anchor, needs_tensor = ctx.needs_input_grad
        zero = gradient.new_zeros(()) if needs_anchor else None
        return zero, gradient if needs_tensor else None


def _same_numbers(anchor: Tensor | None, tensor: Tensor) -> Tensor:
    alias: Tensor = _Alias.apply(anchor, tensor)
    return alias


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
def _no_fused_transformers() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
