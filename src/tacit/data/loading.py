"""`load`: a named dataset as two `Records`, train and test."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from tacit.data.catalogue import Dataset, lookup, read_digits, registered_loader
from tacit.data.download import find
from tacit.data.file_formats import read_adbench, read_cifar, read_pair
from tacit.data.scaling import PublicScaler, RangeScaler, Scaler, as_scalers, scaled
from tacit.data.splits import fixed_split
from tacit.errors import DataError
from tacit.records import Records

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]  # inputs, targets, record ids


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
    paths = find(dataset, root=root, progress=progress) if dataset.variants else []
    train, test = _read(dataset, paths)
    _check_shapes(dataset, train, test)
    notes = (
        _size_note(dataset),
        *(scaler.describe() for scaler in scalers),
        *((unscaled,) if not scalers else ()),
    )
    return (
        _as_records(dataset, train, dataset.train_size, scalers, flatten, notes),
        _as_records(dataset, test, dataset.test_size, scalers, flatten, notes),
    )


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


def _read(dataset: Dataset, paths: list[Path]) -> tuple[Arrays, Arrays]:
    """The training and test records, as published or by the fixed public permutation."""
    if dataset.kind == "idx":
        return _numbered(read_pair(*paths[:2]), read_pair(*paths[2:]))
    if dataset.kind == "cifar":
        return _numbered(*read_cifar(paths, dataset.batch_sha1))
    inputs, targets = read_digits() if dataset.kind == "digits" else read_adbench(paths[0])
    expected = dataset.train_size + dataset.test_size
    if len(inputs) != expected:
        raise DataError(
            f"{dataset.name} has {len(inputs)} records where {expected} were published; "
            "fetch it again"
        )
    train, test = fixed_split(dataset.train_size, dataset.test_size)
    return (inputs[train], targets[train], train), (inputs[test], targets[test], test)


def _numbered(
    train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]
) -> tuple[Arrays, Arrays]:
    """Number the training records, then the test records."""
    num_train, num_test = len(train[0]), len(test[0])
    return (*train, np.arange(num_train)), (*test, np.arange(num_train, num_train + num_test))


def _check_shapes(dataset: Dataset, train: Arrays, test: Arrays) -> None:
    for (inputs, targets, _), size in ((train, dataset.train_size), (test, dataset.test_size)):
        if inputs.shape != (size, *dataset.shape) or targets.shape != (size,):
            raise DataError(
                f"{dataset.name} has inputs of shape {inputs.shape} where "
                f"{(size, *dataset.shape)} was published; fetch it again"
            )
        if size and targets.max() >= dataset.num_classes:
            raise DataError(
                f"{dataset.name} has the label {targets.max()}; its labels are "
                f"0..{dataset.num_classes - 1}. Fetch it again"
            )


def _as_records(
    dataset: Dataset,
    arrays: Arrays,
    public_size: int,
    scalers: tuple[Scaler, ...],
    flatten: bool,
    notes: tuple[str, ...],
) -> Records:
    values, targets, ids = arrays
    # An official split numbers its training records first, a permutation leaves gaps.
    gapless = np.array_equal(ids, np.arange(public_size))
    inputs = scaled(values, scalers, dataset.upper if _is_image(dataset) else 1.0)
    return Records(
        inputs.flatten(1) if flatten else inputs,
        torch.from_numpy(targets.astype(np.int64)),
        num_classes=dataset.num_classes,
        public_size=public_size,
        name=dataset.name,
        record_ids=torch.from_numpy(ids.astype(np.int64)),
        num_ids=public_size if gapless else dataset.train_size + dataset.test_size,
        notes=notes,
    )


def _is_image(dataset: Dataset) -> bool:
    return len(dataset.shape) == 3


def _choose_scalers(dataset: Dataset, scale: object) -> tuple[tuple[Scaler, ...], str]:
    """The scalers, and the sentence for the report when there are none."""
    origin = f"published with {dataset.name}"
    in_unit = _is_image(dataset) or (dataset.lower, dataset.upper) == (0, 1)
    stored = f"{dataset.lower:g}..{dataset.upper:g}"
    if _is_image(dataset):
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
    if dataset.kind in ("digits", "adbench"):
        return (
            f"{dataset.name} comes without a split: {sizes} by one fixed public permutation; "
            "its size is published"
        )
    return f"{dataset.name}: the {sizes} of the official split; these sizes are published"
