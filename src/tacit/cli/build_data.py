"""From settings to the records of a run: loading, features, the public share, private scaling."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import dp_accounting as dpa
import torch

from tacit.budget import Relation
from tacit.cli.settings import DataSettings, TrainSettings
from tacit.data.download import cache_folder
from tacit.data.loading import load, public_scalers
from tacit.data.preprocessing import Preprocessing
from tacit.data.private_scaling import release_channel_scaler, release_statistics
from tacit.data.scaling import PublicScaler, Scaler, UnitNorm
from tacit.data.scattering import ScatteringMap, scattering_features, usual_size
from tacit.data.splits import split_public
from tacit.data.tables import file_scalers, load_file
from tacit.ledger import Ledger
from tacit.records import Records
from tacit.training.trainer import Trainer

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
    public_norms = s.clipping.layerwise != "none" or s.clipping.groups is not None
    with_public = public_norms or s.batch_clipping.statistics == "public"
    by_id = with_public or s.query.query == "batch-clip"
    _check_scaling(s, with_public)
    if s.data.data is not None and by_id and relation is not Relation.REPLACE_ONE:
        # Without one row all later ones have other numbers: the neighbour would have other
        # mini-sets and other public records. With a row replaced, all numbers stay.
        raise ValueError(
            f"--relation is {relation.value}, and mini-sets and public records of {s.data.data} "
            "are chosen by row number, which changes for all later rows when one is removed; give "
            "--relation replace-one"
        )
    train, test = load_records(s.data)
    stages: list[Scaler | ScatteringMap] = list(scalers_of(s.data))
    notes = []
    if s.data.features != "as-they-are":
        mirror = s.data.features == "mirrored-scattering"
        groups = FEATURE_GROUPS if s.data.scale_noise is None else None
        channels, height, width = train.shape
        stages.append(ScatteringMap((channels, height, width), mirror=mirror, groups=groups))
        train, test = (
            scattering_features(
                side,
                groups=groups,
                mirror=mirror,
                cache=cache_folder() / "scattering",
                device=device,
            )
            for side in (train, test)
        )
        how = "normalised in groups of channels" if groups else "standardised channel by channel"
        notes.append(f"inputs are scattering features of each record alone, which is free, {how}")
        if mirror:
            notes.append("an image and its mirror image have the same features, their mean")
    if by_id:
        _check_row_numbers(s.data, train)
    public = None
    if with_public:
        train, public = _without_public(train, s.data.public_share or USUAL_PUBLIC_SHARE)
    elif s.data.public_share is not None:
        raise ValueError(
            f"--public-share is {s.data.public_share:g}, and nothing in this run uses public "
            "records; leave it out, or give --layerwise, --groups or --statistics public"
        )
    if public_norms:
        notes.append("constants or groups of the clipped blocks are estimated on public records")
    size = train.require_public_size("a sampling rate")
    return RunData(train, public, test, Preprocessing(tuple(stages)), size, tuple(notes))


def load_records(d: DataSettings) -> tuple[Records, Records]:
    """Train and test records, before any statistics are released."""
    scale: Scaler | None = UnitNorm() if d.unit_norm else None
    if d.data is None:
        return load(d.dataset or "digits", scale=scale or "public")
    if d.scale_noise is not None and d.features == "as-they-are" and d.feature_range is None:
        raise ValueError("--scale-noise needs --feature-range: the noise is in proportion to it")
    assert d.target is not None
    train, test = load_file(
        d.data,
        d.target,
        classes=d.classes,
        public_size=d.public_size,
        scale=scale,
        feature_range=d.feature_range,
        test_path=d.test_data,
    )
    if train.public_size is None:
        notes = tuple(n for n in train.notes if "public_size" not in n)
        rows = len(train) + (len(test) if d.test_data is None else 0)
        train = replace(train, public_size=len(train), num_ids=rows, notes=(*notes, SIZE_NOTE))
    return train, test


def scalers_of(d: DataSettings) -> tuple[Scaler, ...]:
    """The scalers between the records as they are stored and those of `load_records`."""
    scale: Scaler | None = UnitNorm() if d.unit_norm else None
    if d.data is None:
        return public_scalers(d.dataset or "digits", scale or "public")
    return file_scalers(scale, d.feature_range)


def unscaled_records(d: DataSettings) -> tuple[Records, Records]:
    """The same records as they are stored, for a saved preprocessing to be applied to."""
    if d.data is None:
        return load(d.dataset or "digits", scale=None)
    return load_records(replace(d, feature_range=None, unit_norm=False, scale_noise=None))


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
    assert isinstance(trainer.evaluate_on, Records)
    assert s.data.scale_noise is not None
    train, test = trainer.sampler.records, trainer.evaluate_on
    trainer.ledger.begin(trainer.plan, name=trainer.run_name, budget=trainer.budget)
    (event,) = scaling_event(s.data)
    trainer.ledger.claim(event, "scaling statistics")
    seed = s.training.seed
    how: dict[str, Any] = {
        "noise_multiplier": s.data.scale_noise,
        "public_size": train.require_public_size("a noisy mean"),
        "relation": trainer.budget.relation,
        "seed": None if seed is None else seed + 1,  # not the seed of the gradients' noise
    }
    if s.data.features == "as-they-are":
        # The declared range has been mapped onto [-1, 1] when the file was read.
        scaler, _ = release_statistics(train.inputs, -1.0, 1.0, **how)
    else:
        bound = usual_size(train.shape[0])
        scaler, _ = release_channel_scaler(train.inputs, size_bound=bound, **how)
    extra = [note for note in trainer.notes if note not in train.notes]
    note = scaler.describe().replace("must be charged", "is charged")
    train = replace(train, inputs=scaler(train.inputs), notes=(*train.notes, note))
    trainer.sampler.records = train
    trainer.evaluate_on = replace(test, inputs=scaler(test.inputs))
    trainer.notes = [*train.notes, *extra]
    return scaler


def _without_public(records: Records, share: float) -> tuple[Records, Records]:
    public, private = split_public(records, share)
    return private, public


def _check_scaling(s: TrainSettings, with_public: bool) -> None:
    """Raise where other records than the sampler's would have to be scaled in the same way."""
    if s.data.scale_noise is None:
        return
    if with_public or s.batch_clipping.statistics == "released":
        what = "public records" if with_public else "statistics that are released at the end"
        raise ValueError(
            f"--scale-noise is {s.data.scale_noise:g}, and {what} would not be scaled as the "
            "private records are; leave --scale-noise out, and give --feature-range or --unit-norm"
        )


def _check_row_numbers(d: DataSettings, records: Records) -> None:
    """Raise if rows of a file have numbers past the declared size: they would be in no mini-set."""
    declared = d.public_size
    if declared is not None and len(records) and int(records.record_ids.max()) >= declared:
        raise ValueError(
            f"--public-size is {declared}, and {d.data} has more rows; mini-sets and public "
            "records are chosen by row number: declare at least as many as there may be, test "
            "records included"
        )
