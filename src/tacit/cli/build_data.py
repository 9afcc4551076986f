"""From settings to the records of a run: loading, features, the public share, private scaling."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import dp_accounting as dpa
import torch
import typer
from scipy.optimize import brentq

from tacit.accounting.pld import gaussian_epsilon
from tacit.budget import Relation
from tacit.cli import run_directory
from tacit.cli.settings import USUAL_DATASET, DataSettings, TrainSettings
from tacit.data.download import cache_folder
from tacit.data.loading import load, public_scalers
from tacit.data.preprocessing import FILE as PREPROCESSING
from tacit.data.preprocessing import Preprocessing, load_preprocessing
from tacit.data.private_counts import MergedCategories, categories_of, release_category_counts
from tacit.data.private_ranges import ColumnRanges, release_ranges
from tacit.data.private_scaling import release_channel_scaler, release_statistics
from tacit.data.scaling import PublicScaler, Scaler, UnitNorm
from tacit.data.scattering import ScatteringMap, scattering_features, usual_size
from tacit.data.splits import split_public
from tacit.data.table_schema import Schema
from tacit.data.tables import file_scalers, load_file, unreleased_note, unscaled_note
from tacit.errors import BudgetExceeded
from tacit.ledger import Ledger
from tacit.records import Records
from tacit.training.trainer import Trainer

USUAL_PUBLIC_SHARE = 0.1
FEATURE_GROUPS = 27
RANGES_SHARE = 0.1  # of the budget, as 1/z²
LEAST_SIGNAL = 4.0  # records, in standard deviations of the noise of one bin
UNSCALED_INPUTS = (
    "the inputs of --data are unscaled, and training suffers where their sizes differ; declare "
    "--feature-range, or a range for each column in the file of --schema"
)
# What the ledger's claims are called.
_RANGES, _COUNTS, _STATISTICS = "column ranges", "category counts", "scaling statistics"
_CHUNK = 1 << 22  # values at once
Released = TypeVar("Released", ColumnRanges, MergedCategories, PublicScaler)
SIZE_NOTE = (
    "the number of records was read from the file and is treated as public; "
    "declare it with --public-size"
)


@dataclass(frozen=True)
class RunData:
    """The records of a run, and the preprocessing that made them. `size` is declared public.

    With a schema, the preprocessing takes `schema.inputs(table)`. The task is one of
    `tacit.data.table_schema.TASKS`. `releases` are the Gaussians that preprocessing costs: that of
    the ranges of the entries `ranges_of`, if any, that of category counts, if `counts`, then that
    of a mean and a std.
    """

    private: Records
    public: Records | None
    test: Records
    preprocessing: Preprocessing
    size: int
    notes: tuple[str, ...]
    schema: Schema | None = None
    task: str = "classification"
    releases: tuple[dpa.GaussianDpEvent, ...] = ()
    ranges_of: tuple[int, ...] = ()
    counts: bool = False


def run_data(s: TrainSettings, relation: Relation, device: torch.device) -> RunData:
    """Load and transform the records, and split off public ones if anything uses them."""
    public_norms = s.layerwise != "none" or s.groups is not None
    with_public = public_norms or s.statistics == "public"
    by_row = s.data is not None and (with_public or s.query == "batch-clip")
    if s.public_share is not None and not with_public:
        raise ValueError(
            f"--public-share is {s.public_share:g}, and nothing in this run uses public "
            "records; leave it out, or give --layerwise, --groups or --statistics public"
        )
    if s.scale_noise is not None and (with_public or s.statistics == "released"):
        what = "public records" if with_public else "statistics that are released at the end"
        raise ValueError(
            f"--scale-noise is {s.scale_noise:g}, and {what} would not be scaled as the "
            "private records are; leave --scale-noise out, and give --feature-range or --unit-norm"
        )
    if by_row and relation is not Relation.REPLACE_ONE:
        # Without one row all later ones have other numbers: the neighbour would have other
        # mini-sets and other public records. With a row replaced, all numbers stay.
        raise ValueError(
            f"--relation is {relation.value}, and mini-sets and public records of {s.data} "
            "are chosen by row number, which changes for all later rows when one is removed; give "
            "--relation replace-one"
        )
    train, test = load_records(s)
    declared = s.public_size if by_row else None
    if declared is not None and len(train) and int(train.record_ids.max()) >= declared:
        # Rows with numbers past the declared size would be in no mini-set.
        raise ValueError(
            f"--public-size is {s.public_size}, and {s.data} has more rows; mini-sets and public "
            "records are chosen by row number: declare at least as many as there may be, test "
            "records included"
        )
    stages: list[Scaler | ScatteringMap] = list(scalers_of(s))
    notes = []
    if s.features != "as-they-are":
        mirror = s.features == "mirrored-scattering"
        groups = FEATURE_GROUPS if s.scale_noise is None else None
        channels, height, width = train.shape
        stages.append(ScatteringMap((channels, height, width), mirror=mirror, groups=groups))
        options: dict[str, Any] = {"groups": groups, "mirror": mirror, "device": device}
        cache = cache_folder() / "scattering"
        train, test = (scattering_features(side, cache=cache, **options) for side in (train, test))
        how = "normalised in groups of channels" if groups else "standardised channel by channel"
        notes.append(f"inputs are scattering features of each record alone, which is free, {how}")
        if mirror:
            notes.append("an image and its mirror image have the same features, their mean")
    public = None
    if with_public:
        public, train = split_public(train, s.public_share or USUAL_PUBLIC_SHARE)
    if public_norms:
        notes.append("constants or groups of the clipped blocks are estimated on public records")
    size = train.require_public_size("a sampling rate")
    preprocessing = Preprocessing(tuple(stages))
    schema = schema_for(s)
    data = RunData(
        *(train, public, test, preprocessing, size, tuple(notes)),
        schema=schema,
        task="classification" if schema is None else schema.task,
        releases=() if s.scale_noise is None else (dpa.GaussianDpEvent(s.scale_noise),),
    )
    return range_releases(s, count_releases(s, data))


def load_records(d: DataSettings, scaled: bool = True) -> tuple[Records, Records]:
    """Train and test records, before any statistics are released.

    Without `scaled` they are as stored, for a saved preprocessing to be applied to.
    """
    unit_norm = UnitNorm() if d.unit_norm and scaled else None
    if d.data is None:
        return load(d.dataset or USUAL_DATASET, scale=(unit_norm or "public") if scaled else None)
    feature_range = d.feature_range if scaled else None
    schema = schema_for(d)
    declared = schema is not None or feature_range is not None
    if scaled and d.scale_noise is not None and d.features == "as-they-are" and not declared:
        raise ValueError(
            "--scale-noise needs --feature-range, or a --schema: the noise is in proportion to the "
            "range"
        )
    if scaled and unit_norm and schema is not None and schema.released_entries:
        raise ValueError(
            "--unit-norm would come before the ranges that the file of --schema leaves to be "
            "released; declare them there, or leave --unit-norm out"
        )
    train, test = load_file(
        d.data,
        d.target,
        schema=schema,
        classes=d.classes,
        public_size=d.public_size,
        scale=unit_norm,
        feature_range=feature_range,
        test_path=d.test_data,
    )
    if train.public_size is None:
        notes = tuple(n for n in train.notes if "public_size" not in n)
        rows = len(train) + (len(test) if d.test_data is None else 0)
        train = replace(train, public_size=len(train), num_ids=rows, notes=(*notes, SIZE_NOTE))
    return train, test


def schema_for(d: DataSettings) -> Schema | None:
    """The schema of --data, with the target of --target, or None where there is none."""
    if d.schema is None:
        if d.data is not None and d.target is None:
            raise ValueError(
                f"--data is {d.data}, which needs --target, the column that holds the classes, or "
                "--schema, the file that says what the columns mean"
            )
        return None
    schema = Schema.read(d.schema)
    if d.target is not None:
        schema = schema.with_target(schema.named_in(d.target))
    if not schema.target:
        raise ValueError(f"--schema is {d.schema}, which names no target; give --target")
    return schema


def scalers_of(d: DataSettings) -> tuple[Scaler, ...]:
    """The scalers between the records as they are stored and those of `load_records`."""
    unit_norm = UnitNorm() if d.unit_norm else None
    if d.data is None:
        return public_scalers(d.dataset or USUAL_DATASET, unit_norm or "public")
    return file_scalers(unit_norm, d.feature_range)


def count_releases(s: TrainSettings, data: RunData) -> RunData:
    """The same, with the release of category counts that --category-noise asks for."""
    if s.category_noise is None:
        return data
    assert data.schema is not None
    why = _not_as_the_private(s, data)
    if not categories_of(data.schema):
        why = "the file of --schema has no categorical column beside the target"
    elif s.unit_norm:
        why = "--unit-norm would come before"
    if why:
        raise ValueError(f"--category-noise is {s.category_noise:g}, and {why}; leave one out")
    event = dpa.GaussianDpEvent(s.category_noise)
    return replace(data, releases=(event, *data.releases), counts=True)


def _not_as_the_private(s: TrainSettings, data: RunData) -> str:
    """Which records would not go through what is released for the private ones; empty for none."""
    if data.public is None and s.statistics != "released":
        return ""
    what = (
        "public records" if data.public is not None else "statistics that are released at the end"
    )
    return f"{what} would not be scaled as the private records are"


def range_releases(s: TrainSettings, data: RunData) -> RunData:
    """The same, with the columns whose ranges are to be released, and what that costs.

    These are the columns that a schema leaves to be released and, without a schema, all those of a
    table whose range nobody declared. Which they are, and the noise, follow from settings and from
    public numbers alone.
    """
    entries = _undeclared(s, data)
    if not entries:
        if s.range_noise:
            raise ValueError(
                f"--range-noise is {s.range_noise:g}, and no column of this run has a range to be "
                "released; leave it out"
            )
        return _warned(data, UNSCALED_INPUTS) if unscaled_note() in data.private.notes else data
    asked = data.schema is not None or bool(s.range_noise)
    z = s.range_noise
    if z is None and s.noise_multiplier != 0:
        z = usual_range_noise(s.epsilon, s.delta)
    why = ""
    too_few = bool(z) and len(entries) * 2 * (LEAST_SIGNAL * (z or 0)) ** 2 > data.size**2
    crowd = f"{data.size} records are too few for {len(entries)} columns at this budget"
    if not z:
        why = "--range-noise is 0" if s.range_noise == 0 else "--noise-multiplier is 0"
    elif _not_as_the_private(s, data):
        why = _not_as_the_private(s, data)
    elif s.unit_norm:
        why = "--unit-norm would come before"
    elif too_few and not asked:
        why = crowd
    if why and asked:
        raise ValueError(
            f"the ranges of {len(entries)} columns are to be released, and {why}; declare them "
            "with --feature-range, or in the file of --schema"
        )
    if why:
        return _warned(data, f"{UNSCALED_INPUTS}; their ranges were not released either: {why}")
    assert z is not None
    event = dpa.GaussianDpEvent(z)
    data = replace(data, releases=(event, *data.releases), ranges_of=entries)
    if too_few:
        return _warned(data, f"released ranges may be far off: {crowd}; declare those you can")
    return data


def _warned(data: RunData, note: str) -> RunData:
    typer.echo(f"note: {note}", err=True)
    return replace(data, notes=(*data.notes, note))


def _undeclared(s: TrainSettings, data: RunData) -> tuple[int, ...]:
    """Positions of the entries whose range nobody declared."""
    if data.schema is not None:
        return data.schema.released_entries
    as_they_are = s.features == "as-they-are" and s.feature_range is None
    if s.data is None or not as_they_are or len(data.private.shape) != 1:
        return ()
    return tuple(range(data.private.shape[0]))


def usual_range_noise(epsilon: float, delta: float) -> float:
    """z with 1/z² a tenth of what one Gaussian mechanism of the whole budget has, to 3 digits."""
    whole = brentq(
        lambda log_z: math.log(max(gaussian_epsilon(math.exp(log_z), delta), 1e-12) / epsilon),
        math.log(1e-3),
        math.log(1e6),
        xtol=1e-3,
    )
    return float(f"{math.exp(whole) / math.sqrt(RANGES_SHARE):.3g}")


def release_scaling(
    trainer: Trainer, s: TrainSettings, data: RunData, folder: Path
) -> Preprocessing:
    """Release ranges, category counts, a mean and a std, once per run; map the records by them.

    Returns the whole preprocessing. The plan charges one Gaussian for each release. Another
    release under the same name would be one that nobody charged, so the ledger has the claim on
    disk before the noise is drawn.

    A run that is killed before preprocessing.json is saved makes its releases again, with the same
    noise. Its folder holds a secret from before the first claim until they are saved, and
        key = PRF(secret, records),   noise = PRF(key, address, sum, std),   PRF = keyed BLAKE2b.
    The claims name the key. So what is released is a function of (records, secret), and to repeat
    it is post-processing of one release (`Ledger.claim`). Other records, or a secret that was lost,
    would be another release, and are refused. Sums must come out again to the last bit, as they do
    with the same versions of the libraries on the same kind of machine.

    The caller holds the folder's lock (`only_process`), so that no two processes are here at once
    for one folder. Where a file system has no locks, two of them with the same secret would
    release the same values.
    """
    assert isinstance(trainer.ledger, Ledger)
    assert isinstance(trainer.evaluate_on, Records)
    trainer.ledger.begin(trainer.plan, name=trainer.run_name, budget=trainer.budget)
    events, preprocessing = list(data.releases), data.preprocessing
    train = trainer.sampler.records
    key = _release_key(trainer, data, folder, s.resume is not None)
    how: dict[str, Any] = {
        "public_size": train.require_public_size("a noisy mean"),
        "relation": trainer.budget.relation,
        "seed": None if s.seed is None else s.seed + 1,  # not the seed of the gradients' noise
        "key": key if s.seed is None else None,  # with a seed it is for the claims alone
    }
    if data.ranges_of:
        event = events.pop(0)
        trainer.ledger.claim(event, _RANGES, key)
        how["noise_multiplier"] = event.noise_multiplier
        ranges, _ = release_ranges(train.inputs, data.ranges_of, **how)
        ranges = _charged(ranges)
        _apply(trainer, ranges, data.schema)
        preprocessing = preprocessing.then(ranges)
    if data.counts:
        assert data.schema is not None
        event = events.pop(0)
        trainer.ledger.claim(event, _COUNTS, key)
        how["noise_multiplier"] = event.noise_multiplier
        inputs = trainer.sampler.records.inputs
        merged, _ = release_category_counts(inputs, data.schema, rare_below=s.rare_below, **how)
        merged = _charged(merged)
        _apply(trainer, merged, data.schema)
        preprocessing = preprocessing.then(merged)
    if events:
        (event,) = events
        trainer.ledger.claim(event, _STATISTICS, key)
        how["noise_multiplier"] = event.noise_multiplier
        inputs = trainer.sampler.records.inputs
        scaler: PublicScaler
        if s.features == "as-they-are":
            # The declared ranges have been mapped onto [-1, 1] when the file was read.
            scaler, _ = release_statistics(inputs, -1.0, 1.0, **how)
        else:
            bound = usual_size(train.shape[0])
            scaler, _ = release_channel_scaler(inputs, size_bound=bound, **how)
        scaler = _charged(scaler)
        _apply(trainer, scaler, data.schema)
        preprocessing = preprocessing.then(scaler)
    return preprocessing


def _release_key(trainer: Trainer, data: RunData, folder: Path, resumed: bool) -> bytes | None:
    """The key of the run's releases, or None for a run that cannot be resumed.

    The secret is written here if there is none and nothing was claimed.
    """
    if trainer.checkpoint is None:
        return None
    assert isinstance(trainer.ledger, Ledger)
    secret = run_directory.read_release_key(folder)
    if secret is None:
        first = _RANGES if data.ranges_of else _COUNTS if data.counts else _STATISTICS
        try:
            trainer.ledger.require_unclaimed(data.releases[0], first)
        except BudgetExceeded as error:
            if not resumed:
                raise
            raise BudgetExceeded(
                f"{first}: the run was charged for a release that is lost, since {folder} has "
                f"neither {PREPROCESSING}, which holds it, nor {run_directory.RELEASE_KEY}, which "
                "could repeat it; restore one of them, or start another run"
            ) from error
        secret = run_directory.write_release_key(folder)
    inputs = trainer.sampler.records.inputs
    digest = hashlib.blake2b(key=secret, digest_size=32, person=b"tacit releases")
    counted = categories_of(data.schema) if data.schema is not None and data.counts else None
    # Another kind of device would add up the records in another order.
    kind = (tuple(inputs.shape), str(inputs.dtype), inputs.device.type)
    digest.update(repr((kind, data.ranges_of, counted)).encode())
    for part in inputs.split(max(1, _CHUNK // max(1, math.prod(inputs.shape[1:])))):
        flat = part.cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.digest()


@contextmanager
def blanks_filled(trainer: Trainer, data: RunData) -> Iterator[None]:
    """Inside of it, blanks in columns whose ranges are to be released are 0, as they will be.

    Only a column that the schema lets be missing has blanks.
    """
    train, test = trainer.sampler.records, trainer.evaluate_on
    assert isinstance(test, Records)
    if data.schema is not None and data.ranges_of:
        trainer.sampler.records, trainer.evaluate_on = (
            replace(side, inputs=_filled(side.inputs, data.ranges_of)) for side in (train, test)
        )
    try:
        yield
    finally:
        trainer.sampler.records, trainer.evaluate_on = train, test


def _filled(inputs: torch.Tensor, entries: tuple[int, ...]) -> torch.Tensor:
    filled = inputs.clone()
    filled[:, list(entries)] = filled[:, list(entries)].nan_to_num(0.0, 0.0, 0.0)
    return filled


def scale_again(trainer: Trainer, folder: Path, data: RunData) -> Preprocessing:
    """Scale the records of a resumed run by what it released before: no other release is made."""
    preprocessing, released = load_preprocessing(folder), len(data.releases)
    if len(preprocessing.stages) != len(data.preprocessing.stages) + released:
        raise ValueError(f"{folder} does not hold the scaling that the run released; restore it")
    for stage in preprocessing.stages[-released:]:
        _apply(trainer, cast(Scaler, stage), data.schema)
    return preprocessing


def _charged(scaler: Released) -> Released:
    """The same, with an origin that says that the ledger has the charge."""
    origin = scaler.origin.replace("must be charged", "is charged")
    return replace(scaler, origin=origin)


def _apply(trainer: Trainer, scaler: Scaler, schema: Schema | None) -> None:
    """Put the trainer's records through a scaler that was released, and note it."""
    before = unscaled_note() if schema is None else unreleased_note(schema)
    train, test = trainer.sampler.records, trainer.evaluate_on
    assert isinstance(test, Records)
    extra = [note for note in trainer.notes if note not in train.notes]
    kept = [note for note in train.notes if note != before]
    train = replace(train, inputs=scaler(train.inputs), notes=(*kept, scaler.describe()))
    trainer.sampler.records = train
    trainer.evaluate_on = replace(test, inputs=scaler(test.inputs))
    trainer.notes = [*train.notes, *extra]
