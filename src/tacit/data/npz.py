"""Read `.npz` archives of plain arrays. Loading one never runs code: pickled arrays are refused."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tacit.errors import DataError


def array_names(path: Path) -> tuple[str, ...]:
    """The names of the arrays in the archive."""
    with _open(path) as archive:
        return tuple(archive.files)


def read_arrays(path: Path, names: Sequence[str]) -> list[np.ndarray]:
    """The named arrays, in that order."""
    with _open(path) as archive:
        for name in names:
            if name not in archive.files:
                raise DataError(
                    f"{path} has no array {name!r}; it has {', '.join(archive.files) or 'none'}"
                )
        return [_read(archive, path, name) for name in names]


def _open(path: Path) -> np.lib.npyio.NpzFile:
    try:
        archive = np.load(path, allow_pickle=False)
    except FileNotFoundError as error:
        raise DataError(f"there is no file {path}; check the path") from error
    except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{path} is truncated or is not an .npz archive ({error}); "
            "write it with numpy.savez or numpy.savez_compressed"
        ) from error
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise DataError(f"{path} holds a single array, not an .npz archive; use numpy.savez")
    return archive


def _read(archive: np.lib.npyio.NpzFile, path: Path, name: str) -> np.ndarray:
    try:
        return archive[name]
    except ValueError as error:
        if "pickle" in str(error).lower():
            raise DataError(
                f"array {name!r} of {path} holds Python objects, and reading them could run code; "
                "save numbers or strings of a fixed width instead"
            ) from error
        raise DataError(f"array {name!r} of {path} cannot be read: {error}") from error
    except (EOFError, OSError, zlib.error, zipfile.BadZipFile, NotImplementedError) as error:
        raise DataError(f"array {name!r} of {path} is damaged ({error})") from error
