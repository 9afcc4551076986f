"""Fetch one file: complete and with the right checksum, or not at all."""

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
from pathlib import Path

from tacit.data.catalogue import DataFile
from tacit.errors import DataError

_CHUNK = 1 << 18
_STALE_SECONDS = 24 * 3600


class _AddressError(Exception):
    """One address did not serve the file; another may."""


def download(
    file: DataFile, folder: Path, *, timeout: float = 30.0, progress: bool | None = None
) -> Path:
    """Fetch `file` into `folder` from the first of its addresses that serves it.

    The bytes go to a temporary file beside the target, are counted and hashed on the way, and
    are renamed onto the target only when size and SHA-256 are the published ones. Whatever
    happens, the target is absent or whole. Two processes may fetch the same file at once: each
    has its own temporary file, and the later rename replaces a file with an equal one.

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
        _check_offer(response.headers.get("Content-Length"), file)
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


def _check_offer(content_length: str | None, file: DataFile) -> None:
    if content_length is not None and content_length != str(file.size):
        raise _AddressError(
            f"the server offers {content_length} bytes where the published file has {file.size}"
        )


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
