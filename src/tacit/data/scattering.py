"""Scattering features: fixed wavelets, so nothing about them is learnt from the data.

S x = (x ⋆ φ, |x ⋆ ψ_λ| ⋆ φ, ||x ⋆ ψ_λ| ⋆ ψ_μ| ⋆ φ), averaged over 2^J pixels: these are
K = 1 + JL + L²J(J−1)/2 numbers for each channel and each 2^J × 2^J square  [Bruna 2013; for private
learning Tramèr 2021]. With J = 2 scales and L = 8 angles K is 81, so a 3×32×32 image becomes
243×8×8. Up to the first order alone K is 1 + JL, 17 here, and a quarter of the work. Each record's
features depend on that record alone: the transform costs no privacy.
"""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tacit.errors import DataError
from tacit.records import Records


@dataclass(frozen=True)
class Scattering:
    """The transform for images of (channels, height, width), J scales and L angles.

    `order` is 2, or 1 to leave the second-order coefficients out.
    """

    shape: tuple[int, int, int]
    scales: int = 2
    angles: int = 8
    order: int = 2

    def __post_init__(self) -> None:
        if self.order not in (1, 2):
            raise ValueError(f"order is {self.order}; give 1 or 2")

    @property
    def feature_shape(self) -> tuple[int, int, int]:
        channels, height, width = self.shape
        each = 1 + self.scales * self.angles
        if self.order == 2:
            each += self.angles**2 * self.scales * (self.scales - 1) // 2
        side = 2**self.scales
        return channels * each, height // side, width // side

    def __call__(self, images: Tensor, chunk: int = 2048) -> Tensor:
        """(B, C, H, W) to (B, C·K, H/2^J, W/2^J), on the images' device."""
        # The package's own `kymatio.torch` also imports 3-d code that a current SciPy breaks.
        from kymatio.scattering2d.frontend.torch_frontend import ScatteringTorch2D

        if tuple(images.shape[1:]) != self.shape:
            raise ValueError(f"images of shape {tuple(images.shape[1:])}, expected {self.shape}")
        transform = ScatteringTorch2D(
            J=self.scales, shape=self.shape[1:], L=self.angles, max_order=self.order
        )
        transform = transform.to(images.device)
        features = images.new_empty(len(images), *self.feature_shape)
        for start in range(0, len(images), chunk):
            part = images[start : start + chunk].contiguous()
            features[start : start + chunk] = transform(part).flatten(1, 2)
        return features


@dataclass(frozen=True)
class ScatteringMap:
    """Images to features: the transform, averaged with that of the mirror image, then normalised.

    `groups` of channels are normalised record by record; None leaves the coefficients unchanged.
    With `mirror` they are ½(S x + S x̃), x̃ the image mirrored left to right: a model on them cannot
    tell the two apart. The coefficients of x̃ are not those of x in another order, because
    windows are placed from the left, so both are computed, in twice the time.
    """

    shape: tuple[int, int, int]
    order: int = 2
    mirror: bool = False
    groups: int | None = 27

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.normalised(self.coefficients(inputs))

    def coefficients(self, images: Tensor) -> Tensor:
        """S x, or ½(S x + S x̃) with the mirror image x̃."""
        transform = Scattering(self.shape, order=self.order)
        features = transform(images)
        if self.mirror:
            features.add_(transform(images.flip(-1))).div_(2)
        return features

    def normalised(self, features: Tensor) -> Tensor:
        if self.groups is None:
            return features
        groups, channels = self.groups, features.shape[1]
        # The largest number up to `groups` that divides the channels (27 of 81 and 243).
        groups = math.gcd(groups, channels) if channels % groups else groups
        return group_normalised(features, groups)

    def describe(self) -> str:
        kind = "mirrored scattering" if self.mirror else "scattering"
        return f"{kind} features of order {self.order}, groups {self.groups}, of each record alone"


def group_normalised(features: Tensor, groups: int, chunk: int = 4096) -> Tensor:
    """Each record's features with mean 0 and variance 1 in each group of channels."""
    result = torch.empty_like(features)
    for start in range(0, len(features), chunk):
        part = slice(start, start + chunk)
        result[part] = F.group_norm(features[part], groups)
    return result


def scattering_features(
    records: Records,
    *,
    groups: int | None = 27,
    order: int = 2,
    mirror: bool = False,
    cache: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
) -> Records:
    """The same records with scattering features as inputs, computed once.

    `groups`, `order` and `mirror` are those of `ScatteringMap`. Normalisation by what the records
    have in common is a release: see `tacit.data.private_scaling`. `cache` is a folder where the
    coefficients are kept, under a checksum of the images and the settings and together with a
    checksum of their own; a file that does not match is refused.
    """
    if len(records.shape) != 3:
        raise ValueError(f"records of shape {records.shape}; scattering is for images (C, H, W)")
    features_of = ScatteringMap(records.shape, order, mirror, groups)
    where = torch.device(device) if device is not None else records.device
    path = None
    if cache is not None:
        path = Path(cache) / f"{_key(records.inputs, features_of)}.npz"
    if path is not None and path.exists():
        features = _read(path).to(where)
    else:
        features = features_of.coefficients(records.inputs.to(where))
        if path is not None:
            _write(path, features)
    return replace(records.to(where), inputs=features_of.normalised(features))


def usual_size(channels: int) -> float:
    """About the norm of the mean sizes of the features' channels, for `release_channel_scaler`.

    The transform takes no energy away and adds none, so Σ_c mean_p S_cp² is about the energy of a
    pixel, and that is the number of colours where pixels have variance 1; J = 2, L = 8, order 2.
    """
    return math.sqrt(max(1, channels // 81))


def _key(images: Tensor, features_of: ScatteringMap) -> str:
    transform = Scattering(features_of.shape, order=features_of.order)
    digest = hashlib.sha256(repr(transform).encode())
    if features_of.mirror:
        digest.update(b"and its mirror image")
    digest.update(str((tuple(images.shape), images.dtype)).encode())
    digest.update(np.ascontiguousarray(images.cpu().numpy()).data)
    return digest.hexdigest()[:32]


def _write(path: Path, features: Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    array = features.cpu().numpy()
    whole = path.with_suffix(f".{os.getpid()}.part")
    with whole.open("wb") as file:
        np.savez(file, features=array, sha256=np.array(_checksum(array)))
    whole.replace(path)  # a reader sees all of it or nothing


def _read(path: Path) -> Tensor:
    with np.load(path) as held:
        array, expected = held["features"], str(held["sha256"])
    if _checksum(array) != expected:
        raise DataError(f"{path} does not match its checksum; delete it and it is made again")
    return torch.from_numpy(array)


def _checksum(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
