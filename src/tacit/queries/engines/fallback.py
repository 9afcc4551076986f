"""Per-record gradients of a module that has no rule: `torch.func` on that module alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from tacit.errors import UnsupportedModule
from tacit.queries.engines.rows import RecordGradients, Stacked


def func_gradients(
    module: nn.Module,
    wanted: set[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    cotangent: Tensor,
) -> dict[str, RecordGradients]:
    """The vector-Jacobian product of each record, run through the module a second time, alone."""
    batch = len(cotangent)
    own = dict(module.named_parameters())
    moving = {name: own[name].detach() for name in sorted(wanted)}
    fixed = {n: p.detach() for n, p in own.items() if n not in moving}
    fixed |= dict(module.named_buffers())

    def is_batched(value: object) -> bool:
        return isinstance(value, Tensor) and value.dim() > 0 and len(value) == batch

    batched_args = [is_batched(value) for value in args]
    batched_kwargs = {name: is_batched(value) for name, value in kwargs.items()}
    if not any(batched_args) and not any(batched_kwargs.values()):
        raise UnsupportedModule(
            f"{type(module).__name__} takes no tensor with one row a record; "
            "name engine=PerRecord() for this model"
        )

    def of_one(b: Tensor, *values: Any) -> dict[str, Tensor]:
        positional, named = values[: len(args)], dict(zip(kwargs, values[len(args) :], strict=True))
        positional = tuple(
            v.unsqueeze(0) if flag else v for v, flag in zip(positional, batched_args, strict=True)
        )
        named = {n: v.unsqueeze(0) if batched_kwargs[n] else v for n, v in named.items()}

        def run(weights: dict[str, Tensor]) -> Tensor:
            output = functional_call(module, {**weights, **fixed}, positional, named)
            return (output[0] if isinstance(output, tuple) else output).squeeze(0)

        return vjp(run, moving)[1](b)[0]

    flags = [*batched_args, *batched_kwargs.values()]
    in_dims = (0, *(0 if flag else None for flag in flags))
    values = [v.detach() if isinstance(v, Tensor) else v for v in (*args, *kwargs.values())]
    with torch.no_grad():
        rows = vmap(of_one, in_dims=in_dims, randomness="error")(cotangent, *values)
    return {name: Stacked(stack) for name, stack in rows.items()}
