"""`load` gives every named dataset in the same form, with only published constants."""

import dataclasses
import gzip
import hashlib
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch

from tacit.data import available, load
from tacit.data.catalogue import DATASETS
from tacit.data.splits import fixed_split, split_by_content
from tacit.errors import DataError


def check_form(name, train, test):
    entry = DATASETS[name.lower()]
    for records, size in ((train, entry.train_size), (test, entry.test_size)):
        assert records.inputs.dtype == torch.float32
        assert records.targets.dtype == torch.int64
        assert records.inputs.is_contiguous()
        assert records.inputs.isfinite().all()
        assert records.shape == entry.shape
        assert len(records) == records.public_size == size
        assert records.num_classes == entry.num_classes
        assert records.targets.min() >= 0
        assert records.targets.max() < entry.num_classes
        assert records.name == entry.name
        assert all(isinstance(note, str) for note in records.notes)
        assert any("published" in note for note in records.notes)
    ids = torch.cat([train.record_ids, test.record_ids])
    assert len(ids.unique()) == entry.train_size + entry.test_size


def test_digits():
    train, test = load("digits")
    check_form("digits", train, test)
    assert (len(train), len(test)) == (1438, 359)
    assert train.inputs.min() == 0
    assert train.inputs.max() == 1
    assert any("divided by 16" in note for note in train.notes)
    flat, _ = load("digits", flatten=True)
    assert torch.equal(flat.inputs, train.inputs.flatten(1))


def test_digits_keep_their_ids_through_the_split():
    from sklearn.datasets import load_digits

    bunch = load_digits()
    for records in load("digits"):
        rows = records.record_ids.numpy()
        assert np.allclose(records.inputs.numpy()[:, 0] * 16, bunch.images[rows])
        assert np.array_equal(records.targets.numpy(), bunch.target[rows])


def test_the_split_is_fixed_for_good():
    train, test = fixed_split(8, 2)
    assert (train.tolist(), test.tolist()) == ([0, 2, 3, 4, 5, 6, 8, 9], [1, 7])
    assert sorted([*train, *test]) == list(range(10))


def test_a_split_by_content_moves_nobody_else():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2000, 4)).astype(np.float32), rng.integers(0, 3, 2000)
    train, test = split_by_content(x, y, 0.2)
    assert sorted([*train, *test]) == list(range(2000))
    assert len(test) / 2000 == pytest.approx(0.2, abs=0.03)
    without = [i for i in range(2000) if i != 7]
    train_less, _ = split_by_content(x[without], y[without], 0.2)
    assert {without[i] for i in train_less} == set(train.tolist()) - {7}
    assert not len(split_by_content(x, y, 0.0)[1])


def idx(array):
    header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    return gzip.compress(header + array.astype(np.uint8).tobytes())


