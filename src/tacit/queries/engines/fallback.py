"""Per-record gradients of a module that has no rule: `torch.func` on that module alone."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tacit.errors import UnsupportedModule
from tacit.queries.engines.precision import wide
from tacit.queries.engines.rows import RecordGradients, Stacked
from tacit.queries.engines.tape import Call


def func_gradients(call: Call, wanted: set[str], batch: int) -> dict[str, RecordGradients]:
    """The vector-Jacobian product of each record, run through the module a second time, alone."""
    module = call.module
    # A weight of a layer inside may be tied to one of these: that layer has a call of its own.
    own = dict(module.named_parameters(remove_duplicate=False))
    moving = {name: wide(own[name].detach()) for name in sorted(wanted)}
    fixed = {n: wide(p.detach()) for n, p in own.items() if n not in moving}
    fixed |= {n: wide(b) for n, b in module.named_buffers()}
    arrived = [g is not None for g in call.gradients]
    cotangents = [wide(g) for g in call.gradients if g is not None]
    for cotangent in cotangents:
        call.check_rows(cotangent, batch)
    leaves, structure = tree_flatten((call.args, call.kwargs))
    values = [wide(v) if isinstance(v, Tensor) else v for v in leaves]
    batched = [isinstance(v, Tensor) and v.dim() > 0 and len(v) == batch for v in values]
    if not any(batched):
        raise UnsupportedModule(
            f"{type(module).__name__} takes no tensor with one row a record; "
            "name engine=PerRecord() for this model"
        )

    def of_one(b: list[Tensor], *values: Any) -> dict[str, Tensor]:
        rows = [v.unsqueeze(0) if flag else v for v, flag in zip(values, batched, strict=True)]
        args, kwargs = tree_unflatten(rows, structure)

        def run(weights: dict[str, Tensor]) -> list[Tensor]:
            values = {**weights, **fixed}
            output = functional_call(module, values, args, kwargs, tie_weights=False)
            made = [t for t in tree_leaves(output) if _differentiable(t)]
            return [t.squeeze(0) for t, keep in zip(made, arrived, strict=True) if keep]

        return vjp(run, moving)[1](b)[0]

    in_dims = (0, *(0 if flag else None for flag in batched))
    try:
        with torch.no_grad():
            rows = vmap(of_one, in_dims=in_dims, randomness="error")(cotangents, *values)
    except RuntimeError as error:
        raise UnsupportedModule(
            f"{type(module).__name__} has no rule, and torch.func cannot run it record by record: "
            f"{str(error).splitlines()[0]}. If it is made of layers and some parameters of its "
            "own, move those into a small module of theirs; or name engine=PerRecord()"
        ) from error
    return {
        name: Stacked(stack.reshape(batch, *(stack.shape[1:] or (1,))))
        for name, stack in rows.items()
    }


_told: set[type[nn.Module]] = set()


def say_once(module: nn.Module) -> None:
    """Tell who trains that a module costs more than it need; nobody who only looks."""
    if module.training and type(module) not in _told:
        _told.add(type(module))
        warnings.warn(
            f"{type(module).__name__} has no rule for per-record gradients; torch.func runs it "
            "a second time, which is exact and slower",
            stacklevel=2,
        )


def _differentiable(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
