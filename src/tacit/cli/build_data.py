"""From settings to the records of a run: loading, features, the public share, private scaling."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dp_accounting as dpa
import torch

from tacit.budget import Relation
from tacit.cli.settings import DataSettings, TrainSettings
from tacit.data.download import cache_folder
from tacit.data.loading import load, public_scalers
from tacit.data.preprocessing import Preprocessing, load_preprocessing
from tacit.data.private_scaling import release_channel_scaler, release_statistics
from tacit.data.scaling import PublicScaler, Scaler, UnitNorm
from tacit.data.scattering import ScatteringMap, scattering_features, usual_size
from tacit.data.splits import split_public
from tacit.data.tables import file_scalers, load_file
from tacit.ledger import Ledger
from tacit.records import Records
from tacit.training.trainer import Trainer

USUAL_DATASET = "digits"
USUAL_PUBLIC_SHARE = 0.1
FEATURE_GROUPS = 27
SIZE_NOTE = (
    "the number of records was read from the file and is treated as public; "
    "declare it with --public-size"
)


@dataclass(frozen=True)
class RunData:
    """The records of a run, and the preprocessing that made them. `size` is declared public."""

    private: Records
    public: Records | None
    test: Records
    preprocessing: Preprocessing
    size: int
    notes: tuple[str, ...]


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
    return RunData(train, public, test, Preprocessing(tuple(stages)), size, tuple(notes))


def load_records(d: DataSettings, scaled: bool = True) -> tuple[Records, Records]:
    """Train and test records, before any statistics are released.

    Without `scaled` they are as stored, for a saved preprocessing to be applied to.
    """
    unit_norm = UnitNorm() if d.unit_norm and scaled else None
    if d.data is None:
        return load(d.dataset or USUAL_DATASET, scale=(unit_norm or "public") if scaled else None)
    feature_range = d.feature_range if scaled else None
    if scaled and d.scale_noise is not None and d.features == "as-they-are" and not feature_range:
        raise ValueError("--scale-noise needs --feature-range: the noise is in proportion to it")
    assert d.target is not None
    train, test = load_file(
        d.data,
        d.target,
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


def scalers_of(d: DataSettings) -> tuple[Scaler, ...]:
    """The scalers between the records as they are stored and those of `load_records`."""
    unit_norm = UnitNorm() if d.unit_norm else None
    if d.data is None:
        return public_scalers(d.dataset or USUAL_DATASET, unit_norm or "public")
    return file_scalers(unit_norm, d.feature_range)


def scaling_event(d: DataSettings) -> tuple[dpa.DpEvent, ...]:
    """What releasing the scaling statistics costs; it is charged before they are computed."""
    return () if d.scale_noise is None else (dpa.GaussianDpEvent(d.scale_noise),)


def release_scaling(trainer: Trainer, s: TrainSettings) -> PublicScaler:
    """Release a mean and a standard deviation once per run, scale the records, return the scaler.

    The plan charges one Gaussian. Another release under the same name would be one that nobody
    charged, so the ledger has the claim on disk before a record is read. If the run is resumed,
    the claim is refused.
    """
    assert isinstance(trainer.ledger, Ledger)
    train = trainer.sampler.records
    trainer.ledger.begin(trainer.plan, name=trainer.run_name, budget=trainer.budget)
    (event,) = scaling_event(s)
    trainer.ledger.claim(event, "scaling statistics")
    how: dict[str, Any] = {
        "noise_multiplier": s.scale_noise,
        "public_size": train.require_public_size("a noisy mean"),
        "relation": trainer.budget.relation,
        "seed": None if s.seed is None else s.seed + 1,  # not the seed of the gradients' noise
    }
    if s.features == "as-they-are":
        # The declared range has been mapped onto [-1, 1] when the file was read.
        scaler, _ = release_statistics(train.inputs, -1.0, 1.0, **how)
    else:
        bound = usual_size(train.shape[0])
        scaler, _ = release_channel_scaler(train.inputs, size_bound=bound, **how)
    _scale(trainer, scaler)
    return scaler


def scale_again(trainer: Trainer, folder: Path) -> Preprocessing:
    """Scale the records of a resumed run by what it released before: no other release is made."""
    preprocessing = load_preprocessing(folder)
    scaler = preprocessing.stages[-1] if preprocessing.stages else None
    if not isinstance(scaler, PublicScaler):
        raise ValueError(f"{folder} does not hold the scaling that the run released; restore it")
    _scale(trainer, scaler)
    return preprocessing


def _scale(trainer: Trainer, scaler: PublicScaler) -> None:
    train, test = trainer.sampler.records, trainer.evaluate_on
    assert isinstance(test, Records)
    extra = [note for note in trainer.notes if note not in train.notes]
    note = scaler.describe().replace("must be charged", "is charged")
    train = replace(train, inputs=scaler(train.inputs), notes=(*train.notes, note))
    trainer.sampler.records = train
    trainer.evaluate_on = replace(test, inputs=scaler(test.inputs))
    trainer.notes = [*train.notes, *extra]
