"""What `tacit train` gives its network: the records as they are, or scattering features."""

from __future__ import annotations

import enum

import torch
import typer

from tacit.data import Records
from tacit.data.scattering import scattering_features
from tacit.data.sources import cache_folder

SCATTERING_NOTE = (
    "inputs are scattering features, normalised in groups of channels, of each record alone: free"
)


class FeaturesName(enum.StrEnum):
    AS_THEY_ARE = "as-they-are"
    SCATTERING = "scattering"


FEATURES: FeaturesName = typer.Option(
    FeaturesName.AS_THEY_ARE, help="Fixed features of images, computed once and kept in the cache."
)


def check_features(name: FeaturesName, scale_noise: float | None) -> None:
    if name is FeaturesName.SCATTERING and scale_noise is not None:
        raise ValueError(
            f"--scale-noise is {scale_noise:g} and --features is scattering, which are normalised "
            "record by record already; leave one of them out"
        )


def with_features(
    name: FeaturesName, train: Records, test: Records, device: torch.device
) -> tuple[Records, Records]:
    """Both sides as the network is given them."""
    if name is FeaturesName.AS_THEY_ARE:
        return train, test
    where = cache_folder() / "scattering"
    found = [scattering_features(side, cache=where, device=device) for side in (train, test)]
    return found[0], found[1]
