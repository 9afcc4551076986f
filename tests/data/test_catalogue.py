"""Files are looked for in TACIT_DATA, then in the cache, then fetched; and always verified."""

import dataclasses
import hashlib
import os

import pytest

from tacit.data.catalogue import DATASETS, DataFile, available, lookup
from tacit.data.download import cache_folder, find
from tacit.errors import DataError


def file_of(body, name="a.bin", urls=()):
    return DataFile(name, hashlib.sha256(body).hexdigest(), len(body), urls)


def dataset_of(*variants):
    return dataclasses.replace(lookup("mnist"), folder="toy", variants=variants)


def put(root, name, body):
    path = root / "toy" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
    return path


def test_tacit_data_comes_before_the_cache_and_the_cache_before_the_network(
    loopback, tmp_path, monkeypatch
):
    dataset = dataset_of((loopback.offer("a.bin", b"body"),))
    monkeypatch.setenv("TACIT_DATA", str(tmp_path / "data"))
    fetched = find(dataset)
    assert fetched == [tmp_path / "cache" / "toy" / "a.bin"]
    assert loopback.hits == ["/a.bin"]
    assert find(dataset) == fetched
    assert loopback.hits == ["/a.bin"]
    own = put(tmp_path / "data", "a.bin", b"body")
    assert find(dataset) == [own]


def test_root_stands_in_for_tacit_data(tmp_path, monkeypatch):
    monkeypatch.setenv("TACIT_DATA", str(tmp_path / "other"))
    own = put(tmp_path / "mine", "a.bin", b"body")
    assert find(dataset_of((file_of(b"body"),)), root=tmp_path / "mine") == [own]


def test_the_cache_folder(tmp_path, monkeypatch):
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("TACIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "tacit"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "tacit"


@pytest.mark.parametrize("place", ["data", "cache"])
@pytest.mark.parametrize(
    ("found", "says"),
    [(b"bo", "truncated: 2 bytes of 4"), (b"bodY", "not the published"), (b"", "truncated: 0")],
)
def test_a_wrong_file_is_named_with_both_checksums(tmp_path, monkeypatch, place, found, says):
    monkeypatch.setenv("TACIT_DATA", str(tmp_path / "data"))
    path = put(tmp_path / place, "a.bin", found)
    expected = file_of(b"body")
    with pytest.raises(DataError, match=says) as caught:
        find(dataset_of((expected,)))
    for part in (str(path), expected.sha256, hashlib.sha256(found).hexdigest()):
        assert part in str(caught.value)
    assert path.read_bytes() == found  # a user's file is never touched


def test_a_checksum_is_computed_once_and_again_when_the_file_changes(tmp_path, monkeypatch):
    path = put(tmp_path / "cache", "a.bin", b"body")
    dataset = dataset_of((file_of(b"body"),))
    calls, digest = [], hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *a: calls.append(1) or digest(*a))
    find(dataset)
    find(dataset)
    assert len(calls) == 1
    path.write_bytes(b"bodY")
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match="not the published"):
        find(dataset)


def test_offline_forbids_the_download_and_says_what_is_missing(loopback, tmp_path, monkeypatch):
    monkeypatch.setenv("TACIT_OFFLINE", "1")
    monkeypatch.setenv("TACIT_DATA", str(tmp_path / "data"))
    put(tmp_path / "data", "a.bin", b"body")
    dataset = dataset_of((loopback.offer("a.bin", b"body"), loopback.offer("b.bin", b"more")))
    with pytest.raises(DataError, match=r"\(TACIT_DATA\) lacks b\.bin;.*TACIT_OFFLINE"):
        find(dataset)
    assert loopback.hits == []


def test_only_the_missing_files_are_fetched(loopback, tmp_path):
    put(tmp_path / "cache", "a.bin", b"body")
    find(dataset_of((loopback.offer("a.bin", b"body"), loopback.offer("b.bin", b"more"))))
    assert loopback.hits == ["/b.bin"]


def test_another_variant_will_do_and_the_one_with_an_address_is_fetched(loopback, tmp_path):
    without_address = (file_of(b"one", "one.npz"), file_of(b"two", "two.npz"))
    archive = loopback.offer("all.tar.gz", b"archive")
    dataset = dataset_of(without_address, (archive,))
    assert [path.name for path in find(dataset)] == ["all.tar.gz"]
    put(tmp_path / "cache", "one.npz", b"one")
    assert [path.name for path in find(dataset)] == ["all.tar.gz"]
    put(tmp_path / "cache", "two.npz", b"two")
    assert [path.name for path in find(dataset)] == ["one.npz", "two.npz"]


def test_no_address_at_all(tmp_path):
    with pytest.raises(DataError, match="no public address"):
        find(dataset_of((file_of(b"one"),)))


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("adbench/yeast", "adbench/yeast"),
        ("adbench/47_yeast", "adbench/yeast"),
        ("adbench/47_yeast.npz", "adbench/yeast"),
        ("adbench/magic.gamma", "adbench/magic.gamma"),
        ("adbench/aloi", "adbench/ALOI"),
        ("MNIST", "mnist"),
    ],
)
def test_names(name, canonical):
    assert lookup(name).name == canonical


@pytest.mark.parametrize("name", ["adbench/yaest", "adbench/46_yeast", "imagenet", "adbench/", ""])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(DataError) as caught:
        lookup(name)
    assert all(known in str(caught.value) for known in available())


def test_a_near_miss_is_suggested():
    with pytest.raises(DataError, match="did you mean 'fashion-mnist'"):
        lookup("fashion_mnist")


def test_the_catalogue_is_well_formed():
    for dataset in DATASETS.values():
        for variant in dataset.variants:
            for file in variant:
                assert len(bytes.fromhex(file.sha256)) == 32
                assert file.size > 0
                assert all(url.endswith("/" + file.name) for url in file.urls)
        assert not dataset.variants or any(all(f.urls for f in v) for v in dataset.variants)


def test_the_real_files_are_the_catalogue_s(real_data):
    for name in ("mnist", "fashion-mnist", "cifar10", *(n for n in available() if "/" in n)):
        assert all(str(path).startswith(real_data) for path in find(lookup(name)))
