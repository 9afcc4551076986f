"""What `tacit train` gives its network: the records as they are, or scattering features."""

from __future__ import annotations

import enum

import torch
import typer

from tacit.data.download import cache_folder
from tacit.data.scattering import ScatteringMap, scattering_features
from tacit.records import Records

SCATTERING_NOTE = (
    "inputs are scattering features, normalised in groups of channels, of each record alone: free"
)
RAW_NOTE = "inputs are scattering features of each record alone, standardised channel by channel"
MIRRORED_NOTE = "an image and its mirror image have the same features: the mean of theirs"


GROUPS = 27


class FeaturesName(enum.StrEnum):
    AS_THEY_ARE = "as-they-are"
    SCATTERING = "scattering"
    MIRRORED = "mirrored-scattering"

    @property
    def of_scattering(self) -> bool:
        return self is not FeaturesName.AS_THEY_ARE


FEATURES: FeaturesName = typer.Option(
    FeaturesName.AS_THEY_ARE, help="Fixed features of images, computed once and kept in the cache."
)


def feature_note(name: FeaturesName, standardised: bool) -> list[str]:
    if not name.of_scattering:
        return []
    mirrored = [MIRRORED_NOTE] if name is FeaturesName.MIRRORED else []
    return [RAW_NOTE if standardised else SCATTERING_NOTE, *mirrored]


def feature_stages(
    name: FeaturesName, shape: tuple[int, ...], standardised: bool
) -> tuple[ScatteringMap, ...]:
    """What `with_features` does to images of this shape, to be kept with the run."""
    if not name.of_scattering:
        return ()
    channels, height, width = shape
    mirror = name is FeaturesName.MIRRORED
    groups = None if standardised else GROUPS
    return (ScatteringMap((channels, height, width), mirror=mirror, groups=groups),)


def with_features(
    name: FeaturesName, train: Records, test: Records, device: torch.device, standardised: bool
) -> tuple[Records, Records]:
    """Both sides as the network is given them, or as they are standardised later."""
    if not name.of_scattering:
        return train, test
    where, groups = cache_folder() / "scattering", None if standardised else GROUPS
    found = [
        scattering_features(
            side, groups=groups, mirror=name is FeaturesName.MIRRORED, cache=where, device=device
        )
        for side in (train, test)
    ]
    return found[0], found[1]
