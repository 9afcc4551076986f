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
from torch import Tensor, nn

from tacit.data.download import whole_file
from tacit.data.scaling import in_chunks
from tacit.data.table_formats import read_arrays
from tacit.records import Records

_SCALES, _ANGLES = 2, 8  # J and L


@dataclass(frozen=True)
class ScatteringMap:
    """Images (B, C, H, W) to features (B, C·K, H/4, W/4), averaged with the mirror image's.

    `shape` is that of one image, and `order` is 2, or 1 to leave the second-order coefficients out.
    With `mirror` the coefficients are ½(S x + S x̃), x̃ the image mirrored left to right: a model on
    them cannot tell the two apart. The coefficients of x̃ are not those of x in another order,
    because windows are placed from the left, so both are computed, in twice the time. `groups` of
    channels are then normalised record by record; None leaves the coefficients unchanged.
    """

    shape: tuple[int, int, int]
    order: int = 2
    mirror: bool = False
    groups: int | None = 27

    def __post_init__(self) -> None:
        if self.order not in (1, 2):
            raise ValueError(f"order is {self.order}; give 1 or 2")

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.normalised(self.coefficients(inputs))

    def coefficients(self, images: Tensor, transform: nn.Module | None = None) -> Tensor:
        """S x, or ½(S x + S x̃) with the mirror image x̃; on the images' device.

        `transform` is that of `transform()`, if it was made before.
        """
        if tuple(images.shape[1:]) != self.shape:
            raise ValueError(f"images of shape {tuple(images.shape[1:])}, expected {self.shape}")
        transform = self.transform().to(images.device) if transform is None else transform

        def scattered(part: Tensor) -> Tensor:
            found: Tensor = transform(part.contiguous()).flatten(1, 2)
            return found

        if images.shape[0] == 0:  # an FFT takes no empty batch
            return scattered(images.new_zeros(1, *self.shape))[:0]
        features = in_chunks(scattered, images, 2048)
        if self.mirror:
            features.add_(in_chunks(scattered, images.flip(-1), 2048)).div_(2)
        return features

    def transform(self) -> nn.Module:
        """S alone, images (B, C, H, W) to (B, C, K, H/4, W/4)."""
        # The package's own `kymatio.torch` also imports 3-d code that a current SciPy breaks.
        from kymatio.scattering2d.frontend.torch_frontend import ScatteringTorch2D

        made: nn.Module = ScatteringTorch2D(
            J=_SCALES, shape=self.shape[1:], L=_ANGLES, max_order=self.order
        )
        return made

    def normalised(self, features: Tensor) -> Tensor:
        """Each record's features with mean 0 and variance 1 in each group of channels."""
        if self.groups is None:
            return features
        groups, channels = self.groups, features.shape[1]
        # The largest number up to `groups` that divides the channels (27 of 81 and 243).
        groups = math.gcd(groups, channels) if channels % groups else groups
        return in_chunks(lambda part: F.group_norm(part, groups), features)

    def describe(self) -> str:
        kind = "mirrored scattering" if self.mirror else "scattering"
        return f"{kind} features of order {self.order}, groups {self.groups}, of each record alone"


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
    coefficients are kept, under a checksum of the images and the settings.
    """
    if len(records.shape) != 3:
        raise ValueError(f"records of shape {records.shape}; scattering is for images (C, H, W)")
    features_of = ScatteringMap(records.shape, order, mirror, groups)
    records = records if device is None else records.to(device)
    path = None if cache is None else Path(cache) / f"{_key(records.inputs, order, mirror)}.npz"
    if path is not None and path.exists():
        features = torch.from_numpy(read_arrays(path, ["features"])[0]).to(records.device)
    else:
        features = features_of.coefficients(records.inputs)
        if path is not None:
            with whole_file(path) as draft:
                np.savez(draft, features=features.cpu().numpy())
    return replace(records, inputs=features_of.normalised(features))


def usual_size(channels: int) -> float:
    """About the norm of the mean sizes of the features' channels, for `release_channel_scaler`.

    The transform takes no energy away and adds none, so Σ_c mean_p S_cp² is about the energy of a
    pixel, and that is the number of colours where pixels have variance 1; J = 2, L = 8, order 2.
    """
    return math.sqrt(max(1, channels // 81))


def _key(images: Tensor, order: int, mirror: bool) -> str:
    settings = (_SCALES, _ANGLES, order, mirror, tuple(images.shape), images.dtype)
    digest = hashlib.sha256(repr(settings).encode())
    digest.update(np.ascontiguousarray(images.cpu().numpy()).data)
    return digest.hexdigest()[:32]
