"""Modules of PyTorch that have no bound, why, and what to use instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from torch import nn

from tacit.lipschitz.refused import Refused

_NORMALISES = (
    "divides by a deviation that can be near 0, so it has no Lipschitz constant; use "
    "tacit.lipschitz.LayerCentering, or train with PerSampleClip"
)
_BATCH = (
    "normalises by the batch, so one record moves everyone's gradient; use "
    "tacit.lipschitz.LayerCentering"
)
_JUMPS = "jumps, so it has no Lipschitz constant; use nn.Softshrink, nn.ReLU or MaxMin"
_SLOPES = "has slopes of its own that nothing keeps bounded; use nn.LeakyReLU or MaxMin"
_LINEAR = (
    "has weights that nothing keeps bounded; use tacit.lipschitz.SpectralLinear (frozen too: give "
    "it the norm of the weight as max_norm), or tacit.lipschitz_twin(model)"
)
_CONVOLUTION = (
    "has weights that nothing keeps bounded; use a convolution of tacit.lipschitz, or "
    "tacit.lipschitz_twin(model)"
)
_TRANSPOSED = (
    "has weights that nothing keeps bounded, and no counterpart in tacit.lipschitz; use "
    "nn.Upsample and a convolution, or train this model with PerSampleClip"
)
_TWO_INPUTS = (
    "multiplies its inputs by each other, so it has no Lipschitz constant; train this model with "
    "PerSampleClip"
)
_ROOT = (
    "has no gradient at 0 (PyTorch gives NaN); use tacit.lipschitz.ScaledL2NormPool2d, which is "
    "defined there"
)
_ATTENTION = (
    "has no Lipschitz constant: products of activations grow with their squares; train this model "
    "with PerSampleClip"
)
_STATE = (
    "multiplies its own outputs by weights that nothing keeps bounded; train this model with "
    "PerSampleClip"
)

REASONS: dict[type[nn.Module], str] = {
    nn.Linear: _LINEAR,
    nn.Bilinear: _TWO_INPUTS,
    nn.Conv1d: _CONVOLUTION,
    nn.Conv2d: _CONVOLUTION,
    nn.Conv3d: _CONVOLUTION,
    nn.ConvTranspose1d: _TRANSPOSED,
    nn.ConvTranspose2d: _TRANSPOSED,
    nn.ConvTranspose3d: _TRANSPOSED,
    nn.LayerNorm: _NORMALISES,
    nn.GroupNorm: _NORMALISES,
    nn.RMSNorm: _NORMALISES,
    nn.InstanceNorm1d: _NORMALISES,
    nn.InstanceNorm2d: _NORMALISES,
    nn.InstanceNorm3d: _NORMALISES,
    nn.LocalResponseNorm: _NORMALISES,
    nn.BatchNorm1d: _BATCH,
    nn.BatchNorm2d: _BATCH,
    nn.BatchNorm3d: _BATCH,
    nn.SyncBatchNorm: _BATCH,
    nn.Hardshrink: _JUMPS,
    nn.Threshold: _JUMPS,
    nn.PReLU: _SLOPES,
    nn.RReLU: "draws its slopes anew for each number; use nn.LeakyReLU",
    nn.GLU: "multiplies one half of its input by the other; use MaxMin",
    nn.LPPool1d: _ROOT,
    nn.LPPool2d: _ROOT,
    nn.LPPool3d: _ROOT,
    nn.AlphaDropout: "shifts what it drops; use nn.Dropout",
    nn.FeatureAlphaDropout: "shifts what it drops; use nn.Dropout",
    nn.MultiheadAttention: _ATTENTION,
    nn.Transformer: _ATTENTION,
    nn.TransformerEncoder: _ATTENTION,
    nn.TransformerEncoderLayer: _ATTENTION,
    nn.RNN: _STATE,
    nn.LSTM: _STATE,
    nn.GRU: _STATE,
}


def _refuse(module: nn.Module) -> NoReturn:
    raise Refused(f"{type(module).__name__} {REASONS[type(module)]}")


REFUSED: dict[type[nn.Module], Callable[[nn.Module], NoReturn]] = dict.fromkeys(REASONS, _refuse)
