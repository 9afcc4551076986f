"""The functions, methods and small operations of a traced forward, as modules.

Small operations of a traced forward, as modules with the three answers.

The functions and methods of one value that a traced forward may use, as modules.

What is not here has no bound: products of activations, choosing among records, anything along the
batch axis, reshaping that could carry numbers from one record to another.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.errors import Refused
from tacit.lipschitz.bounds import Bound, Parameterless, own_axes, own_axis
from tacit.lipschitz.layers.inputs import Scale
from tacit.lipschitz.layers.rearranging import Permute
from tacit.lipschitz.tracing import name_of


class Mean(nn.Module, Parameterless):
    """The mean of m of a record's own numbers: |mean| ≤ ‖·‖/√m by Cauchy–Schwarz, so 1/√m."""

    def __init__(self, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> None:
        super().__init__()
        if dim is None or (not isinstance(dim, int) and not len(dim)):
            raise Refused("a mean over everything mixes records; name a record's own axes")
        self.axes = (dim,) if isinstance(dim, int) else tuple(dim)
        self.keepdim = keepdim

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=own_axes(self.axes, x.dim(), "a mean"), keepdim=self.keepdim)

    def lipschitz(self, x: Bound) -> float:
        axes = own_axes(self.axes, len(x.shape) + 1, "a mean")
        return 1 / math.sqrt(math.prod(x.shape[axis - 1] for axis in axes))


class AddNumber(nn.Module, Parameterless):
    """x + c, one number c on all n: X + |c|·√n, 1-Lipschitz."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = float(by)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by

    def output_norm(self, x: Bound) -> float:
        return x.norm + abs(self.by) * math.sqrt(math.prod(x.shape))


class Part(nn.Module, Parameterless):
    """x[:, …] with numbers and slices: a part of each record, no number twice."""

    exact = True

    def __init__(self, index: Any) -> None:
        super().__init__()
        self.index = index if isinstance(index, tuple) else (index,)
        if self.index[0] != slice(None) or not all(map(_is_basic, self.index)):
            raise Refused(
                f"x[{index}] chooses among records, or by a tensor; begin with a full slice, "
                "x[:, …], and go on with numbers and slices"
            )

    def forward(self, x: Tensor) -> Tensor:
        return x[self.index]


class Exchange(nn.Module, Parameterless):
    """Two of a record's own axes change places."""

    exact = True

    def __init__(self, dim0: int, dim1: int) -> None:
        super().__init__()
        self.axes = (dim0, dim1)

    def forward(self, x: Tensor) -> Tensor:
        first, second = (own_axis(axis, x.dim(), "a transposition") for axis in self.axes)
        return x.transpose(first, second)


