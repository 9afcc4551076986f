"""`load`: a named dataset as two `Records`, train and test.

Files are read only after `find` has compared their SHA-256 with the published one, so the readers
here trust their layout; the shapes and labels that come out are checked once, in `_checked`.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import pickletools
import struct
import tarfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from tacit.data.catalogue import BATCHES, Dataset, lookup, registered_loader
from tacit.data.download import find
from tacit.data.scaling import PublicScaler, RangeScaler, Scaler, as_scalers, scaled
from tacit.data.splits import fixed_split
from tacit.data.table_formats import read_arrays
from tacit.errors import DataError
from tacit.records import Records

Arrays = tuple[np.ndarray, np.ndarray]  # inputs, targets

_PIXELS = 3 * 32 * 32  # of an image of CIFAR-10


def load(
    name: str,
    *,
    scale: str | Scaler | list[Scaler] | tuple[Scaler, ...] | None = "public",
    flatten: bool = False,
    root: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> tuple[Records, Records]:
    """(train, test) of "digits", "mnist", "fashion-mnist", "cifar10" or "adbench/<name>".

    Other names are those of `tacit.data.register_dataset`, whose records are used as they are.

    Inputs are float32, images channels first and in [0, 1] before `scale`; targets are int64.
    `public_size` is the published size. The files come from `root` or TACIT_DATA, else from the
    user's cache, and are downloaded into the cache if they are in neither.

    scale="public" uses constants published with the dataset: the pixel mean and std of MNIST,
    Fashion-MNIST and CIFAR-10, the range of the ADBench sets that are not in [0, 1] already.
    scale=None leaves the inputs unscaled; a scaler, or a list of them, is applied as given.
    Fitting a scaler to the records is refused: see `release_statistics`.

        train, test = tacit.load("mnist")
    """
    loader = registered_loader(name)
    if loader is not None:
        train_records, test_records = loader()
        applied = public_scalers(name, scale)
        return _rescaled(train_records, applied, flatten), _rescaled(test_records, applied, flatten)
    dataset = lookup(name)
    scalers, unscaled = _choose_scalers(dataset, scale)
    notes = (_size_note(dataset), *([scaler.describe() for scaler in scalers] or [unscaled]))
    paths = find(dataset, root=root, progress=progress) if dataset.variants else []
    size, total = dataset.train_size, dataset.train_size + dataset.test_size
    if dataset.has_split:
        ids = np.arange(size), np.arange(size, total)
        parts = _read_parts(dataset, paths)
        train, test = (
            _checked(dataset, *part, len(rows)) for part, rows in zip(parts, ids, strict=True)
        )
    else:
        ids = fixed_split(size, dataset.test_size)
        inputs, targets = _checked(dataset, *_read_whole(dataset, paths), total)
        train, test = ((inputs[rows], targets[rows]) for rows in ids)

    def records(part: Arrays, rows: np.ndarray, num_ids: int) -> Records:
        inputs = scaled(part[0], scalers, dataset.upper if dataset.is_image else 1.0)
        return Records(
            inputs.flatten(1) if flatten else inputs,
            torch.from_numpy(part[1].astype(np.int64)),
            num_classes=dataset.num_classes,
            public_size=len(rows),
            name=dataset.name,
            record_ids=torch.from_numpy(rows.astype(np.int64)),
            num_ids=num_ids,
            notes=notes,
        )

    # An official split numbers its training records first, a permutation leaves gaps.
    num_train_ids = size if dataset.has_split else total
    return records(train, ids[0], num_train_ids), records(test, ids[1], total)


def public_scalers(name: str, scale: object = "public") -> tuple[Scaler, ...]:
    """The scalers that `load(name, scale=scale)` puts its inputs through, in turn."""
    if registered_loader(name) is not None:
        return () if scale == "public" else as_scalers(scale)
    return _choose_scalers(lookup(name), scale)[0]


def _rescaled(records: Records, scalers: tuple[Scaler, ...], flatten: bool) -> Records:
    """Registered records after the scalers that the caller names."""
    inputs = records.inputs
    for scaler in scalers:
        inputs = scaler(inputs)
    notes = (*records.notes, *(scaler.describe() for scaler in scalers))
    return replace(records, inputs=inputs.flatten(1) if flatten else inputs, notes=notes)


def _checked(dataset: Dataset, inputs: np.ndarray, targets: np.ndarray, published: int) -> Arrays:
    """Inputs and targets, if there are as many as were published and each has a known label."""
    if inputs.shape != (published, *dataset.shape) or targets.shape != (published,):
        raise DataError(
            f"{dataset.name} has inputs of shape {inputs.shape} where "
            f"{(published, *dataset.shape)} was published; fetch it again"
        )
    if published and targets.max() >= dataset.num_classes:
        raise DataError(
            f"{dataset.name} has the label {targets.max()}; its labels are "
            f"0..{dataset.num_classes - 1}. Fetch it again"
        )
    return inputs, targets


def _choose_scalers(dataset: Dataset, scale: object) -> tuple[tuple[Scaler, ...], str]:
    """The scalers, and the sentence for the report when there are none."""
    origin = f"published with {dataset.name}"
    in_unit = dataset.is_image or (dataset.lower, dataset.upper) == (0, 1)
    stored = f"{dataset.lower:g}..{dataset.upper:g}"
    if dataset.is_image:
        unscaled = f"pixels were divided by {dataset.upper:g}, the largest value of their format"
    elif in_unit:
        unscaled = f"inputs were not scaled: they lie in {stored} as {origin}"
    else:
        unscaled = f"inputs were not scaled: they lie in {stored} (a range {origin})"
    if scale != "public":
        return as_scalers(scale), unscaled
    if dataset.mean is not None and dataset.std is not None:
        return (PublicScaler(dataset.mean, dataset.std, origin),), unscaled
    if in_unit:
        return (), unscaled
    return (RangeScaler(dataset.lower, dataset.upper, origin=f"({stored}) {origin}"),), unscaled


def _size_note(dataset: Dataset) -> str:
    sizes = f"{dataset.train_size} training and {dataset.test_size} test records"
    if not dataset.has_split:
        return (
            f"{dataset.name} comes without a split: {sizes} by one fixed public permutation; "
            "its size is published"
        )
    return f"{dataset.name}: the {sizes} of the official split; these sizes are published"


def _read_whole(dataset: Dataset, paths: list[Path]) -> Arrays:
    """All records of a dataset that comes without a split, in their published order."""
    if dataset.kind == "adbench":  # X (n, d) and y (n,), where 1 is an anomaly
        features, labels = read_arrays(paths[0], ("X", "y"))
        # The files are column-major float64.
        return np.ascontiguousarray(features, np.float32), labels.astype(np.int64)
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return bunch.images[:, None].astype(np.float32), bunch.target.astype(np.int64)


def _read_parts(dataset: Dataset, paths: list[Path]) -> tuple[Arrays, Arrays]:
    """The training and the test records of an official split, as unsigned bytes."""
    if dataset.kind == "cifar":
        return read_cifar(paths, dataset.batch_sha1)
    images, labels, test_images, test_labels = map(read_idx, paths)
    return (images[:, None], labels), (test_images[:, None], test_labels)


def read_idx(path: Path) -> np.ndarray:
    """The array in an IDX `.gz` file of unsigned bytes, as MNIST and Fashion-MNIST have them.

    A gzip stream of two zero bytes, a type byte, the number of dimensions, each dimension as a
    big-endian 32-bit integer, then the values in row-major order.
    """
    with gzip.open(path, "rb") as stream:
        content = stream.read()
    num_dims = content[3]
    start = 4 + 4 * num_dims
    shape = struct.unpack(f">{num_dims}I", content[4:start])
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def read_cifar(paths: Sequence[Path], batch_sha1: Sequence[str]) -> tuple[Arrays, Arrays]:
    """(train, test) from the six `.npz` files or from one official archive.

    Images are (n, 3, 32, 32) and labels (n,). Batches out of an archive must have the published
    SHA-1 of the binary batch that they decode to; so whichever container was read, the records are
    the same, to the byte.
    """
    if len(paths) == 1:
        batches = _read_archive(paths[0])
        for name, (images, labels), sha1 in zip(BATCHES, batches, batch_sha1, strict=True):
            rows = np.concatenate([labels[:, None], images.reshape(len(labels), -1)], axis=1)
            decoded = hashlib.sha1(rows.tobytes()).hexdigest()
            if decoded != sha1:
                raise DataError(
                    f"{name} of {paths[0]} does not decode to the published batch: expected sha1 "
                    f"{sha1}, found {decoded}; use cifar-10-binary.tar.gz instead"
                )
    else:
        with ThreadPoolExecutor(2) as pool:  # inflating releases the interpreter lock
            batches = list(pool.map(read_npz_batch, paths))
    *train, test = batches
    return (np.concatenate([x for x, _ in train]), np.concatenate([y for _, y in train])), test


def read_npz_batch(path: Path) -> Arrays:
    """Undo the transform of the `.npz` files, modulo 256: sum along rows and columns, add green.

    `r` is (3, n, 32, 32): red and blue had green subtracted, then each plane was differenced.
    """
    residuals, labels = read_arrays(path, ("r", "y"))
    planes = residuals.cumsum(2, dtype=np.uint8).cumsum(3, dtype=np.uint8)
    planes[[0, 2]] += planes[1]
    return np.ascontiguousarray(planes.transpose(1, 0, 2, 3)), labels


def _read_archive(path: Path) -> list[Arrays]:
    """The six batches of an official `.tar.gz`, in one pass and without unpacking to disk."""
    batches: dict[str, Arrays] = {}
    with tarfile.open(path, "r|gz") as archive:
        for member in archive:
            name = Path(member.name).name
            batch = name.removesuffix(".bin")
            if batch in BATCHES and (stream := archive.extractfile(member)):
                decode = _decode_pickle if name == batch else _decode_binary
                batches[batch] = decode(stream.read())
    return [batches[name] for name in BATCHES]


def _decode_binary(content: bytes) -> Arrays:
    """Of each image one label byte, then 3072 pixel bytes, channels first."""
    rows = np.frombuffer(content, np.uint8).reshape(-1, 1 + _PIXELS)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].copy()


def _decode_pickle(content: bytes) -> Arrays:
    """Read pixels and labels from the opcodes of a pickled batch, never executing them.

    A batch is a dictionary with 'labels', a list of small integers, and 'data', an array whose
    bytes are one string in the stream, after the flag for column-major order.
    """
    labels: list[int] = []
    pixels = b""
    column_major = flag = in_labels = False
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
    if not pixels or len(pixels) != _PIXELS * len(labels):
        raise DataError(
            f"a batch is not laid out as the official one: {len(labels)} labels and "
            f"{len(pixels)} pixel bytes; use cifar-10-binary.tar.gz instead"
        )
    values = np.frombuffer(pixels, np.uint8)
    rows = values.reshape(_PIXELS, -1).T if column_major else values.reshape(-1, _PIXELS)
    return np.ascontiguousarray(rows).reshape(-1, 3, 32, 32), np.array(labels, np.uint8)
