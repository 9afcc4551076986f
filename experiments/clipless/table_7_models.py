"""What the runs of Table 7 train: fixed features of one record, and a small Lipschitz network.

Nothing here reads private records as a set. Random frequencies come from a public seed, and the
centre and the covariance of a `PublicKernel` are those of standard normal draws, which stand for
records that come standardised.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tacit.data import PublicScaler
from tacit.data.private_scaling import Centre
from tacit.lipschitz import BoundedInput, FrobeniusLinear, MaxMin, SpectralLinear

PUBLIC_DRAWS = 4000  # normal draws behind a kernel's centre and covariance


@dataclass(frozen=True)
class Setting:
    """One run. `features` random Fourier features of width `bandwidth`, if any.

    With a `limit`, they are those of a `PublicKernel`: values are cut at ±limit, each is weighted
    by its `relevance`, the head starts at `log_odds`, and released gradients are filtered by
    `ridge`, if that is positive.
    """

    standardise: bool = False
    features: int = 0
    bandwidth: float = 1.0
    hidden: int = 0
    rate: float = 1.0
    steps: int = 1
    scale: float = 1.0
    clip: float = 1.0
    learning_rate: float = 1.0
    limit: float = 0.0
    relevance: tuple[float, ...] = ()
    log_odds: float = 0.0
    ridge: float = 0.0


def scaled(name: str, inputs: Tensor) -> Tensor:
    """By declared constants, into [−1, 1]: most sets are in [0, 1], shuttle is in logarithms."""
    if name == "shuttle":
        return (inputs.sign() * inputs.abs().log1p() / 11).clamp(-1, 1)
    if name in ("magic.gamma", "skin", "yeast"):
        return (inputs / 6).clamp(-1, 1)
    return 2 * inputs - 1


class FourierFeatures:
    """x ↦ (cos ωᵢx, sin ωᵢx)/√m, ω from a public seed: every record has norm 1  [Rahimi 2007]."""

    def __init__(self, width: int, setting: Setting) -> None:
        generator = torch.Generator().manual_seed(0)
        frequencies = torch.randn(width, setting.features // 2, generator=generator)
        self.frequencies = frequencies / setting.bandwidth

    def __call__(self, inputs: Tensor) -> Tensor:
        angles = inputs @ self.frequencies
        return torch.cat([angles.cos(), angles.sin()], dim=1) / math.sqrt(angles.shape[1])


class PublicKernel:
    """x ↦ (φ(x) − μ)/‖φ(x) − μ‖, φ the Fourier features of r ⊙ x cut at ±limit, r the relevance.

    μ is the mean of φ over standard normal draws, so that the features have little in common
    wherever records are about standardised, and it costs no privacy if they are not.
    """

    def __init__(self, width: int, setting: Setting) -> None:
        assert len(setting.relevance) == width
        self.setting = setting
        self.fourier = FourierFeatures(width, setting)
        self.relevance = torch.tensor(setting.relevance)
        self.draws = torch.randn(PUBLIC_DRAWS, width, generator=torch.Generator().manual_seed(1))
        mean = self._features(self.draws).mean(dim=0)
        self.centre = Centre(mean, "the mean of normal draws")

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.centre(self._features(inputs))

    def filter(self) -> Tensor:
        """ρ(Σ + ρI)⁻¹, Σ the covariance of the features of the same draws, ρ the ridge."""
        rows = self(self.draws)
        sigma = rows.T @ rows / len(rows)
        ridge = self.setting.ridge
        return ridge * torch.linalg.inv(sigma + ridge * torch.eye(len(sigma)))

    def _features(self, inputs: Tensor) -> Tensor:
        limit = self.setting.limit
        return self.fourier(inputs.clamp(-limit, limit) * self.relevance)


@functools.lru_cache(maxsize=2)
def public_kernel(width: int, setting: Setting) -> PublicKernel:
    return PublicKernel(width, setting)


@functools.lru_cache(maxsize=2)
def gradient_filter(width: int, setting: Setting) -> Tensor:
    return public_kernel(width, setting).filter()


def prepared(name: str, inputs: Tensor, setting: Setting, scaler: PublicScaler | None) -> Tensor:
    if setting.limit:
        return public_kernel(inputs.shape[1], setting)(inputs)
    rows = scaled(name, inputs)
    if scaler is not None:
        rows = scaler(rows).clamp(-3, 3) / 2
    if setting.features:
        return FourierFeatures(rows.shape[1], setting)(rows)
    return torch.cat([rows, torch.ones(len(rows), 1)], dim=1)  # a bias that costs no parameter


def network(width: int, setting: Setting) -> nn.Sequential:
    layers: list[nn.Module] = [BoundedInput(1.0, sphere=True)]
    if setting.hidden:
        layers += [SpectralLinear(width, setting.hidden), MaxMin()]
        width = setting.hidden
    head = FrobeniusLinear(width, 1, bias=bool(setting.log_odds))
    nn.init.zeros_(head.weight)
    if head.bias is not None:
        # A declared constant and not a parameter: it has no gradient, and so no noise.
        nn.init.constant_(head.bias, setting.log_odds / setting.scale)
        head.bias.requires_grad_(False)
    return nn.Sequential(*layers, head)


def filter_gradients(
    optimizer: torch.optim.Optimizer, model: nn.Sequential, matrix: Tensor
) -> None:
    """Before each step, the released gradient g of the head becomes g·M: post-processing."""
    head = model[-1]
    assert isinstance(head, FrobeniusLinear)

    def apply(*_: object) -> None:
        assert head.weight.grad is not None
        head.weight.grad = head.weight.grad @ matrix

    optimizer.register_step_pre_hook(apply)
