"""Where a dataset's files are, and how one is downloaded: complete and checked, or not at all.

`find` looks in TACIT_DATA and in the user's cache, verifies each file once per process, and
downloads into the cache what neither has.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tacit.data.catalogue import DataFile, Dataset
from tacit.errors import DataError

_CHUNK = 1 << 18
_verified: set[tuple[str, int, int, str]] = set()  # path, size, time of change, checksum


def verified(path: Path, expected: DataFile) -> Path:
    """`path`, if it has the size and the SHA-256 of `expected`; a `DataError` otherwise.

    A file that changes afterwards (its size or its modification time) is checked again.
    """
    remedy = "put the published file there, or remove it and load again to fetch a fresh one"
    try:
        stat = path.stat()
        key = (str(path), stat.st_size, stat.st_mtime_ns, expected.sha256)
        if key in _verified:
            return path
        with path.open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}; {remedy}") from error
    if sha256 != expected.sha256:
        if stat.st_size < expected.size:
            what = f"is truncated: {stat.st_size} bytes of {expected.size}"
        else:
            what = f"is not the published file ({stat.st_size} bytes, published {expected.size})"
        raise DataError(
            f"{path} {what}; expected sha256 {expected.sha256}, found {sha256}; {remedy}"
        )
    _verified.add(key)
    return path


class _WrongFile(Exception):
    """An address served something else than the published file."""


def download(
    file: DataFile, folder: Path, *, timeout: float = 30.0, progress: bool | None = None
) -> Path:
    """Download `file` into `folder` from the first of its addresses that serves it.

    Nothing is written before all bytes have arrived and have the published SHA-256, and then they
    replace the target at once. Whatever happens, and whoever else downloads the same file, the
    target is absent or whole.

    `timeout` bounds each wait on the network. `progress` shows a bar; None: on a terminal only.
    """
    target = folder / file.name
    failures = []
    for url in file.urls:
        try:
            content = _fetch(url, file, timeout, progress)
        except (OSError, http.client.HTTPException, _WrongFile) as error:
            failures.append(f"{url}: {_reason(error, timeout)}")
            continue
        try:
            with whole_file(target) as draft, draft.open("wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise DataError(
                f"cannot write {target}: {error.strerror or error}; "
                "free some space, or set TACIT_CACHE to a folder that can be written"
            ) from error
        return target
    raise DataError(
        f"could not download {file.name}: "
        + ("; ".join(failures) or "it has no public address")
        + f". Nothing was kept. Try again later, or place the file at {target}, "
        "or set TACIT_DATA to a folder that has it"
    )


def _fetch(url: str, file: DataFile, timeout: float, progress: bool | None) -> bytearray:
    headers = {"User-Agent": "tacit", "Accept-Encoding": "identity"}
    request = urllib.request.Request(url, headers=headers)
    response: Any = urllib.request.urlopen(request, timeout=timeout)
    if sys.stderr.isatty() if progress is None else progress:
        from rich.console import Console
        from rich.progress import wrap_file

        console = Console(stderr=True)
        response = wrap_file(response, file.size, description=file.name, console=console)
    content = bytearray()
    with response as stream:
        # At most one byte more than was published, which tells that the file is longer.
        while chunk := stream.read(min(_CHUNK, file.size + 1 - len(content))):
            content += chunk
    if len(content) > file.size:
        raise _WrongFile(f"the server sent more than the published {file.size} bytes")
    if len(content) < file.size:
        raise _WrongFile(f"truncated: {len(content)} bytes of {file.size}")
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != file.sha256:
        raise _WrongFile(f"expected sha256 {file.sha256}, found {sha256}")
    return content


def _reason(error: Exception, timeout: float) -> str:
    if isinstance(error, urllib.error.HTTPError):
        error.close()
        return f"the server answered {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return f"unreachable ({error.reason})"
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout:g} s"
    if isinstance(error, _WrongFile):
        return str(error)
    return f"the connection broke ({type(error).__name__}: {error})"


@contextlib.contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """A path to write to, whose file then replaces `target`: a reader sees all of it or nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        draft = Path(folder) / target.name
        yield draft
        os.replace(draft, target)


def cache_folder() -> Path:
    """$TACIT_CACHE, or $XDG_CACHE_HOME/tacit, or ~/.cache/tacit."""
    if own := os.environ.get("TACIT_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "tacit"
    return Path.home() / ".cache" / "tacit"


def find(
    dataset: Dataset,
    *,
    root: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> list[Path]:
    """The verified files of one variant of `dataset`, in the catalogue's order.

    They are looked for in `root` or TACIT_DATA, then in the cache. A folder is used when it has all
    the files of a variant; the first such folder wins, and a file there that is not the published
    one is an error, never passed over in silence.
    """
    cache = cache_folder() / dataset.folder
    folders = {"the cache": cache}
    if own := os.environ.get("TACIT_DATA") if root is None else root:
        name = "TACIT_DATA" if root is None else "root"
        folders = {name: Path(own).expanduser() / dataset.folder} | folders
    missing = {}
    for name, folder in folders.items():
        lacks = [
            [file.name for file in variant if not (folder / file.name).is_file()]
            for variant in dataset.variants
        ]
        if [] in lacks:
            variant = dataset.variants[lacks.index([])]
            return [verified(folder / file.name, file) for file in variant]
        missing[f"{folder} ({name})"] = min(lacks, key=len)
    absent = f"{dataset.name} was not found: " + "; ".join(
        f"{place} lacks {', '.join(names)}" for place, names in missing.items()
    )
    variant = next((v for v in dataset.variants if all(file.urls for file in v)), ())
    if not variant:
        raise DataError(f"{absent}, and it has no public address to fetch")
    if os.environ.get("TACIT_OFFLINE", "") not in ("", "0"):
        raise DataError(
            f"{absent}, and TACIT_OFFLINE forbids the download; unset it, "
            f"or set TACIT_DATA to a folder with {dataset.folder}/{variant[0].name}"
        )
    for file in variant:
        if not (cache / file.name).is_file():
            download(file, cache, progress=progress)
    return [verified(cache / file.name, file) for file in variant]