@pytest.fixture
def tiny_mnist(loopback, monkeypatch):
    """Five training and two test images of "mnist", to be had from loopback."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (7, 28, 28))
    labels = np.array([0, 1, 2, 3, 9, 5, 6])
    arrays = (pixels[:5], labels[:5], pixels[5:], labels[5:])
    entry = DATASETS["mnist"]
    files = tuple(
        loopback.offer(file.name, idx(array))
        for file, array in zip(entry.variants[0], arrays, strict=True)
    )
    entry = dataclasses.replace(entry, variants=(files,), train_size=5, test_size=2)
    monkeypatch.setitem(DATASETS, "mnist", entry)
    return pixels, labels


def test_fetch_then_read_then_read_again_offline(tiny_mnist, loopback, monkeypatch):
    pixels, labels = tiny_mnist
    train, test = load("mnist")
    check_form("mnist", train, test)
    assert (train.num_ids, test.num_ids) == (5, 7)
    assert test.record_ids.tolist() == [5, 6]
    expected = (pixels / 255 - 0.1307) / 0.3081
    assert np.allclose(train.inputs[:, 0], expected[:5], atol=1e-5)
    assert np.allclose(test.inputs[:, 0], expected[5:], atol=1e-5)
    assert test.targets.tolist() == labels[5:].tolist()
    assert len(loopback.hits) == 4
    monkeypatch.setenv("TACIT_OFFLINE", "1")
    plain, _ = load("mnist", scale=None)
    assert np.allclose(plain.inputs[:, 0] * 255, pixels[:5], atol=1e-4)
    assert len(loopback.hits) == 4


def test_a_file_of_the_right_checksum_and_the_wrong_size_is_refused(tiny_mnist, monkeypatch):
    entry = dataclasses.replace(DATASETS["mnist"], train_size=6)
    monkeypatch.setitem(DATASETS, "mnist", entry)
    with pytest.raises(DataError, match=r"\(6, 1, 28, 28\) was published"):
        load("mnist")
    entry = dataclasses.replace(entry, train_size=5, num_classes=9)
    monkeypatch.setitem(DATASETS, "mnist", entry)
    with pytest.raises(DataError, match="the label 9"):
        load("mnist")


def test_tiny_adbench_from_a_root(tmp_path, monkeypatch):
    x = np.linspace(-8.65, 10.87, 80).reshape(10, 8)
    path = tmp_path / "adbench" / "47_yeast.npz"
    path.parent.mkdir()
    np.savez(path, X=x, y=np.arange(10) % 2)
    content = path.read_bytes()
    entry = DATASETS["adbench/yeast"]
    file = dataclasses.replace(
        entry.variants[0][0], sha256=hashlib.sha256(content).hexdigest(), size=len(content)
    )
    entry = dataclasses.replace(entry, variants=((file,),), train_size=8, test_size=2)
    monkeypatch.setitem(DATASETS, "adbench/yeast", entry)
    train, test = load("adbench/47_yeast", root=tmp_path)
    check_form("adbench/yeast", train, test)
    both = torch.cat([train.inputs, test.inputs])
    assert (both.min().item(), both.max().item()) == (-1, 1)
    assert any("(-8.65..10.87) published with adbench/yeast" in note for note in train.notes)
    plain, _ = load("adbench/yeast", root=tmp_path, scale=None)
    assert np.allclose(plain.inputs, x[plain.record_ids])
    entry = dataclasses.replace(entry, train_size=9)
    monkeypatch.setitem(DATASETS, "adbench/yeast", entry)
    with pytest.raises(DataError, match=r"\(11, 8\) was published"):
        load("adbench/yeast", root=tmp_path)


def test_nothing_heavy_is_imported_before_it_is_needed():
    heavy = "{'sklearn', 'rich', 'pyarrow', 'dp_accounting', 'pandas'}"
    script = (
        "import importlib.util, sys, types\n"
        "package = types.ModuleType('tacit')  # this folder alone, not all of Tacit\n"
        "package.__path__ = importlib.util.find_spec('tacit').submodule_search_locations\n"
        "sys.modules['tacit'] = package\n"
        f"import tacit.data; sys.exit(repr({heavy} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stderr.strip() == "set()"


MNIST_COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


@pytest.mark.parametrize(
    ("name", "counts"), [("mnist", MNIST_COUNTS), ("fashion-mnist", [6000] * 10)]
)
def test_the_real_images(real_data, name, counts):
    train, test = load(name)
    check_form(name, train, test)
    assert train.targets.bincount().tolist() == counts
    assert abs(train.inputs.mean().item()) < 1e-3
    assert abs(train.inputs.std().item() - 1) < 1e-3


def test_the_real_cifar10(real_data):
    train, test = load("cifar10")
    check_form("cifar10", train, test)
    assert train.targets.bincount().tolist() == [5000] * 10
    assert test.targets.bincount().tolist() == [1000] * 10
    some = train.inputs[::10]
    assert some.mean((0, 2, 3)).abs().max() < 0.02
    assert (some.std((0, 2, 3)) - 1).abs().max() < 0.02


ANOMALIES = {"ALOI": 1508, "magic.gamma": 6688, "shuttle": 3511, "skin": 50859, "yeast": 507}


@pytest.mark.parametrize("name", ANOMALIES)
def test_the_real_adbench(real_data, name):
    train, test = load(f"adbench/{name}")
    check_form(f"adbench/{name}", train, test)
    assert train.targets.sum() + test.targets.sum() == ANOMALIES[name]
    both = torch.cat([train.inputs, test.inputs])
    assert both.min() >= -1
    assert both.max() <= 1


def test_the_names():
    assert set(available()) >= {"digits", "mnist", "fashion-mnist", "cifar10", "adbench/yeast"}
    assert len(available()) == 13
