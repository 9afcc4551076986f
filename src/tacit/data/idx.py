"""Read the IDX format of MNIST and Fashion-MNIST.

A gzip stream of: two zero bytes, a type byte (0x08 = unsigned byte), the number of dimensions,
each dimension as a big-endian 32-bit integer, then the values in row-major order.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
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
