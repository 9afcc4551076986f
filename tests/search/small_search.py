"""A search of a few seconds, to be changed where a test needs it."""

from __future__ import annotations

import torch
from optuna.distributions import FloatDistribution
from torch import nn

import tacit
from tacit.search import TrialSearch, plan_trials

BUDGET = tacit.Budget(3.0, 1e-4)
SPACE = {"lr": FloatDistribution(0.05, 5, log=True)}
RATE, STEPS, TRIALS = 0.2, 5, 4


def some_records(count=400, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    return tacit.Records(inputs, (inputs[:, 0] > 0).long(), 2, public_size=count)


def build(settings, stage):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=stage.learning_rate(settings["lr"]))
    query = tacit.PerSampleClip(0.5)
    return tacit.Trainer(
        model,
        tacit.losses.CrossEntropy(),
        query,
        stage.sampler(),
        optimizer,
        callbacks=(),
        **stage.privacy(),
    )


def small_plan(budget=BUDGET, trials=TRIALS, trial_steps=3):
    return plan_trials(budget, RATE, STEPS, trials=trials, trial_steps=trial_steps)


def small_search(build=build, plan=None, records=None, **more):
    plan = small_plan() if plan is None else plan
    records = some_records() if records is None else records
    return TrialSearch(build, SPACE, records, plan, **({"usual": {"lr": 0.5}} | more))
