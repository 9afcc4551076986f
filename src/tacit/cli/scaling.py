"""Scaling statistics of a run of `tacit train`: charged, claimed, and only then computed."""

from __future__ import annotations

from tacit.budget import Budget
from tacit.cli.train_data import DataOptions, standardise, statistics_event
from tacit.data.scaling import PublicScaler
from tacit.ledger import Ledger
from tacit.training.trainer import Trainer

WHAT = "scaling statistics"


def scale_privately(
    trainer: Trainer, about: DataOptions, budget: Budget, seed: int | None
) -> PublicScaler:
    """Release a mean and a std once a run, however often it is resumed, and return the scaler.

    The plan charges one Gaussian. A second release under the same name would be one that nobody
    charged, so the ledger has the claim on disk before a record is read.
    """
    assert isinstance(trainer.ledger, Ledger)
    assert trainer.evaluate_on is not None
    trainer.ledger.begin(trainer.plan, name=trainer.run_name, budget=budget)
    (event,) = statistics_event(about)
    trainer.ledger.claim(event, WHAT)
    extra = [note for note in trainer.notes if note not in trainer.sampler.records.notes]
    own_seed = None if seed is None else seed + 1  # not the seed of the gradients' noise
    trainer.sampler.records, trainer.evaluate_on, scaler = standardise(
        trainer.sampler.records, trainer.evaluate_on, about, budget.relation, own_seed
    )
    trainer.notes = [*trainer.sampler.records.notes, *extra]
    return scaler


def refuse_scaled(about: DataOptions, public: bool, released: bool) -> None:
    """Raise where other records than the sampler's would have to be scaled in the same way."""
    if about.scale_noise is None or not (public or released):
        return
    what = "public records" if public else "statistics that are released at the end"
    raise ValueError(
        f"--scale-noise is {about.scale_noise:g}, and {what} would not be scaled as the private "
        "records are; leave --scale-noise out, and give --feature-range or --unit-norm"
    )
