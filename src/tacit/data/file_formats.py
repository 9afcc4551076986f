"""Read the files of the named datasets: IDX, CIFAR-10's three containers, `.npz`, ADBench.

- IDX, of MNIST and Fashion-MNIST: a gzip stream of two zero bytes, a type byte (0x08 = unsigned
  byte), the number of dimensions, each dimension as a big-endian 32-bit integer, then the values in
  row-major order.
- `.npz` archives of plain arrays. Pickled arrays are refused: loading never runs code.
- ADBench's tables: `X` (n, d) and `y` (n,), where 1 is an anomaly and 0 is not.
- CIFAR-10 from `.npz` batches, the binary or the Python archive. All give images (10000, 3, 32, 32)
  and labels (10000,) per batch, as unsigned bytes. The official binary layout is, per image, one
  label byte and 3072 pixel bytes, channels first.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import pickle
import pickletools
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tacit.errors import DataError

_UNSIGNED_BYTE = 0x08


def read_idx(path: Path) -> np.ndarray:
    """The array in an IDX `.gz` file of unsigned bytes."""
    try:
        with gzip.open(path, "rb") as stream:
            content = stream.read()
    except (EOFError, zlib.error, OSError) as error:
        raise DataError(
            f"{path} is truncated or is not a gzip file ({error}); fetch it again"
        ) from error
    if len(content) < 4 or content[:3] != bytes((0, 0, _UNSIGNED_BYTE)):
        raise DataError(
            f"{path} does not start as an IDX file of unsigned bytes "
            f"(00 00 08, found {content[:3].hex(' ') or 'nothing'}); fetch it again"
        )
    num_dims = content[3]
    start = 4 + 4 * num_dims
    if len(content) < start:
        raise DataError(f"{path} ends inside its header; fetch it again")
    shape = struct.unpack(f">{num_dims}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise DataError(
            f"{path} declares {' x '.join(map(str, shape))} values and holds "
            f"{len(content) - start}; fetch it again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def read_pair(images: Path, labels: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images as (n, 1, height, width) and labels as (n,), both unsigned bytes."""
    pixels, classes = read_idx(images), read_idx(labels)
    if pixels.ndim != 3 or classes.ndim != 1 or len(pixels) != len(classes):
        raise DataError(
            f"{images} has shape {pixels.shape} and {labels} has {classes.shape}; "
            "expected (n, height, width) and (n,)"
        )
    return pixels[:, None], classes


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


