"""The named datasets: their files, the addresses that serve them, and what is public about them.

Everything here was published with the dataset, before and apart from any run on it: sizes,
classes, pixel means. Using it costs no privacy; nothing of it is read off the records.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from tacit.errors import DataError, in_words
from tacit.records import Records

# Returns the training and the test records.
Loader = Callable[[], tuple[Records, Records]]

_registered: dict[str, Loader] = {}


@dataclass(frozen=True)
class DataFile:
    """One file: its name, checksum and size as published, and the addresses that serve it."""

    name: str
    sha256: str
    size: int
    urls: tuple[str, ...] = ()


@dataclass(frozen=True)
class Dataset:
    """A named dataset. `variants` are alternative sets of files that hold the same records.

    `batch_sha1` are the published checksums of CIFAR-10's decoded batches. `mean` and `std` are
    of the values in [0, 1]; `lower` and `upper` bound the values as stored.
    """

    name: str
    kind: str
    folder: str
    variants: tuple[tuple[DataFile, ...], ...]
    shape: tuple[int, ...]
    num_classes: int
    train_size: int
    test_size: int
    lower: float
    upper: float
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    batch_sha1: tuple[str, ...] = ()

    @property
    def is_image(self) -> bool:
        return len(self.shape) == 3

    @property
    def has_split(self) -> bool:
        """Whether it was published as a training and a test part."""
        return self.kind in ("idx", "cifar")


def _idx(
    name: str, base: str, mean: float, std: float, rows: tuple[tuple[int, str], ...]
) -> Dataset:
    """A dataset in MNIST's format. `rows` are size and sha256 of its four files."""
    files = tuple(
        DataFile(file, sha256, size, (f"{base}/{file}",))
        for file, (size, sha256) in zip(_IDX_NAMES, rows, strict=True)
    )
    return Dataset(
        name=name,
        kind="idx",
        folder=name,
        variants=(files,),
        shape=(1, 28, 28),
        num_classes=10,
        train_size=60_000,
        test_size=10_000,
        lower=0,
        upper=255,
        mean=(mean,),
        std=(std,),
    )


_IDX_NAMES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)

