"""Where a dataset's files are, and how one is downloaded: complete and checked, or not at all.

`find` looks in TACIT_DATA and in the user's cache, verifies what it finds once per file and
process, and downloads into the cache what neither has.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import secrets
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tacit.data.catalogue import DataFile, Dataset
from tacit.errors import DataError

_CHUNK = 1 << 18
_STALE_SECONDS = 24 * 3600
_verified: set[tuple[str, int, int, str]] = set()  # path, size, time of change, checksum


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


class _AddressError(Exception):
    """One address did not serve the file; another may."""


def download(
    file: DataFile, folder: Path, *, timeout: float = 30.0, progress: bool | None = None
) -> Path:
    """Download `file` into `folder` from the first of its addresses that serves it.

    The bytes go to a temporary file beside the target, which is renamed onto the target only if
    size and SHA-256 are the published ones. Whatever happens, the target is absent or whole. Two
    processes may download the same file at once: each has its own temporary file, and the later
    rename replaces a file with an equal one.

    `timeout` bounds each wait on the network. `progress` shows a bar; None: on a terminal only.
    """
    target = folder / file.name
    failures = []
    for url in file.urls:
        try:
            _fetch(url, file, target, timeout, progress)
            return target
        except _AddressError as failure:
            failures.append(f"{url}: {failure}")
    raise DataError(
        f"could not download {file.name}: "
        + ("; ".join(failures) or "it has no public address")
        + f". Nothing was kept. Try again later, or place the file at {target}, "
        "or set TACIT_DATA to a folder that has it"
    )


def _fetch(url: str, file: DataFile, target: Path, timeout: float, progress: bool | None) -> None:
    with contextlib.closing(_open(url, timeout)) as response:
        offered = response.headers.get("Content-Length")
        if offered is not None and offered != str(file.size):
            raise _AddressError(
                f"the server offers {offered} bytes where the published file has {file.size}"
            )
        try:
            with _temporary_beside(target) as part:
                _write(_chunks(response, timeout), file, part, progress)
                os.replace(part, target)
                _flush_folder(target.parent)
        except OSError as error:
            raise DataError(
                f"cannot write {target}: {error.strerror or error}; "
                "free some space, or set TACIT_CACHE to a folder that can be written"
            ) from error


def _open(url: str, timeout: float) -> http.client.HTTPResponse:
    headers = {"User-Agent": "tacit", "Accept-Encoding": "identity"}
    with _network_errors(timeout):
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout)


def _chunks(response: http.client.HTTPResponse, timeout: float) -> Iterator[bytes]:
    while True:
        with _network_errors(timeout):
            chunk = response.read(_CHUNK)
        if not chunk:
            return
        yield chunk


@contextlib.contextmanager
def _network_errors(timeout: float) -> Iterator[None]:
    try:
        yield
    except urllib.error.HTTPError as error:
        error.close()
        raise _AddressError(f"the server answered {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise _AddressError(f"unreachable ({error.reason})") from error
    except TimeoutError as error:
        raise _AddressError(f"no answer within {timeout:g} s") from error
    except (OSError, http.client.HTTPException) as error:
        raise _AddressError(f"the connection broke ({type(error).__name__}: {error})") from error


def _write(chunks: Iterator[bytes], file: DataFile, part: Path, progress: bool | None) -> None:
    digest, received = hashlib.sha256(), 0
    with part.open("xb") as stream, _bar(file, progress) as advance:
        for chunk in chunks:
            received += len(chunk)
            if received > file.size:
                raise _AddressError(f"the server sent more than the published {file.size} bytes")
            digest.update(chunk)
            stream.write(chunk)
            advance(len(chunk))
        if received < file.size:
            raise _AddressError(f"truncated: {received} bytes of {file.size}")
        if digest.hexdigest() != file.sha256:
            raise _AddressError(f"expected sha256 {file.sha256}, found {digest.hexdigest()}")
        stream.flush()
        os.fsync(stream.fileno())


@contextlib.contextmanager
def _temporary_beside(target: Path) -> Iterator[Path]:
    """A fresh path in the target's folder that is gone afterwards, even on Ctrl-C."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target)
    part = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)


def _sweep(target: Path) -> None:
    """Remove what a killed process left behind; a live download touches its file all the time."""
    for old in target.parent.glob(f".{target.name}.*.part"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > _STALE_SECONDS:
                old.unlink()


def _flush_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every system can open a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _bar(file: DataFile, progress: bool | None) -> Iterator[Callable[[int], None]]:
    if not (sys.stderr.isatty() if progress is None else progress):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(file.name), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(file.name, total=file.size)
        yield lambda count: bars.advance(task, count)


@dataclass(frozen=True)
class Place:
    """A folder of datasets (`mnist/`, `cifar10/`, ...), and what to do about a bad file there."""

    root: Path
    name: str
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
    given = root if root is not None else os.environ.get("TACIT_DATA")
    found = []
    if given:
        replace = "put the published file there, or remove it and load again to fetch a fresh one"
        name = "TACIT_DATA" if root is None else "root"
        found.append(Place(Path(given).expanduser(), name, replace))
    remove = "remove it and load again to fetch a fresh one"
    return [*found, Place(cache_folder(), "the cache", remove)]


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
        lacks: list[list[str]] = [
            [file.name for file in variant if not (folder / file.name).is_file()]
            for variant in dataset.variants
        ]
        missing = min(lacks, key=len)
        reasons.append(f"{folder} ({place.name}) lacks {', '.join(missing)}")
    return f"{dataset.name} was not found: " + "; ".join(reasons)
