"""A user's file is read in three formats alike; what is wrong with it is named."""

import builtins
import math

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tacit.data import PublicScaler, UnitNorm, load_file
from tacit.errors import DataError, UndeclaredConstant

RNG = np.random.default_rng(0)
N = 400
X = RNG.normal(size=(N, 3)).astype(np.float32)
Y = RNG.integers(0, 3, N)
NAMES = np.array(["cat", "bird", "dog"])


def write(path, x=X, y=Y):
    """The same table in the format of the path's suffix, its target called "kind"."""
    columns = [f"f{i}" for i in range(x.shape[1])]
    if path.suffix == ".csv":
        lines = [",".join([*columns, "kind"])]
        lines += [
            ",".join([*map(repr, map(float, row)), str(label)])
            for row, label in zip(x, y, strict=True)
        ]
        path.write_text("\n".join(lines) + "\n")
    elif path.suffix == ".parquet":
        pq.write_table(pa.table({**dict(zip(columns, x.T, strict=True)), "kind": y}), path)
    else:
        np.savez(path, X=x, kind=y)
    return path


ALL = pytest.mark.parametrize("suffix", [".csv", ".parquet", ".npz"])


@ALL
@pytest.mark.parametrize("labels", [Y, NAMES[Y], Y.astype(float), Y + 5])
def test_every_format_gives_the_same_records(tmp_path, suffix, labels):
    train, test = load_file(write(tmp_path / f"own{suffix}", y=labels), "kind")
    distinct = sorted(set(labels.tolist()))
    for records in (train, test):
        rows = records.record_ids.numpy()
        assert records.inputs.dtype == torch.float32
        assert np.array_equal(records.inputs.numpy(), X[rows])
        assert records.targets.tolist() == [distinct.index(labels[i]) for i in rows]
        assert records.num_classes == 3
        assert records.public_size is None
        assert records.name == f"own{suffix}"
    assert len(train) + len(test) == N
    assert 0.1 < len(test) / N < 0.3
    notes = " ".join(train.notes)
    assert "classes were read from the file and are treated as public" in notes
    assert "public_size was not declared" in notes
    assert "not scaled" in notes


@ALL
def test_what_is_declared_is_used_and_noted(tmp_path, suffix):
    train, test = load_file(
        write(tmp_path / f"own{suffix}", y=NAMES[Y]),
        "kind",
        classes=["dog", "cat", "bird", "fish"],
        public_size=500,
        feature_range=(-2, 2),
        scale=UnitNorm(),
    )
    assert train.num_classes == 4
    assert (train.public_size, test.public_size) == (400, 100)
    rows = train.record_ids.numpy()
    order = {"dog": 0, "cat": 1, "bird": 2}
    assert train.targets.tolist() == [order[NAMES[Y[i]]] for i in rows]
    clipped = torch.from_numpy(X[rows]).clamp(-2, 2) / 2
    assert torch.allclose(train.inputs, clipped / clipped.norm(dim=1, keepdim=True), atol=1e-6)
    notes = " ".join(train.notes)
    assert "classes were declared: 0 = dog" in notes
    assert "declared public: 500" in notes
    assert "clipped to a range declared public by the user" in notes


def test_a_removed_row_removes_one_record_and_moves_none(tmp_path):
    whole, _ = load_file(write(tmp_path / "a.csv"), "kind")
    row = whole.record_ids[10].item()
    keep = np.arange(N) != row
    less, _ = load_file(write(tmp_path / "b.csv", X[keep], Y[keep]), "kind")
    assert torch.equal(less.inputs, whole.without(10).inputs)


def test_declared_classes_by_number_and_by_label(tmp_path):
    path = write(tmp_path / "a.csv")
    assert load_file(path, "kind", classes=5)[0].num_classes == 5
    plain, _ = load_file(path, "kind")
    turned, _ = load_file(path, "kind", classes=("2", 1, "0"))
    assert torch.equal(turned.targets, 2 - plain.targets)
    with pytest.raises(DataError, match=r"'kind'.* is 2 in record .*none of the classes 0, 1"):
        load_file(path, "kind", classes=2)
    for bad in (1, [0, "0"], ["a"], "abc"):
        with pytest.raises(ValueError, match="classes is"):
            load_file(path, "kind", classes=bad)


