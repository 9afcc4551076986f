"""Queries that take losses which look inside the network."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import nn

from tacit.batch import Batch
from tacit.losses.pre_activations import watched
from tacit.queries.bounded_gradient import BoundedGradient, Loss

Call = TypeVar("Call", bound=Callable[..., BoundedGradient])


def looks_inside(call: Call) -> Call:
    """A query's `__call__`, with the model watched for the loss's sake.

    For queries that differentiate the loss in the *parameters*, whatever way it depends on them,
    and bound what comes out. One that begins at the gradient in the outputs would miss the rest.
    """

    @functools.wraps(call)
    def query(self: Any, model: nn.Module, loss: Loss, batch: Batch) -> BoundedGradient:
        with watched(model, loss):
            return call(self, model, loss, batch)

    return cast(Call, query)
