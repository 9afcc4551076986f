"""What the optimizer steps must be what the model trains."""

from __future__ import annotations

import torch
from torch import nn

from tacit.queries.bounded_gradient import trainable


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """Raise if the optimizer holds none of the model's trainable parameters.

    Returns a note if it holds only some: the others are released with the rest, and stay as they
    are.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    parameters = trainable(model)
    left_out = [name for name, p in parameters.items() if id(p) not in held]
    if not left_out:
        return None
    if len(left_out) == len(parameters):
        raise ValueError(
            f"optimizer holds none of the model's {len(parameters)} trainable parameters, so that "
            "no step would change the model; make it from model.parameters() of this model (what "
            "make_trainable and lipschitz_twin return is a copy)"
        )
    return (
        f"the optimizer leaves out {len(left_out)} of the model's {len(parameters)} trainable "
        "parameters, which stay as they were"
    )
