"""Can a step of this model be recorded and replayed, without asking the GPU to find out?"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from tacit.foreign_hooks import foreign_hooks, process_wide_hooks
from tacit.queries.engines.plain_forward import plain_forward
from tacit.queries.engines.rules import RULES

_ACTIVATIONS = (
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.GLU,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,
    nn.LeakyReLU,
    nn.LogSigmoid,
    nn.LogSoftmax,
    nn.Mish,
    nn.ReLU,
    nn.ReLU6,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softmax,
    nn.Softplus,
    nn.Softsign,
    nn.Tanh,
)
_POOLS = (
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AvgPool3d,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
)
_SHAPES = (nn.Flatten, nn.Identity, nn.PixelShuffle, nn.PixelUnshuffle, nn.Unflatten, nn.ZeroPad2d)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)
# By exact type, as for the rules: a subclass may do anything in its forward pass.
_KNOWN = frozenset([*RULES, *_ACTIVATIONS, *_POOLS, *_SHAPES, *_DROPOUTS, *_CONTAINERS])


def recordable(model: nn.Module, loss: object) -> bool:
    """Whether every step does the same work, whatever the records hold.

    A recording repeats kernels, not Python: a branch on a number of the batch would stop it, and a
    counter, a draw of Python's own or a hook that looks on would stay as they were. So all parts
    of the model, and the loss, must be ones that are known to have none of these: PyTorch's own
    layers, this library's, and forward passes whose code shows it (`plain_forward`).
    """
    if process_wide_hooks():
        return False
    return _known_loss(loss) and all(map(_known, model.modules()))


def _known(module: nn.Module) -> bool:
    if "forward" in vars(module) or foreign_hooks(module):
        return False
    kind: Any = type(module)
    return _known_kind(kind) or plain_forward(module)


@functools.cache
def _known_kind(kind: type) -> bool:
    return kind in _KNOWN or _ours(kind)


def _known_loss(loss: object) -> bool:
    return _ours(type(loss)) or type(loss).__module__ == "torch.nn.modules.loss"


def _ours(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "tacit"
