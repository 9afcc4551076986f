"""Arrow and Parquet files that are read where they are."""

from __future__ import annotations

import builtins
import os

import numpy as np
import pytest
import torch

import tacit
from tacit.data import open_file
from tacit.errors import DataError

pa = pytest.importorskip("pyarrow")
import pyarrow.feather as feather  # noqa: E402
import pyarrow.parquet as parquet  # noqa: E402

N = 1000
A, B, Y = np.arange(N), np.random.RandomState(0).rand(N), np.arange(N) % 3
IDS = np.arange(4 * N).reshape(N, 4)
IMAGES = np.random.RandomState(1).rand(N, 2, 3).astype(np.float32)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path / "cache"))


def numbers():
    return pa.table({"a": A, "b": B, "y": Y})


def lists():
    images = pa.array(IMAGES.tolist(), type=pa.list_(pa.list_(pa.float32())))
    ids = pa.FixedSizeListArray.from_arrays(pa.array(IDS.ravel()), 4)
    return pa.table({"input_ids": ids, "image": images, "a": A, "labels": pa.array(Y == 1)})


def write(table, path, how):
    if how == "parquet":
        parquet.write_table(table, path, row_group_size=70)
    elif how == "feather":
        feather.write_feather(table, str(path), compression="lz4", chunksize=90)
    else:
        make = pa.ipc.new_file if how == "arrow" else pa.ipc.new_stream
        with make(str(path), table.schema) as file:
            file.write_table(table, max_chunksize=80)


FORMATS = [("parquet", "parquet"), ("arrow", "arrow"), ("arrow", "stream"), ("feather", "feather")]


@pytest.mark.parametrize(("suffix", "how"), FORMATS)
def test_numbers_are_a_matrix_and_lists_are_tensors(suffix, how, tmp_path):
    write(numbers(), tmp_path / f"n.{suffix}", how)
    records = open_file(tmp_path / f"n.{suffix}", "y", public_size=N, num_classes=3)
    assert records.is_lazy
    assert records.feature_names == ("a", "b")
    rows = torch.tensor([999, 0, 500, 500])
    some = records.take(rows).read()
    assert torch.equal(some.inputs, torch.tensor(np.stack([A, B], 1)[rows]).float())
    assert torch.equal(some.targets, torch.tensor(Y[rows]))

    write(lists(), tmp_path / f"l.{suffix}", how)
    records = open_file(tmp_path / f"l.{suffix}", "labels")
    assert records.shape == {"features": (1,), "input_ids": (4,), "image": (2, 3)}
    some = records.take(rows).read()
    assert torch.equal(some.inputs["input_ids"], torch.tensor(IDS[rows]))
    assert torch.equal(some.inputs["image"], torch.tensor(IMAGES[rows]))
    assert some.targets.dtype is torch.int64
    one = open_file(tmp_path / f"l.{suffix}", "labels", columns=["image"])
    assert one.shape == (2, 3)
    assert open_file(tmp_path / f"l.{suffix}", columns=["input_ids"]).targets == ()


def test_a_poisson_sample_of_a_parquet_file_trains_as_in_memory(tmp_path):
    write(numbers(), tmp_path / "n.parquet", "parquet")
    lazy = open_file(tmp_path / "n.parquet", "y", public_size=N, num_classes=3)
    matrix = torch.tensor(np.stack([A, B], 1)).float()
    whole = tacit.Records(matrix, torch.tensor(Y), num_classes=3, public_size=N)
    one, other = (
        tacit.PoissonSampler(r, expected_batch_size=40, epochs=1, seed=3) for r in (lazy, whole)
    )
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.inputs, b.inputs)
        assert torch.equal(a.targets, b.targets)


def test_the_copy_is_made_once_for_this_user_and_anew_when_the_file_changes(tmp_path):
    path = tmp_path / "n.parquet"
    write(numbers(), path, "parquet")
    open_file(path, "y")
    (copy,) = (tmp_path / "cache" / "columns").iterdir()
    assert copy.stat().st_mode & 0o77 == 0
    made = copy.stat().st_mtime_ns
    open_file(path, "y")
    assert [copy] == list((tmp_path / "cache" / "columns").iterdir())
    assert copy.stat().st_mtime_ns == made
    write(numbers().slice(0, 500), path, "parquet")
    assert len(open_file(path, "y")) == 500
    open_file(path, "y", cache=tmp_path / "own")
    assert len(list((tmp_path / "own").iterdir())) == 1


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"a": [1, None], "y": [0, 1]}, "column 'a' of .* has an empty cell"),
        ({"a": ["x", "y"], "y": [0, 1]}, "column 'a' of .* has type string.*columns="),
        ({"a": [[1], [1, 2]], "y": [0, 1]}, "lists of different lengths; pad"),
        ({"a": [[1, None], [1, 2]], "y": [0, 1]}, "column 'a' of .* empty cell"),
        ({"a": [1.0, float("nan")], "y": [0, 1]}, "column 'a' of .* not finite"),
        ({"a": [1e300, 0.0], "y": [0, 1]}, "does not fit in float32"),
        ({"a": pa.array([], pa.int64()), "y": pa.array([], pa.int64())}, "no records"),
        ({"y": [0, 1]}, "columns names no input"),
        ({"a": [1, 2]}, "no column 'y'; its columns are a"),
    ],
)
def test_what_cannot_be_read_is_refused_and_leaves_nothing(table, says, tmp_path):
    path = tmp_path / "t.parquet"
    parquet.write_table(pa.table(table), path)
    with pytest.raises(DataError, match=says):
        open_file(path, "y")
    left = tmp_path / "cache" / "columns"
    assert not left.exists() or not os.listdir(left)


def test_other_files_are_refused(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"\.parquet, \.arrow, \.feather"):
        open_file(tmp_path / "t.csv")
    with pytest.raises(DataError, match="no file"):
        open_file(tmp_path / "t.parquet")
    for name in ("bad.parquet", "bad.arrow"):
        (tmp_path / name).write_text("not a table")
        with pytest.raises(DataError, match=f"cannot read .*{name}"):
            open_file(tmp_path / name)
    real = builtins.__import__

    def without(name, *rest, **more):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r"tacit\[parquet\]"):
        open_file(tmp_path / "bad.parquet")
