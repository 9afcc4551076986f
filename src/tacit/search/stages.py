"""What a search hands to the function that builds its trainers, and what it takes back."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch

from tacit.accounting.plan import Plan
from tacit.accounting.pld import gaussian_epsilon
from tacit.budget import Budget
from tacit.errors import PlanChanged
from tacit.noise import Noise
from tacit.records import Records
from tacit.sampling.poisson import Poisson, PoissonSampler
from tacit.sampling.sampler import SamplerOptions
from tacit.training.preconditions import LedgerRun
from tacit.training.run import Run
from tacit.training.trainer import Trainer

Settings = Mapping[str, Any]  # by name, as the space of the search declares them


@dataclass(frozen=True)
class SearchStage:
    """One training of a search: a trial, or the final run. Make the trainer with what is here.

        def build(settings, stage):
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=stage.learning_rate(settings["lr"]))
            return tacit.Trainer(model, loss, query, stage.sampler(), optimizer, **stage.privacy())

    `privacy()` are the trainer's budget, noise, ledger and seed. A trainer that has others is
    refused. `is_final` says which of the two it is: a trial must not evaluate on held-out records.
    """

    records: Records
    plan: Plan
    budget: Budget
    ledger: LedgerRun | None = None
    seed: int | None = None
    is_final: bool = False
    transfer: Transfer | None = field(default=None, repr=False)

    @property
    def steps(self) -> int:
        assert self.plan.steps is not None
        return self.plan.steps

    def sampler(self, **options: Unpack[SamplerOptions]) -> PoissonSampler:
        """The Poisson sampler over the stage's records; options are those of any sampler."""
        assert isinstance(self.plan.scheme, Poisson)
        return PoissonSampler(self.records, self.plan.scheme.rate, self.steps, **options)

    def privacy(self) -> dict[str, Any]:
        noise = Noise(self.plan.noise_multiplier)
        return {"budget": self.budget, "noise": noise, "ledger": self.ledger, "seed": self.seed}

    def learning_rate(self, of_final_run: float, momentum: float = 0.0) -> float:
        """The rate of this stage that stands for `of_final_run` in the final run.

        In the final run it is that rate itself. A trial is shorter and noisier: see `Transfer`.
        For SGD. Adam divides by the size of the noisy gradient itself: give `adam_rate`.
        """
        return of_final_run * (1.0 if self.transfer is None else self.transfer.factor(momentum))

    def adam_rate(self, of_final_run: float) -> float:
        """The same for Adam, whose steps have one length whatever the noise is."""
        if self.transfer is None:
            return of_final_run
        return of_final_run * math.sqrt(self.transfer.final_steps / self.transfer.trial_steps)


@dataclass(frozen=True)
class Transfer:
    """From a learning rate η of N steps to the one that stands for it in a trial of n steps.

    A run's weights move by about η·D(N, β)·ḡ along the mean gradient, D(N, β) = Σ_t (1 − β^t) /
    (1 − β) with momentum β, and by η·D(N, β)·C / (records·μ) at random, where μ is the privacy
    parameter of the Gaussian that the run amounts to. The best η·D is in proportion to μ where
    noise is what limits it [Panda et al. 2024: η·T in proportion to ε]. So

        η_trial = η_final · D(N, β) / D(n, β) · μ_trial / μ_final.

    It is a rule of thumb about accuracy. No guarantee depends on it.
    """

    final_steps: int
    trial_steps: int
    final_mu: float
    trial_mu: float

    def factor(self, momentum: float) -> float:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum}; give a number from 0 and below 1")
        moved = [_displacement(n, momentum) for n in (self.final_steps, self.trial_steps)]
        return moved[0] / moved[1] * self.trial_mu / self.final_mu


def _displacement(steps: int, momentum: float) -> float:
    """Σ_{t=1}^{n} (1 − β^t) / (1 − β)."""
    geometric = momentum * (1 - momentum**steps) / (1 - momentum)
    return (steps - geometric) / (1 - momentum)


def equivalent_mu(epsilon: float, delta: float) -> float:
    """1/z of the one Gaussian mechanism that has this ε at δ."""
    low, high = math.log(1e-3), math.log(1e6)  # of log z
    for _ in range(60):
        middle = (low + high) / 2
        too_much = gaussian_epsilon(math.exp(middle), delta) > epsilon
        low, high = (middle, high) if too_much else (low, middle)
    return math.exp(-high)


def built(
    build: Callable[[Settings, SearchStage], Trainer], settings: Settings, stage: SearchStage
) -> Trainer:
    """The trainer of the stage; raises PlanChanged if it is for another plan or other records."""
    trainer = build(dict(settings), stage)
    if not isinstance(trainer, Trainer):
        raise TypeError(f"build returned {type(trainer).__name__}; return a tacit.Trainer")
    if trainer.plan != stage.plan:
        raise PlanChanged(
            f"the search charged for {stage.plan}, and build made a trainer for {trainer.plan}; "
            "use stage.sampler() and **stage.privacy(), and a query that bounds records"
        )
    ids = trainer.sampler.records.record_ids.cpu()
    if not torch.equal(ids, stage.records.record_ids.cpu()):
        raise PlanChanged(
            "build made a trainer over other records than the stage's; use stage.sampler()"
        )
    if trainer.seed != stage.seed:
        raise PlanChanged(
            f"build gave the trainer the seed {trainer.seed}, and two trials with one seed have "
            "the same noise, which their difference would cancel; use **stage.privacy()"
        )
    if trainer.checkpoint is not None and not stage.is_final:
        raise PlanChanged("a trial has a checkpoint; a trial that is killed is not resumed")
    if trainer.evaluate_on is not None and not stage.is_final:
        raise PlanChanged(
            "build gave a trial records to evaluate on, whose metrics nobody would charge; give "
            "evaluate_on where stage.is_final"
        )
    if not stage.is_final and (trainer.ledger is not None):
        raise PlanChanged(
            "build gave a trial a ledger of its own; use **stage.privacy(): the search has charged "
            "for it"
        )
    return trainer


def seed_of_trial(seed: int | None, name: str) -> int | None:
    """A seed for each training of a seeded search: trials are on ledgers of their own, where equal
    seeds would draw equal noise."""
    if seed is None:
        return None
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8, person=b"tacit search")
    return int.from_bytes(digest.digest(), "little") >> 2


@dataclass(frozen=True)
class SearchResult:
    """The final run, the settings that it was made with, and what the search cost (`facts`).

    `run.epsilon` is the ε of everything that the search let out, for the budget's δ.
    """

    run: Run
    settings: dict[str, Any]
    facts: dict[str, Any]