def test_a_test_file(tmp_path):
    train_path = write(tmp_path / "train.csv", X[:300], Y[:300])
    test_path = write(tmp_path / "test.parquet", X[300:], Y[300:])
    train, test = load_file(train_path, "kind", test_path=test_path, public_size=300)
    assert (len(train), len(test)) == (300, 100)
    assert (train.public_size, test.public_size) == (300, None)
    assert np.array_equal(test.inputs.numpy(), X[300:])
    (tmp_path / "turned.csv").write_text("kind,f2,f0,f1\n1,3,1,2\n")
    _, turned = load_file(train_path, "kind", test_path=tmp_path / "turned.csv")
    assert turned.inputs.tolist() == [[1, 2, 3]]
    (tmp_path / "other.csv").write_text("kind,f0,f1,g\n1,3,1,2\n")
    with pytest.raises(DataError, match=r"missing \['f2'\], unknown \['g'\]"):
        load_file(train_path, "kind", test_path=tmp_path / "other.csv")
    a, b = tmp_path / "a.npz", tmp_path / "b.npz"
    np.savez(a, X=np.zeros((4, 3)), kind=[0, 1, 0, 1])
    np.savez(b, X=np.zeros((4, 2)), kind=[0, 1, 0, 1])
    with pytest.raises(DataError, match=r"\(2,\) and those of .* have \(3,\)"):
        load_file(a, "kind", test_path=b)


def test_a_test_file_whose_labels_are_strings_has_the_same_classes(tmp_path):
    train_path, test_path = tmp_path / "train.csv", tmp_path / "test.csv"
    train_path.write_text("a,y\n1,0\n2,1\n")
    test_path.write_text("a,y\n1,1\n2,other\n")
    train, test = load_file(train_path, "y", test_path=test_path)
    assert train.num_classes == 3
    assert (train.targets.tolist(), test.targets.tolist()) == ([0, 1], [1, 2])


def test_everything_for_training(tmp_path):
    train, test = load_file(write(tmp_path / "a.csv"), "kind", test_fraction=0, public_size=N)
    assert (len(train), len(test), train.public_size) == (N, 0, N)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("a,b,y\n", "no records"),
        ("a,b,z\n1,2,0\n", "no column 'y'; its columns are a, b, z"),
        ("a|b|y\n1|2|0\n", "no column 'y'; its columns are a.b.y"),
        ("a;b;y\n1;2,5;0\n", "'2,5', which has a decimal comma: write numbers with a point"),
        ("a,a,y\n1,2,0\n", "more than one column named 'a'"),
        ("y\n1\n2\n", "no feature"),
        ("a,b,y\n1,2,0\n1,,1\n", "line 3 .* empty cell in column 'b'"),
        ("a,b,y\n1,2,0\n1,2,\n", "line 3 .* empty cell in column 'y'"),
        ("a,b,y\n1,2,0\n\n1,red,1\n", "column 'b' .* not numeric: line 4 has 'red'"),
        ("a,b,y\n1,1_000,0\n", "column 'b' .* not numeric: line 2 has '1_000'"),
        ("a,b,y\n1,2,0\n1,2\n", "line 3 .* 2 cells and the header has 3"),
        ("a,b,y\n1,2,0,4\n", "line 2 .* 4 cells"),
        ("a,b,y\n1,nan,0\n", "line 2 .* nan in column 'b', which is not finite"),
        ("a,b,y\n1,2,0\n\n-inf,2,0\n", "line 4 .* -inf in column 'a'"),
        ("a,b,y\n1,1e300,0\n", r"1e\+300 in column 'b', which does not fit in float32"),
        (
            "a,b,y\n1,2,0.5\n1,2,1\n",
            "real number .0.5 in record 1.*a schema whose target",
        ),
        ("a,b,y\n1,2,0\n1,2,nan\n", "is nan in record 2"),
        ("a,b,y\n1,2,0\n1,3,0\n", "one class 0"),
        ('a,b,y\n1,2,"0\n', "not a CSV file"),
        ("a,y\n" + "".join(f"1,{i}\n" for i in range(1001)), "1001 distinct.*classes="),
        ("a,y\n" + "".join(f"1,c{i}\n" for i in range(1001)), "1001 distinct.*classes="),
    ],
)
def test_what_is_wrong_with_a_csv_file(tmp_path, text, says):
    path = tmp_path / "own.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=says) as caught:
        load_file(path, "y", test_fraction=0)
    assert str(path) in str(caught.value)