# fmt: off
MNIST = _idx(
    "mnist", "https://ossci-datasets.s3.amazonaws.com/mnist", 0.1307, 0.3081, (
        (9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        (28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        (1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        (4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    ),
)
FASHION_MNIST = _idx(
    "fashion-mnist", "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com", 0.2860, 0.3530, (
        (26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
        (29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
        (4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
        (5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    ),
)

_TORONTO = "https://www.cs.toronto.edu/~kriz"
BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
_CIFAR_NPZ = tuple(DataFile(f"{name}.npz", *row) for name, row in zip(BATCHES, (
    ("990cadfb044bc6aad90a93c1446cffb29ffa4de46e81e186074e121daacece8f", 17257469),
    ("aaaf124ba73e78d78532337d56007d31975ccea52faee9f38eaa5b25eef94e9c", 17310042),
    ("22e15f67279af6a49aa40b469e740cdc740f6254b6c36033f8746c90677e1ebc", 17311484),
    ("af6087648877b0199b597f0a1db7da708aa4d3582b4c356e0d63399d55639d9e", 17288325),
    ("9a55ec099918a30e67eee43d1df7e965ff2db1e79fd512437c1096c0f205adfc", 17250695),
    ("77e057f804a55f50edb2ea708948acf2f79698aa05cc88db74db9ce2e01d408f", 17289742),
), strict=True))

CIFAR10 = Dataset(
    name="cifar10",
    kind="cifar",
    folder="cifar10",
    variants=(
        _CIFAR_NPZ,
        (DataFile("cifar-10-binary.tar.gz",
                  "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd", 170052171,
                  (f"{_TORONTO}/cifar-10-binary.tar.gz",)),),
        (DataFile("cifar-10-python.tar.gz",
                  "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce", 170498071,
                  (f"{_TORONTO}/cifar-10-python.tar.gz",)),),
    ),
    shape=(3, 32, 32),
    num_classes=10,
    train_size=50_000,
    test_size=10_000,
    lower=0,
    upper=255,
    mean=(0.49140, 0.48216, 0.44653),
    std=(0.24703, 0.24349, 0.26159),
    batch_sha1=(
        "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
        "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
        "1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
        "aab85764eb3584312d3c7f65fd2fd016e36a258e",
        "26e2849e66a845b7f1e4614ae70f4889ae604628",
        "67eb016db431130d61cd03c7ad570b013799c88c",
    ),
)

# fmt: on

TEST_FRACTION = 0.2


def _without_split(num_records: int) -> tuple[int, int]:
    """(train, test) sizes of a dataset that comes without a split."""
    test = round(TEST_FRACTION * num_records)
    return num_records - test, test


DIGITS = Dataset(
    name="digits",
    kind="digits",
    folder="",
    variants=(),
    shape=(1, 8, 8),
    num_classes=10,
    train_size=_without_split(1797)[0],
    test_size=_without_split(1797)[1],
    lower=0,
    upper=16,
)

_ADBENCH = (
    "https://raw.githubusercontent.com/Minqi824/ADBench/"
    "3dac8221081e190f157d78e93bfa8867f90d0965/adbench/datasets/Classical"
)


def _adbench(
    stem: str, records: int, features: int, lower: float, upper: float, size: int, sha256: str
) -> Dataset:
    train_size, test_size = _without_split(records)
    file = DataFile(f"{stem}.npz", sha256, size, (f"{_ADBENCH}/{stem}.npz",))
    return Dataset(
        name="adbench/" + stem.split("_", 1)[1],
        kind="adbench",
        folder="adbench",
        variants=((file,),),
        shape=(features,),
        num_classes=2,
        train_size=train_size,
        test_size=test_size,
        lower=lower,
        upper=upper,
    )


# fmt: off
ADBENCH = (
    _adbench("1_ALOI", 49_534, 27, 0, 1, 2904730,
             "792d0b5bd1147bfc9574a1974f157b39fbd4cbed8ecd04cf983fd554498ed477"),
    _adbench("5_campaign", 41_188, 62, 0, 1, 728999,
             "74dd4d0072d6c6f1aabab63bc102f9633454f32bb936fa9bcfbd38f9f2386bcd"),
    _adbench("8_celeba", 202_599, 39, 0, 1, 1700937,
             "1cadfdea14cd8d240eca715a70c09c88af8621d086a7478c63f602d97adef0b5"),
    _adbench("9_census", 299_285, 500, 0, 1, 8761866,
             "6739999359a3b8c285ea902943732c3d6a331d776e6333a7d991198bd2686b56"),
    _adbench("11_donors", 619_326, 10, 0, 1, 2938691,
             "5824ec854465f2763b4bfe3da1ae9f25ed5433b5c6e265d42e37da4f82a58679"),
    _adbench("22_magic.gamma", 19_020, 10, -9.90, 12.77, 1296704,
             "0be375984d7af9ea7a63b12206c240840d8b7daa3607021c5fb8756407dd86f1"),
    _adbench("32_shuttle", 49_097, 9, -26739, 15164, 332929,
             "26900b0f6be45d9ddb7a402c9b2f956ceda42d23a8ca4cf4406b8bc1352823d1"),
    _adbench("33_skin", 245_057, 3, -2.21, 2.09, 618680,
             "d02aa01ffc1b6bf2b8b1ac250c90e8a8eacd0cefc962940ed5cc4bf5deac9c95"),
    _adbench("47_yeast", 1_484, 8, -8.65, 10.87, 14707,
             "bbb15c873d78a4f6a589f46d0f75814595e2282d2ae7ce7779c750f276c3770d"),
)

DATASETS: dict[str, Dataset] = {
    entry.name.lower(): entry for entry in (DIGITS, MNIST, FASHION_MNIST, CIFAR10, *ADBENCH)
}


def register_dataset(name: str) -> Callable[[Loader], Loader]:
    """Register a function that returns (train, test), for `tacit.load` and `--dataset`.

    Its `Records` declare what is public about them. They are used as they are: the function
    scales them, with constants that are public.

        @tacit.data.register_dataset("my-images")
        def my_images():
            (x, y), (test_x, test_y) = read_my_files()
            return tacit.Records(x, y, 10, public_size=5000), tacit.Records(test_x, test_y, 10)
    """
    key = name.lower()
    if key in DATASETS or key.startswith("adbench/"):
        raise ValueError(f"{name!r} is the name of a published dataset; choose another name")

    def register(loader: Loader) -> Loader:
        _registered[key] = loader
        return loader

    return register


def registered_loader(name: str) -> Loader | None:
    """The function that was registered under this name."""
    return _registered.get(name.lower())


def available() -> tuple[str, ...]:
    """The names that `load` knows."""
    return (*(entry.name for entry in DATASETS.values()), *_registered)


def lookup(name: str) -> Dataset:
    """The dataset of that name. ADBench's number may be given too: adbench/47_yeast."""
    key = name.lower()
    if key.startswith("adbench/"):
        stem = key.removeprefix("adbench/").removesuffix(".npz")
        for entry in DATASETS.values():
            if entry.kind == "adbench" and stem == entry.variants[0][0].name[:-4].lower():
                return entry
        key = f"adbench/{stem}"
    if key in DATASETS:
        return DATASETS[key]
    near = difflib.get_close_matches(key, DATASETS, n=1)
    hint = f" (did you mean {DATASETS[near[0]].name!r}?)" if near else ""
    raise DataError(
        f"no dataset is named {name!r}{hint}; the known ones are {', '.join(available())}. "
        "For a file of your own use "
        + in_words("load_file(path, target)", "--data FILE --target COLUMN")
    )
