"""The formats of the named datasets; `load` compares checksums before it reads any of them."""

import gzip
import hashlib
import io
import pickle
import struct
import tarfile

import numpy as np
import pytest

from tacit.data.catalogue import BATCHES, CIFAR10
from tacit.data.loading import read_cifar, read_idx, read_npz_batch
from tacit.data.table_formats import read_arrays
from tacit.errors import DataError

RNG = np.random.default_rng(0)


def idx_bytes(array):
    header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


@pytest.mark.parametrize("shape", [(5, 28, 28), (5,)])
def test_idx_round_trip(tmp_path, shape):
    values = RNG.integers(0, 256, shape, dtype=np.uint8)
    (tmp_path / "x.gz").write_bytes(gzip.compress(idx_bytes(values)))
    assert np.array_equal(read_idx(tmp_path / "x.gz"), values)


def cifar_batches(records=4):
    return [
        (
            RNG.integers(0, 256, (records, 3, 32, 32), dtype=np.uint8),
            RNG.integers(0, 10, records, dtype=np.uint8),
        )
        for _ in BATCHES
    ]


def binary_batch(images, labels):
    return np.concatenate([labels[:, None], images.reshape(len(labels), -1)], 1).tobytes()


def sha1s(batches):
    return [hashlib.sha1(binary_batch(*batch)).hexdigest() for batch in batches]


def short(text):
    return b"U" + bytes([len(text)]) + text


def pickled_batch(images, labels, fortran=False):
    """A batch as Python 2 pickled it for the official archive, opcode by opcode."""
    rows = images.reshape(len(labels), -1)
    raw = rows.tobytes("F" if fortran else "C")
    return b"".join(
        (
            b"\x80\x02}q\x01(",
            short(b"batch_label") + b"q\x02" + short(b"training batch 1 of 5") + b"q\x03",
            short(b"labels") + b"q\x04]q\x05(" + b"".join(b"K" + bytes([y]) for y in labels) + b"e",
            short(b"data") + b"q\x06cnumpy.core.multiarray\n_reconstruct\nq\x07",
            b"cnumpy\nndarray\nq\x08K\x00\x85q\x09" + short(b"b") + b"q\x0a\x87q\x0bRq\x0c",
            b"(K\x01K" + bytes([len(labels)]) + b"M\x00\x0c\x86q\x0d",
            b"cnumpy\ndtype\nq\x0e" + short(b"u1") + b"q\x0fK\x00K\x01\x87q\x10Rq\x11",
            b"(K\x03" + short(b"|") + b"q\x12NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tq\x13b",
            b"\x88" if fortran else b"\x89",
            b"T" + struct.pack("<I", len(raw)) + raw + b"q\x14tq\x15b",
            short(b"filenames") + b"q\x16]q\x17(" + short(b"a_s_1.png") + b"K\x05e",
            b"u.",
        )
    )


def archive(path, members):
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def check_same(read, batches):
    (x, y), (x_test, y_test) = read
    assert np.array_equal(x, np.concatenate([b[0] for b in batches[:5]]))
    assert np.array_equal(y, np.concatenate([b[1] for b in batches[:5]]))
    assert np.array_equal(x_test, batches[5][0])
    assert np.array_equal(y_test, batches[5][1])


def test_cifar_npz_undoes_the_transform(tmp_path):
    batches = cifar_batches()
    for name, (images, labels) in zip(BATCHES, batches, strict=True):
        planes = images.transpose(1, 0, 2, 3).copy()
        planes[[0, 2]] -= planes[1]
        residuals = np.diff(planes, axis=2, prepend=np.zeros_like(planes[:, :, :1]))
        residuals = np.diff(residuals, axis=3, prepend=np.zeros_like(residuals[..., :1]))
        np.savez_compressed(tmp_path / name, r=residuals, y=labels)
    paths = [tmp_path / f"{name}.npz" for name in BATCHES]
    check_same(read_cifar(paths, ()), batches)


def test_cifar_binary_archive(tmp_path):
    batches = cifar_batches()
    members = {"cifar-10-batches-bin/batches.meta.txt": b"airplane\n"}
    for name, batch in reversed(list(zip(BATCHES, batches, strict=True))):  # order is not given
        members[f"cifar-10-batches-bin/{name}.bin"] = binary_batch(*batch)
    path = archive(tmp_path / "cifar-10-binary.tar.gz", members)
    check_same(read_cifar([path], sha1s(batches)), batches)
    with pytest.raises(DataError, match=r"data_batch_1 of .* does not decode to the published"):
        read_cifar([path], ["0" * 40, *sha1s(batches)[1:]])


@pytest.mark.parametrize("fortran", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_cifar_python_archive_is_read_without_unpickling(tmp_path, monkeypatch, fortran):
    batches = cifar_batches()
    members = {"cifar-10-batches-py/batches.meta": b"\x80\x02}q\x01."}
    for name, (images, labels) in zip(BATCHES, batches, strict=True):
        content = pickled_batch(images, labels, fortran)
        truth = pickle.loads(content, encoding="bytes")  # what we wrote is a real pickle
        assert np.array_equal(truth[b"data"].reshape(images.shape), images)
        assert truth[b"labels"] == labels.tolist()
        members[f"cifar-10-batches-py/{name}"] = content
    path = archive(tmp_path / "cifar-10-python.tar.gz", members)
    for forbidden in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, forbidden, None)
    check_same(read_cifar([path], sha1s(batches)), batches)


def test_a_hostile_pickle_runs_nothing(tmp_path):
    victim = tmp_path / "ran"
    hostile = b"\x80\x02cbuiltins\nopen\n" + short(str(victim).encode()) + short(b"w") + b"\x86R."
    path = archive(tmp_path / "c.tar.gz", {f"x/{name}": hostile for name in BATCHES})
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz"):
        read_cifar([path], [""] * 6)
    assert not victim.exists()


def test_the_real_batches_decode_to_the_published_ones(real_data):
    from pathlib import Path

    for index in (0, 5):
        batch = read_npz_batch(Path(real_data) / "cifar10" / f"{BATCHES[index]}.npz")
        assert sha1s([batch]) == [CIFAR10.batch_sha1[index]]


def test_a_damaged_npz(tmp_path):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, X=RNG.normal(size=(50, 3)), y=np.zeros(50, int))
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[200:260] = bytes(60)
    for content in (whole[: len(whole) // 2], bytes(damaged), b"", b"not a zip", b"PK\x03\x04"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.npz"):
            read_arrays(path, ("X", "y"))
    with pytest.raises(DataError, match="no file"):
        read_arrays(tmp_path / "none.npz", ("X",))
    with (tmp_path / "b.npz").open("wb") as stream:
        np.save(stream, np.zeros(3))
    with pytest.raises(DataError, match="single array"):
        read_arrays(tmp_path / "b.npz", ("X",))