def test_csv_as_spreadsheets_write_it(tmp_path):
    path = tmp_path / "own.csv"
    path.write_bytes(b'\xef\xbb\xbf"a", y ,b\r\n 1 ,"yes, sir",-2e1\r\n\r\n3,no,4\r\n')
    train, _ = load_file(path, "y", test_fraction=0)
    assert train.inputs.tolist() == [[1, -20], [3, 4]]
    assert train.targets.tolist() == [1, 0]
    path.write_bytes(b"a,y\n1,\xff\n")
    with pytest.raises(DataError, match="UTF-8"):
        load_file(path, "y")


def test_the_delimiter_is_that_of_the_header(tmp_path):
    for mark, suffix in ((";", ".csv"), ("\t", ".csv"), (",", ".csv"), ("\t", ".tsv")):
        path = tmp_path / f"own{suffix}"
        header = mark.join(("a", '"b, c; d"', "y"))
        path.write_text(f"{header}\n1{mark}2{mark}0\n3{mark}4{mark}1\n")
        train, _ = load_file(path, "y", test_fraction=0)
        assert train.inputs.tolist() == [[1, 2], [3, 4]]
        assert train.feature_names == ("a", "b, c; d")
        assert train.class_names == ("0", "1")


@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame, pa.table, dict])
def test_frames_give_the_records_of_files(tmp_path, frame):
    columns = {"f0": X[:, 0], "f1": X[:, 1], "f2": X[:, 2], "kind": NAMES[Y]}
    train, test = load_file(frame(columns), "kind")
    from_file = load_file(write(tmp_path / "own.csv", y=NAMES[Y]), "kind")
    for records, others in zip((train, test), from_file, strict=True):
        assert torch.equal(records.inputs, others.inputs)
        assert torch.equal(records.targets, others.targets)
    with pytest.raises(DataError, match=r"column 'kind' .* not numeric: it holds text"):
        load_file(frame(columns), "f0")
    with pytest.raises(DataError, match=r"row 2 of .* empty cell in column 'a'"):
        load_file(frame({"a": [1.0, None], "y": [0, 1]}), "y")


def test_classes_that_look_like_numbers(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("a,y\n1,10\n2,9\n3,1e1\n")
    train, _ = load_file(path, "y", test_fraction=0)
    assert train.targets.tolist() == [1, 0, 1]
    path.write_text("a,y\n1,1_0\n2,10\n")
    train, _ = load_file(path, "y", test_fraction=0)
    assert train.num_classes == 2


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"a": [1.0, 2.0]}, "no column 'y'; its columns are a"),
        ({"a": ["x", "z"], "y": [0, 1]}, "column 'a' .* not numeric: .*type string"),
        ({"a": [1.0, None], "y": [0, 1]}, "row 2 .* empty cell in column 'a'"),
        ({"a": [1.0, 2.0], "y": [None, 1]}, "row 1 .* empty cell in column 'y'"),
        ({"a": [1.0, math.inf], "y": [0, 1]}, "row 2 .* inf in column 'a', which is not finite"),
        ({"a": [[1.0], [2.0]], "y": [0, 1]}, "column 'a' .* type list"),
        ({"a": [1.0, 2.0], "y": [[0], [1]]}, "target 'y' .* type list"),
        ({"a": [1.0, 2.0], "y": [0.5, 1]}, "a schema whose target is numeric"),
        ({"y": [0, 1]}, "no feature"),
        ({"a": pa.array([], pa.float64()), "y": pa.array([], pa.int64())}, "no records"),
    ],
)
def test_what_is_wrong_with_a_parquet_file(tmp_path, columns, says):
    path = tmp_path / "own.parquet"
    pq.write_table(pa.table(columns), path)
    with pytest.raises(DataError, match=says) as caught:
        load_file(path, "y", test_fraction=0)
    assert str(path) in str(caught.value)


def test_parquet_kinds_of_columns(tmp_path):
    path = tmp_path / "own.parquet"
    columns = {
        "a": pa.array([True, False, True]),
        "b": pa.array([1, 2, 3], pa.uint8()),
        "y": pa.array(["u", "v", "u"]).dictionary_encode(),
    }
    pq.write_table(pa.table(columns), path)
    train, _ = load_file(path, "y", test_fraction=0)
    assert train.inputs.tolist() == [[1, 1], [0, 2], [1, 3]]
    assert train.targets.tolist() == [0, 1, 0]
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="damaged or is not a Parquet"):
        load_file(path, "y")


