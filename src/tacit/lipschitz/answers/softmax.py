"""Softmax and its logarithm, over one of a record's own axes."""

from __future__ import annotations

import math

from torch import nn

from tacit.lipschitz.axes import own_axis
from tacit.lipschitz.bounds import Bound, Parameterless
from tacit.lipschitz.refused import Refused


class SoftmaxAnswers(Parameterless):
    """p = softmax(±x) over K numbers, m times side by side.

    Lipschitz   J = diag(p) − ppᵀ is symmetric; the absolute row sums are 2p_i(1 − p_i) ≤ ½, and
                no eigenvalue is larger than the largest row sum
    output      ‖p‖ ≤ Σp_i = 1, so √m; and from the uniform p at 0, √(m/K) + X/2
    """

    def __init__(self, module: nn.Softmax | nn.Softmin | nn.Softmax2d) -> None:
        self.axis = _axis_of(module)

    def output_norm(self, x: Bound) -> float:
        length = _length(self.axis, x, "softmax")
        groups = math.prod(x.shape) / length
        return min(math.sqrt(groups), math.sqrt(groups / length) + x.norm / 2)

    def lipschitz(self, x: Bound) -> float:
        return 0.5


class LogSoftmaxAnswers(Parameterless):
    """x − log Σ eˣ over K numbers.

    Lipschitz   J = I − 1pᵀ is its own square, and I − P has the norm of P for any such P that is
                neither 0 nor I [Ipsen 1995]: ‖1‖·‖p‖ ≤ √K. For K = 1 it is 0
    output      at 0 every number is −log K: √n·log K + √K·X
    """

    def __init__(self, module: nn.LogSoftmax) -> None:
        self.axis = _axis_of(module)

    def output_norm(self, x: Bound) -> float:
        length = _length(self.axis, x, "log-softmax")
        at_zero = math.sqrt(math.prod(x.shape)) * math.log(length)
        return at_zero + math.sqrt(length) * x.norm

    def lipschitz(self, x: Bound) -> float:
        return math.sqrt(_length(self.axis, x, "log-softmax"))


def _axis_of(module: nn.Module) -> int:
    if isinstance(module, nn.Softmax2d):
        return -3
    axis = getattr(module, "dim", None)
    if not isinstance(axis, int):
        raise Refused(
            "chooses its axis by the number of axes, which can be the batch's; give it a dim"
        )
    return axis


def _length(axis: int, x: Bound, what: str) -> int:
    return x.shape[own_axis(axis, len(x.shape) + 1, what) - 1]
