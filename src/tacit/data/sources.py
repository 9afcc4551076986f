"""Where a dataset's files are: TACIT_DATA, the user's cache, or their public address."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tacit.data.catalogue import DataFile, Dataset
from tacit.data.checksum import verify
from tacit.data.download import download
from tacit.errors import DataError


@dataclass(frozen=True)
class Place:
    """A folder of datasets (`mnist/`, `cifar10/`, ...), and what to do about a bad file there."""

    root: Path
    called: str
    remedy: str


def cache_folder() -> Path:
    """$TACIT_CACHE, or $XDG_CACHE_HOME/tacit, or ~/.cache/tacit."""
    if own := os.environ.get("TACIT_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "tacit"
    return Path.home() / ".cache" / "tacit"


def places(root: str | os.PathLike[str] | None = None) -> list[Place]:
    """Where to look, in order. `root`, when given, stands in for TACIT_DATA."""
    found = []
    replace = "put the published file there, or remove it and load again to fetch a fresh one"
    if root is not None:
        found.append(Place(Path(root).expanduser(), "root", replace))
    elif named := os.environ.get("TACIT_DATA"):
        found.append(Place(Path(named).expanduser(), "TACIT_DATA", replace))
    remove = "remove it and load again to fetch a fresh one"
    found.append(Place(cache_folder(), "the cache", remove))
    return found


def find(
    dataset: Dataset,
    *,
    root: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> list[Path]:
    """The verified files of one variant of `dataset`, in the catalogue's order.

    A place is used when it has all the files of a variant; the first such place wins, and a
    file there that is not the published one is an error, never passed over in silence.
    """
    looked = places(root)
    for place in looked:
        folder = place.root / dataset.folder
        for variant in dataset.variants:
            paths = [folder / file.name for file in variant]
            if all(path.is_file() for path in paths):
                for path, file in zip(paths, variant, strict=True):
                    verify(path, file, place.remedy)
                return paths
    return _download_all(dataset, looked, progress)


def _download_all(dataset: Dataset, looked: list[Place], progress: bool | None) -> list[Path]:
    variant = next((v for v in dataset.variants if all(file.urls for file in v)), None)
    if variant is None:
        raise DataError(f"{_not_found(dataset, looked)}, and it has no public address to fetch")
    if os.environ.get("TACIT_OFFLINE", "") not in ("", "0"):
        raise DataError(
            f"{_not_found(dataset, looked)}, and TACIT_OFFLINE forbids the download; unset it, "
            f"or set TACIT_DATA to a folder with {dataset.folder}/{variant[0].name}"
        )
    cache = looked[-1]
    folder = cache.root / dataset.folder
    paths = []
    for file in variant:
        path = folder / file.name
        if path.is_file():
            verify(path, file, cache.remedy)
        else:
            download(file, folder, progress=progress)
        paths.append(path)
    return paths


def _not_found(dataset: Dataset, looked: list[Place]) -> str:
    """Which files are missing where, for the variant that each place is nearest to having."""
    reasons = []
    for place in looked:
        folder = place.root / dataset.folder
        missing = min((_missing(variant, folder) for variant in dataset.variants), key=len)
        reasons.append(f"{folder} ({place.called}) lacks {', '.join(missing)}")
    return f"{dataset.name} was not found: " + "; ".join(reasons)


def _missing(variant: tuple[DataFile, ...], folder: Path) -> list[str]:
    return [file.name for file in variant if not (folder / file.name).is_file()]