def test_without_pyarrow_the_way_out_is_told(tmp_path, monkeypatch):
    path = write(tmp_path / "own.parquet")
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r"pip install 'tacit\[parquet\]'"):
        load_file(path, "kind")


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"X": np.zeros((2, 3))}, "no array 'y'; it has X"),
        ({"y": [0, 1]}, "has the arrays y; name the inputs"),
        ({"a": np.zeros((2, 3)), "b": np.zeros((2, 3)), "y": [0, 1]}, "arrays a, b, y; name"),
        ({"X": np.zeros((2, 3)), "inputs": np.zeros((2, 3)), "y": [0, 1]}, "name the inputs"),
        ({"X": np.zeros(2), "y": [0, 1]}, "one row per record"),
        ({"X": np.zeros((2, 3)), "y": [[0], [1]]}, "expected \\(n,\\)"),
        ({"X": np.zeros((2, 3)), "y": [0, 1, 0]}, "2 inputs and 3 targets"),
        ({"X": np.zeros((0, 3)), "y": np.zeros(0)}, "no records"),
        ({"X": np.array([["a"], ["b"]]), "y": [0, 1]}, "'X' .* not numeric"),
        ({"X": np.array([[0], [math.nan]]), "y": [0, 1]}, "row 2 .* nan in array 'X'"),
        ({"X": np.array([[{}], [{}]], object), "y": [0, 1]}, "could run code"),
        ({"X": np.zeros((2, 3)), "y": np.array([{}, {}], object)}, "could run code"),
        ({"X": np.zeros((2, 3)), "y": [0j, 1j]}, "type complex"),
    ],
)
def test_what_is_wrong_with_an_npz_file(tmp_path, arrays, says):
    path = tmp_path / "own.npz"
    np.savez(path, **arrays)
    with pytest.raises(DataError, match=says) as caught:
        load_file(path, "y", test_fraction=0)
    assert str(path) in str(caught.value)


def test_npz_of_images_and_of_any_input_name(tmp_path):
    path = tmp_path / "own.npz"
    images = RNG.integers(0, 256, (6, 1, 8, 8), dtype=np.uint8)
    np.savez(path, pictures=images, y=np.array([b"u", b"v", b"u", b"v", b"u", b"v"]))
    train, _ = load_file(path, "y", test_fraction=0, scale=PublicScaler(0, 255))
    assert train.shape == (1, 8, 8)
    assert np.allclose(train.inputs * 255, images, atol=1e-4)
    np.savez(path, inputs=images, extra=np.zeros(1), y=np.array([True, False] * 3))
    train, _ = load_file(path, "y", test_fraction=0)
    assert train.targets.tolist() == [1, 0, 1, 0, 1, 0]


@pytest.mark.parametrize("name", ["own.txt", "own", "own.pkl"])
def test_an_unknown_format(tmp_path, name):
    (tmp_path / name).write_text("x")
    with pytest.raises(DataError, match=r"\.csv, \.tsv, \.parquet, \.npz"):
        load_file(tmp_path / name, "y")


@ALL
def test_no_such_file(tmp_path, suffix):
    with pytest.raises(DataError, match="there is no file"):
        load_file(tmp_path / f"none{suffix}", "y")


def test_fitting_to_the_file_is_refused_before_it_is_read(tmp_path):
    missing = tmp_path / "none.csv"
    with pytest.raises(UndeclaredConstant, match="release_statistics"):
        load_file(missing, "y", scale="fit")
    with pytest.raises(UndeclaredConstant, match="nothing was published"):
        load_file(missing, "y", scale="public")
    for bad in ({"test_fraction": 1.0}, {"public_size": 0}, {"feature_range": (1, 0)}):
        with pytest.raises(ValueError, match=r"test_fraction|public_size|below its upper"):
            load_file(missing, "y", **bad)


def test_a_split_that_leaves_nothing_to_train_on(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("a,y\n1,0\n1,0\n")
    with pytest.raises(DataError, match="give test_path"):
        load_file(path, "y", test_fraction=0.999999)
