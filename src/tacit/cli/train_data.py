"""From the data options of `tacit train` to records whose constants are declared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import dp_accounting as dpa

from tacit.budget import Relation
from tacit.data.loading import load, public_scalers
from tacit.data.private_scaling import release_channel_scaler, release_statistics
from tacit.data.scaling import PublicScaler, Scaler, UnitNorm
from tacit.data.scattering import usual_size
from tacit.data.tables import file_scalers, load_file
from tacit.records import Records


@dataclass(frozen=True)
class DataOptions:
    """What the user said about the data.

    `scale_noise` asks for scaling statistics that are released with noise: of each feature in its
    declared range, or, `by_channel`, of each channel of scattering features.
    """

    dataset: str
    file: Path | None
    target: str | None
    test_file: Path | None
    classes: tuple[str, ...]
    public_size: int | None
    feature_range: tuple[float, float] | None
    unit_norm: bool
    scale_noise: float | None
    by_channel: bool = False


def class_names(text: str | None) -> tuple[str, ...]:
    """The names in --classes, without the blanks around them."""
    if text is None:
        return ()
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError(f"--classes is {text!r}, and one of its names is empty; give a,b,c")
    return names


SIZE_NOTE = (
    "the number of records was read from the file and is treated as public; "
    "declare it with --public-size"
)


def load_records(options: DataOptions) -> tuple[Records, Records]:
    """Train and test records, before any statistics are released."""
    scale: Scaler | None = UnitNorm() if options.unit_norm else None
    if options.file is None:
        if options.target or options.test_file or options.classes or options.feature_range:
            raise ValueError("--target, --test-data, --classes and --feature-range go with --data")
        return load(options.dataset, scale=scale or "public")
    if options.target is None:
        raise ValueError(f"--data {options.file} needs --target: the column that holds the classes")
    by_range = options.scale_noise is not None and not options.by_channel
    if by_range and options.feature_range is None:
        raise ValueError("--scale-noise needs --feature-range: the noise is in proportion to it")
    train, test = load_file(
        options.file,
        options.target,
        classes=options.classes or None,
        public_size=options.public_size,
        scale=scale,
        feature_range=options.feature_range,
        test_path=options.test_file,
    )
    if train.public_size is None:
        notes = tuple(n for n in train.notes if "public_size" not in n)
        rows = len(train) + (len(test) if options.test_file is None else 0)
        train = replace(train, public_size=len(train), num_ids=rows, notes=(*notes, SIZE_NOTE))
    return train, test


def scalers_of(options: DataOptions) -> tuple[Scaler, ...]:
    """The scalers between the records as they are stored and those of `load_records`."""
    scale: Scaler | None = UnitNorm() if options.unit_norm else None
    if options.file is None:
        return public_scalers(options.dataset, scale or "public")
    return file_scalers(scale, options.feature_range)


def unscaled(options: DataOptions) -> DataOptions:
    """The same data as it is stored, for a saved preprocessing to be applied to."""
    return replace(options, feature_range=None, unit_norm=False, scale_noise=None)


def refuse_row_numbers(options: DataOptions, relation: Relation, by_id: bool) -> None:
    """Raise where ids that are row numbers would have to stay when a row is taken out.

    Mini-sets and the public share go by record id. The rows of a file have no ids but their
    numbers, and without one row all later ones have others: the neighbour would have other sets,
    and other public records. With a row replaced, all numbers stay.
    """
    if options.file is None or not by_id or relation is Relation.REPLACE_ONE:
        return
    raise ValueError(
        f"--relation is {relation.value}, and the rows of {options.file} are known by their "
        "numbers, by which mini-sets and public records are chosen: a row fewer would move all "
        "later ones; give --relation replace-one"
    )


def require_declared_rows(options: DataOptions, records: Records) -> None:
    """Raise if rows of a file have numbers past what was declared: they would be in no mini-set."""
    declared = options.public_size
    if declared is not None and len(records) and int(records.record_ids.max()) >= declared:
        raise ValueError(
            f"--public-size is {declared}, and {options.file} has more rows; mini-sets and public "
            "records go by row number: declare at least as many as there may be, test records "
            "included"
        )


def statistics_event(options: DataOptions) -> tuple[dpa.DpEvent, ...]:
    """What releasing the scaling statistics will cost: to be charged before they are computed."""
    if options.scale_noise is None:
        return ()
    return (dpa.GaussianDpEvent(options.scale_noise),)


def standardise(
    train: Records, test: Records, options: DataOptions, relation: Relation, seed: int | None
) -> tuple[Records, Records, PublicScaler]:
    """Scale by a mean and a std released with noise. Call it only once they are charged.

    The scaler comes with the records, to be kept: it was paid for.
    """
    assert options.scale_noise is not None
    size = train.require_public_size("a noisy mean")
    if options.by_channel:
        scaler, _ = release_channel_scaler(
            train.inputs,
            size_bound=usual_size(train.shape[0]),
            noise_multiplier=options.scale_noise,
            public_size=size,
            relation=relation,
            seed=seed,
        )
    else:
        scaler, _ = release_statistics(
            train.inputs,
            -1.0,
            1.0,  # the declared range has been mapped onto [-1, 1] when the file was read
            noise_multiplier=options.scale_noise,
            public_size=size,
            relation=relation,
            seed=seed,
        )
    note = scaler.describe().replace("must be charged", "is charged")
    return (
        replace(train, inputs=scaler(train.inputs), notes=(*train.notes, note)),
        replace(test, inputs=scaler(test.inputs)),
        scaler,
    )
