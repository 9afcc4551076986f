"""The answers of PyTorch's own modules, by exact type: a subclass may do something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from tacit.lipschitz.answers.dropout import DropoutAnswers
from tacit.lipschitz.answers.max_pooling import AdaptiveMaxPool, MaxPool
from tacit.lipschitz.answers.moving import Moving, flatten, pixel_shuffle, unflatten
from tacit.lipschitz.answers.non_negative import (
    NonNegativeLinear,
    average_pool,
    circular_pad,
    upsample,
)
from tacit.lipschitz.answers.padding import ConstantPadAnswers
from tacit.lipschitz.answers.pointwise import ACTIVATIONS
from tacit.lipschitz.answers.refusals import REFUSED
from tacit.lipschitz.answers.softmax import LogSoftmaxAnswers, SoftmaxAnswers
from tacit.lipschitz.bounds import Bounded
from tacit.lipschitz.refused import Refused


def _activation(module: nn.Module) -> Bounded:
    answers = ACTIVATIONS[type(module)](module)
    # Whoever else reads the input then reads f(x): harmless only if f lengthens nothing.
    if getattr(module, "inplace", False) and not answers.non_expansive:
        raise Refused("writes into its input, which others may read; build it with inplace=False")
    return answers


KNOWN: dict[type[nn.Module], Callable[[Any], Bounded]] = {
    nn.Identity: Moving,
    nn.Flatten: flatten,
    nn.Unflatten: unflatten,
    nn.PixelShuffle: pixel_shuffle,
    nn.PixelUnshuffle: pixel_shuffle,
    nn.ChannelShuffle: Moving,
    **dict.fromkeys(ACTIVATIONS, _activation),
    nn.Softmax: SoftmaxAnswers,
    nn.Softmin: SoftmaxAnswers,
    nn.Softmax2d: SoftmaxAnswers,
    nn.LogSoftmax: LogSoftmaxAnswers,
    nn.Dropout: DropoutAnswers,
    nn.Dropout1d: DropoutAnswers,
    nn.Dropout2d: DropoutAnswers,
    nn.Dropout3d: DropoutAnswers,
    nn.AvgPool1d: average_pool,
    nn.AvgPool2d: average_pool,
    nn.AvgPool3d: average_pool,
    nn.AdaptiveAvgPool1d: average_pool,
    nn.AdaptiveAvgPool2d: average_pool,
    nn.AdaptiveAvgPool3d: average_pool,
    nn.MaxPool1d: MaxPool,
    nn.MaxPool2d: MaxPool,
    nn.MaxPool3d: MaxPool,
    nn.AdaptiveMaxPool1d: AdaptiveMaxPool,
    nn.AdaptiveMaxPool2d: AdaptiveMaxPool,
    nn.AdaptiveMaxPool3d: AdaptiveMaxPool,
    nn.ZeroPad1d: ConstantPadAnswers,
    nn.ZeroPad2d: ConstantPadAnswers,
    nn.ZeroPad3d: ConstantPadAnswers,
    nn.ConstantPad1d: ConstantPadAnswers,
    nn.ConstantPad2d: ConstantPadAnswers,
    nn.ConstantPad3d: ConstantPadAnswers,
    nn.CircularPad1d: circular_pad,
    nn.CircularPad2d: circular_pad,
    nn.CircularPad3d: circular_pad,
    nn.ReflectionPad1d: NonNegativeLinear,
    nn.ReflectionPad2d: NonNegativeLinear,
    nn.ReflectionPad3d: NonNegativeLinear,
    nn.ReplicationPad1d: NonNegativeLinear,
    nn.ReplicationPad2d: NonNegativeLinear,
    nn.ReplicationPad3d: NonNegativeLinear,
    nn.Upsample: upsample,
    nn.UpsamplingNearest2d: upsample,
    nn.UpsamplingBilinear2d: upsample,
    **REFUSED,
}