class Total(nn.Module, Parameterless):
    """A sum that was bounded already, on its way to be rounded."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def _is_basic(index: Any) -> bool:
    if isinstance(index, slice):
        return all(end is None or type(end) is int for end in (index.start, index.stop, index.step))
    # A bool is an int to Python and a mask to PyTorch.
    return index is None or index is Ellipsis or type(index) is int


def module_for(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    """The module that does what the operation does to one value; `args` are those after it."""
    if target not in OPERATIONS:
        raise Refused(
            f"its forward uses {name_of(target)}, which has no bound; use +, -, scaling by a "
            "number, torch.cat, flatten(1), mean over a record's own axes, PyTorch's activations "
            "and poolings and Tacit's layers, or give the module the three answers of "
            "tacit.lipschitz.Bounded"
        )
    make, names = OPERATIONS[target]
    if target == "permute" and args and isinstance(args[0], int):
        args = (args,)
    given = dict(zip(names, args, strict=False)) | kwargs
    for name, value in _IDLE.items():
        if name in given and given[name] == value:
            del given[name]
    if len(args) > len(names) or not set(given) <= set(names):
        raise Refused(f"its forward uses {name_of(target)} with arguments {args}, {kwargs}")
    if any(isinstance(value, torch.fx.Node) for value in given.values()):
        raise Refused(
            f"its forward uses {name_of(target)} with an argument that depends on its input; make "
            "it a constant"
        )
    try:
        return make(**given)
    except Refused:
        raise
    except (TypeError, ValueError) as error:
        raise Refused(f"its forward uses {name_of(target)}: {error}") from error


def _dropout(p: float = 0.5, training: bool = True, inplace: bool = False) -> nn.Module:
    return nn.Dropout(p, inplace).train(training)


def _flatten(start_dim: int = 0, end_dim: int = -1) -> nn.Module:
    return nn.Flatten(start_dim, end_dim)


def _permute(dims: tuple[int, ...]) -> nn.Module:
    if not dims or dims[0] != 0:
        raise Refused(f"permute{tuple(dims)} moves the batch axis; keep 0 first")
    return Permute(*dims[1:])


def _negative() -> nn.Module:
    return Scale(-1.0)


# Arguments that change nothing while they have these values.
_IDLE: dict[str, Any] = {"_stacklevel": 3, "dtype": None}

_AVERAGE = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")
_MAXIMUM = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")

# The module, and the names of the arguments after the input in the order of the *function*, which
# is not always the module's.
OPERATIONS: dict[Any, tuple[Callable[..., nn.Module], tuple[str, ...]]] = {
    F.relu: (nn.ReLU, ("inplace",)),
    torch.relu: (nn.ReLU, ()),
    "relu": (nn.ReLU, ()),
    F.relu6: (nn.ReLU6, ("inplace",)),
    F.leaky_relu: (nn.LeakyReLU, ("negative_slope", "inplace")),
    F.elu: (nn.ELU, ("alpha", "inplace")),
    F.celu: (nn.CELU, ("alpha", "inplace")),
    F.selu: (nn.SELU, ("inplace",)),
    F.gelu: (nn.GELU, ("approximate",)),
    F.silu: (nn.SiLU, ("inplace",)),
    F.mish: (nn.Mish, ("inplace",)),
    F.hardswish: (nn.Hardswish, ("inplace",)),
    F.softplus: (nn.Softplus, ("beta", "threshold")),
    F.logsigmoid: (nn.LogSigmoid, ()),
    torch.sigmoid: (nn.Sigmoid, ()),
    "sigmoid": (nn.Sigmoid, ()),
    F.hardsigmoid: (nn.Hardsigmoid, ("inplace",)),
    torch.tanh: (nn.Tanh, ()),
    "tanh": (nn.Tanh, ()),
    F.hardtanh: (nn.Hardtanh, ("min_val", "max_val", "inplace")),
    F.softsign: (nn.Softsign, ()),
    F.tanhshrink: (nn.Tanhshrink, ()),
    F.softshrink: (nn.Softshrink, ("lambd",)),
    F.softmax: (nn.Softmax, ("dim",)),
    torch.softmax: (nn.Softmax, ("dim",)),
    "softmax": (nn.Softmax, ("dim",)),
    F.log_softmax: (nn.LogSoftmax, ("dim",)),
    torch.log_softmax: (nn.LogSoftmax, ("dim",)),
    "log_softmax": (nn.LogSoftmax, ("dim",)),
    F.dropout: (_dropout, ("p", "training", "inplace")),
    F.avg_pool1d: (nn.AvgPool1d, _AVERAGE),
    F.avg_pool2d: (nn.AvgPool2d, (*_AVERAGE, "divisor_override")),
    F.avg_pool3d: (nn.AvgPool3d, (*_AVERAGE, "divisor_override")),
    F.adaptive_avg_pool1d: (nn.AdaptiveAvgPool1d, ("output_size",)),
    F.adaptive_avg_pool2d: (nn.AdaptiveAvgPool2d, ("output_size",)),
    F.adaptive_avg_pool3d: (nn.AdaptiveAvgPool3d, ("output_size",)),
    F.max_pool1d: (nn.MaxPool1d, _MAXIMUM),
    F.max_pool2d: (nn.MaxPool2d, _MAXIMUM),
    F.max_pool3d: (nn.MaxPool3d, _MAXIMUM),
    F.pixel_shuffle: (nn.PixelShuffle, ("upscale_factor",)),
    F.pixel_unshuffle: (nn.PixelUnshuffle, ("downscale_factor",)),
    torch.flatten: (_flatten, ("start_dim", "end_dim")),
    "flatten": (_flatten, ("start_dim", "end_dim")),
    torch.mean: (Mean, ("dim", "keepdim")),
    "mean": (Mean, ("dim", "keepdim")),
    torch.transpose: (Exchange, ("dim0", "dim1")),
    "transpose": (Exchange, ("dim0", "dim1")),
    torch.permute: (_permute, ("dims",)),
    "permute": (_permute, ("dims",)),
    "contiguous": (nn.Identity, ()),
    operator.getitem: (Part, ("index",)),
    operator.neg: (_negative, ()),
    torch.neg: (_negative, ()),
    "neg": (_negative, ()),
}
