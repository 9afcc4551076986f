"""Is a file what it should be? Checked once per file and process."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tacit.data.catalogue import DataFile
from tacit.errors import DataError

_verified: set[tuple[str, int, int, str]] = set()


def verify(path: Path, expected: DataFile, remedy: str) -> None:
    """Raise a `DataError` unless `path` has the size and the SHA-256 of `expected`.

    A file that changes afterwards (its size or its modification time) is checked again.
    """
    try:
        stat = path.stat()
        key = (str(path), stat.st_size, stat.st_mtime_ns, expected.sha256)
        if key in _verified:
            return
        with path.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}; {remedy}") from error
    if found != expected.sha256:
        if stat.st_size < expected.size:
            what = f"is truncated: {stat.st_size} bytes of {expected.size}"
        else:
            what = f"is not the published file ({stat.st_size} bytes, published {expected.size})"
        raise DataError(
            f"{path} {what}; expected sha256 {expected.sha256}, found {found}; {remedy}"
        )
    _verified.add(key)
