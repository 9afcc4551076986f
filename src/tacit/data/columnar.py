"""Arrow and Parquet files that may be larger than memory, as lazily read `Records`.

Such a file is compressed in groups of many rows, and a Poisson sample needs single rows from all
over. So the file is written out once, batch by batch, into one flat file per tensor, in which a
row is one contiguous piece; these are memory-mapped from then on.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tacit.data.download import cache_folder
from tacit.data.table_cells import no_column
from tacit.errors import DataError, shown
from tacit.records import Records

_FORMAT = 1  # of the cache; part of its key
_BATCH = 4096  # rows at a time
_SUFFIXES = (".parquet", ".arrow", ".feather")


def open_file(
    path: str | os.PathLike[str],
    target: str | None = None,
    *,
    columns: Sequence[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    prefetch: int = 2,
    **declared: Any,
) -> Records:
    """Records of a Parquet or Arrow file of any size, read when they are needed.

    The columns hold numbers, or lists of numbers of one length. Columns of single numbers together
    are one float32 matrix, whose `feature_names` are theirs; a column of lists is a tensor of its
    own. If there is just one of these it is the input; otherwise the inputs are a dict, with the
    matrix under "features". Empty cells and text are refused.

    The first call copies the columns, uncompressed, into the folder `cache` (by default Tacit's own
    cache), readable by this user alone; later calls find them there, as long as the file has its
    size and its time of change. The copy is as private as the file: delete it with the file.

    Args:
        target: the column that holds the targets.
        columns: the columns to read as inputs, by default all others.
        prefetch: see `Records.lazy`.
        declared: what is public, as in `Records`: `public_size`, `num_classes` and so on.

    Example:
        >>> train = tacit.data.open_file("train.parquet", "label", public_size=10_000_000)
    """
    file = Path(path)
    if file.suffix.lower() not in _SUFFIXES:
        raise DataError(
            f"{file} ends in {file.suffix or 'no suffix'}; give a file that ends in "
            f"{', '.join(_SUFFIXES)}"
        )
    if not file.is_file():
        raise DataError(f"there is no file {file}; check the path")
    with _explained(file):
        reader = _Reader(file)
        inputs = reader.inputs(target, columns)
        about = file.stat()
        key = [_FORMAT, str(file.resolve()), about.st_size, about.st_mtime_ns, inputs, target]
        digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=16).hexdigest()
        parent = Path(cache_folder() / "columns" if cache is None else cache)
        folder = parent / f"{file.stem}-{digest}"
        if not folder.is_dir():
            _copy(reader, inputs, target, folder)
    index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
    tensors: dict[str, Any] = {
        name: np.memmap(folder / f"{place}.bin", dtype, "r", shape=tuple(shape))
        for place, (name, dtype, shape) in enumerate(index)
    }
    targets = () if target is None else tensors.pop(target)
    if [*tensors] == [_FEATURES]:
        declared.setdefault("feature_names", tuple(inputs))
    declared.setdefault("name", file.stem)
    (only, *others) = tensors.values()
    return Records.lazy((tensors if others else only, targets), prefetch=prefetch, **declared)


_INDEX, _FEATURES = "index.json", "features"


class _Reader:
    """The columns of a file, batch by batch, as arrays."""

    def __init__(self, file: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        self.file = file
        self._parquet: Any = None
        if file.suffix.lower() == ".parquet":
            self._parquet = pyarrow.parquet.ParquetFile(file)
            self.schema: Any = self._parquet.schema_arrow
        else:
            with self._arrow() as opened:
                self.schema = opened.schema

    def inputs(self, target: str | None, columns: Sequence[str] | None) -> list[str]:
        """The names of the input columns; DataError for one that is not there."""
        if target is not None and not isinstance(target, str):
            raise DataError(f"target is {shown(target)}; give the name of a column")
        names = list(self.schema.names)
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise DataError(f"{self.file} has two columns named {doubled[0]!r}; rename one")
        chosen = [n for n in names if n != target] if columns is None else list(columns)
        if not all(isinstance(name, str) for name in chosen):
            raise DataError(f"columns is {shown(columns)}; give the names of the input columns")
        for name in (*chosen, *([] if target is None else [target])):
            if name not in names:
                raise no_column(self.file, name, names)
        if not chosen or target in chosen:
            raise DataError("columns names no input, or the target; give the input columns")
        return chosen

    def is_number(self, name: str) -> bool:
        return not _is_list(self.schema.field(name).type)

    def batches(self, names: list[str]) -> Iterator[dict[str, np.ndarray]]:
        if self._parquet is not None:
            yield from map(self._arrays, self._parquet.iter_batches(_BATCH, columns=names))
            return
        with self._arrow() as opened:
            places = getattr(opened, "num_record_batches", None)
            found = iter(opened) if places is None else map(opened.get_batch, range(places))
            for batch in found:
                yield self._arrays(batch.select(names))

    def _arrow(self) -> Any:
        """The reader of an Arrow file, in the format of files or of streams."""
        import pyarrow

        mapped = pyarrow.memory_map(str(self.file))
        try:
            return pyarrow.ipc.open_file(mapped)
        except pyarrow.ArrowInvalid:  # not a file; `datasets` writes streams
            mapped.seek(0)
            return pyarrow.ipc.open_stream(mapped)

    def _arrays(self, batch: Any) -> dict[str, np.ndarray]:
        return {
            name: _array(column, f"column {name!r} of {self.file}")
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        }


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _array(column: Any, where: str) -> np.ndarray:
    """(rows, ...): numbers as they are, and lists of equal lengths with a dimension each."""
    import pyarrow.compute

    if column.null_count:
        raise DataError(f"{where} has an empty cell; fill it in or drop the record")
    if _is_list(column.type):
        lengths = pyarrow.compute.list_value_length(column).unique().to_pylist()
        if len(lengths) > 1:
            raise DataError(
                f"{where} has lists of different lengths; pad them to one, and add a column that "
                "holds the mask"
            )
        values = _array(column.flatten(), where)
        return values.reshape(len(column), *lengths[:1], *values.shape[1:])
    types = pyarrow.types
    kind = column.type
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise DataError(
            f"{where} has type {kind}; turn text into numbers by a tokenizer or a table of "
            "categories, or leave the column out with columns=[...]"
        )
    array: np.ndarray = column.to_numpy(zero_copy_only=False)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise DataError(f"{where} has a value that is not finite; fill it in or drop the record")
    # What PyTorch computes with: it has few operators for unsigned types of more than 8 bits.
    return array.astype(np.int64) if array.dtype.kind == "u" and array.itemsize > 1 else array


def _copy(reader: _Reader, inputs: list[str], target: str | None, folder: Path) -> None:
    """Write the tensors of the file to a folder, whole or not at all."""
    numbers = [name for name in inputs if reader.is_number(name)]
    lists = [name for name in inputs if name not in numbers]
    if len(numbers) > 1 and _FEATURES in lists:
        raise DataError(f"{reader.file} has a list column named 'features'; rename it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))  # for us alone
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    files: dict[str, BinaryIO] = {}
    count = 0
    try:
        for batch in reader.batches([*inputs, *([] if target is None else [target])]):
            tensors = {name: batch[name] for name in lists}
            if numbers:
                with np.errstate(over="ignore"):
                    matrix = np.stack([batch[name].astype(np.float32) for name in numbers], axis=1)
                if not np.isfinite(matrix).all():
                    raise DataError(f"{reader.file} has a number that does not fit in float32")
                tensors = {_FEATURES: matrix, **tensors}
            if target is not None:
                whole = batch[target].dtype.kind in "biu" and batch[target].ndim == 1
                tensors[target] = batch[target].astype(np.int64) if whole else batch[target]
            for name, rows in tensors.items():
                kind = rows.dtype.str, rows.shape[1:]
                if kinds.setdefault(name, kind) != kind and len(rows):
                    raise DataError(
                        f"column {name!r} of {reader.file} has rows of shape {kinds[name][1]} and "
                        f"of shape {kind[1]}; pad all to one length"
                    )
                if name not in files:
                    files[name] = (draft / f"{len(files)}.bin").open("xb")
                files[name].write(np.ascontiguousarray(rows).data)
            count += len(next(iter(tensors.values())))
        if not count:
            raise DataError(f"{reader.file} has no records; give a file with at least one")
        index = [(name, kind, (count, *shape)) for name, (kind, shape) in kinds.items()]
        for opened in files.values():
            opened.close()
        (draft / _INDEX).write_text(json.dumps(index), encoding="utf-8")
        with suppress(OSError):  # another process has written the same
            draft.rename(folder)
        if not folder.is_dir():
            raise DataError(f"cannot write {folder}; give another cache=")
    finally:
        for opened in files.values():
            opened.close()
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"reading {file} needs pyarrow, which is not installed; pip install 'tacit[parquet]'"
        ) from error
    try:
        yield
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {file}: {' '.join(str(error).split())}") from error