def read_adbench(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Features as contiguous float32 (the files are column-major float64) and labels as int64."""
    features, labels = read_arrays(path, ("X", "y"))
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        raise DataError(
            f"{path} has X of shape {features.shape} and y of shape {labels.shape}; "
            "expected (n, d) and (n,)"
        )
    if not np.isin(labels, (0, 1)).all():
        raise DataError(f"{path} has labels other than 0 and 1; it is not an ADBench file")
    return np.ascontiguousarray(features, np.float32), labels.astype(np.int64)


Batch = tuple[np.ndarray, np.ndarray]

BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
_PIXELS = 3 * 32 * 32


def read_cifar(paths: Sequence[Path], batch_sha1: Sequence[str]) -> tuple[Batch, Batch]:
    """(train, test) from the six `.npz` files or from one official archive.

    Batches out of an archive must have the published SHA-1 of the binary batch that they decode
    to; so whichever container was read, the records are the same, to the byte.
    """
    if len(paths) == 1:
        batches = _read_archive(paths[0])
        for name, (images, labels), sha1 in zip(BATCHES, batches, batch_sha1, strict=True):
            rows = np.concatenate([labels[:, None], images.reshape(len(labels), -1)], axis=1)
            found = hashlib.sha1(rows.tobytes()).hexdigest()
            if found != sha1:
                raise DataError(
                    f"{name} of {paths[0]} does not decode to the published batch: expected sha1 "
                    f"{sha1}, found {found}; use cifar-10-binary.tar.gz instead"
                )
    else:
        with ThreadPoolExecutor(2) as pool:  # inflating releases the interpreter lock
            batches = list(pool.map(read_npz_batch, paths))
    *train, test = batches
    return (np.concatenate([x for x, _ in train]), np.concatenate([y for _, y in train])), test


def read_npz_batch(path: Path) -> Batch:
    """Undo the transform of the `.npz` files, modulo 256: sum along rows and columns, add green.

    `r` is (3, n, 32, 32): red and blue had green subtracted, then each plane was differenced.
    """
    residuals, labels = read_arrays(path, ("r", "y"))
    planes = residuals.cumsum(2, dtype=np.uint8).cumsum(3, dtype=np.uint8)
    planes[[0, 2]] += planes[1]
    return np.ascontiguousarray(planes.transpose(1, 0, 2, 3)), labels


def _read_archive(path: Path) -> list[Batch]:
    """The six batches of an official `.tar.gz`, in one pass and without unpacking to disk."""
    found: dict[str, Batch] = {}
    try:
        with tarfile.open(path, "r|gz") as archive:
            for member in archive:
                name = Path(member.name).name
                decode: Callable[[bytes, str], Batch] = _decode_pickle
                if name.endswith(".bin"):
                    name, decode = name.removesuffix(".bin"), _decode_binary
                if name in BATCHES and member.isfile():
                    stream = archive.extractfile(member)
                    assert stream is not None
                    found[name] = decode(stream.read(), f"{member.name} of {path}")
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError(
            f"{path} is truncated or is not a .tar.gz archive ({error}); fetch it again"
        ) from error
    missing = [name for name in BATCHES if name not in found]
    if missing:
        raise DataError(
            f"{path} lacks {', '.join(missing)}; use cifar-10-binary.tar.gz or "
            "cifar-10-python.tar.gz from the CIFAR-10 page"
        )
    return [found[name] for name in BATCHES]


def _decode_binary(content: bytes, origin: str) -> Batch:
    if not content or len(content) % (1 + _PIXELS):
        raise DataError(
            f"{origin} has {len(content)} bytes, not a multiple of {1 + _PIXELS}; fetch it again"
        )
    rows = np.frombuffer(content, np.uint8).reshape(-1, 1 + _PIXELS)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].copy()


def _decode_pickle(content: bytes, origin: str) -> Batch:
    """Read pixels and labels from the opcodes of a pickled batch, never executing them.

    A batch is a dictionary with 'labels', a list of small integers, and 'data', an array whose
    bytes are one string in the stream, after the flag for column-major order.
    """
    labels: list[int] = []
    pixels: bytes | None = None
    column_major = flag = in_labels = False
    try:
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name in ("NEWTRUE", "NEWFALSE"):
                flag = opcode.name == "NEWTRUE"
            elif isinstance(argument, bool):
                flag = argument
            elif isinstance(argument, int) and opcode.name in ("BININT1", "INT", "BININT"):
                if in_labels:
                    labels.append(argument)
            elif isinstance(argument, str | bytes) and opcode.name != "GLOBAL":
                in_labels = argument in ("labels", b"labels")
                if len(argument) >= _PIXELS:
                    pixels = argument.encode("latin-1") if isinstance(argument, str) else argument
                    column_major = flag
    except (ValueError, pickle.UnpicklingError) as error:
        raise DataError(f"{origin} is not a pickled CIFAR-10 batch ({error})") from error
    if pixels is None or len(pixels) != _PIXELS * len(labels) or max(labels) > 9:
        raise DataError(
            f"{origin} is not laid out as the official batch: {len(labels)} labels and "
            f"{len(pixels or b'')} pixel bytes; use cifar-10-binary.tar.gz instead"
        )
    values = np.frombuffer(pixels, np.uint8)
    rows = values.reshape(_PIXELS, -1).T if column_major else values.reshape(-1, _PIXELS)
    return np.ascontiguousarray(rows).reshape(-1, 3, 32, 32), np.array(labels, np.uint8)
