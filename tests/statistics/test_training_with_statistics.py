"""The Trainer: no BatchNorm without a word on its statistics, and each way out as it says."""

import json

import pytest
import torch
from norm_cases import ADD, REPLACE, buffers, image_net, images, same
from torch import nn

import tacit
from tacit.accounting.plan import epsilon_of_event
from tacit.errors import BudgetExceeded, MissingStatistics, MixesRecords, NotPublic
from tacit.queries import BatchClip
from tacit.report import save_run
from tacit.sampling import MiniSetSampler, PoissonSampler
from tacit.statistics import (
    PublicStatistics,
    ReleasedStatistics,
    declare_public,
    refuse_private_statistics,
)
from tacit.training import MovingAverage, Trainer

PUBLIC, TEST = images(16, seed=7), images(12, seed=9)


def trainer_for(model, statistics=None, *, query=None, private=None, steps=3, **more):
    private = private or images(24)
    sampler = MiniSetSampler(private, 4, steps, chosen=1, seed=0)
    settings = {
        "loss": tacit.losses.CrossEntropy(),
        "query": query or BatchClip(1.0, 4),
        "sampler": sampler,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "budget": tacit.Budget(100.0, 1e-5, more.pop("relation", ADD)),
        "noise": tacit.Noise(1.0),
        "callbacks": (),
        "statistics": statistics,
    }
    return Trainer(model, **(settings | more))


def test_batch_norm_without_statistics_is_refused_with_three_ways_out():
    with pytest.raises(
        MissingStatistics, match=r"module '1'.*PublicStat.*ReleasedStat.*make_train"
    ):
        trainer_for(image_net())
    with pytest.raises(MissingStatistics):  # also where a set is one record, and the unit too
        trainer_for(image_net(), query=BatchClip(1.0, 1))
    with pytest.raises(MissingStatistics):  # evaluation mode ends when the run begins
        trainer_for(image_net().eval())


def test_per_sample_clipping_keeps_its_own_refusal():
    sampler = PoissonSampler(images(24), expected_batch_size=8, steps=1)
    trainer = trainer_for(image_net(), query=tacit.PerSampleClip(1.0), sampler=sampler)
    with pytest.raises(MixesRecords, match="mixes records"):
        trainer.fit()


@pytest.mark.parametrize("norm", [nn.GroupNorm(1, 3), nn.BatchNorm2d(3, track_running_stats=False)])
def test_networks_without_running_statistics_need_none(norm, tmp_path):
    model = image_net()
    model[1], model[4] = norm, nn.Identity()
    save_run(trainer_for(model).fit(), tmp_path)
    with pytest.raises(ValueError, match="leave statistics out"):
        trainer_for(model, PublicStatistics(PUBLIC, 4))


def test_frozen_norms_stay_frozen_through_steps_and_evaluations(tmp_path):
    model = image_net().train()
    for norm in (model[1], model[4]):
        norm.running_mean.fill_(0.1)
        norm.eval()
    declare_public(model)
    before = buffers(model)
    run = trainer_for(model, evaluate_on=tacit.HeldOut(TEST, every=1)).fit()
    assert len(run.history) == 3
    assert same(buffers(model), before)
    assert not model[1].training
    assert model.training
    save_run(run, tmp_path)


class Looks(tacit.training.Callback):
    """Whether training steps leave the statistics as they were, bit by bit."""

    def __init__(self):
        self.seen = []

    def on_step(self, trainer, step):
        self.seen.append(buffers(trainer.model))


def test_training_keeps_none():
    looks = Looks()
    model = image_net()
    initial = buffers(model)
    trainer_for(model, PublicStatistics(PUBLIC, 4), callbacks=[looks]).fit()
    assert len(looks.seen) == 3
    assert all(same(seen, initial) for seen in looks.seen)
    assert not same(buffers(model), initial)


@pytest.mark.parametrize("average", [None, 0.5])
def test_public_statistics_are_those_of_the_weights_that_are_evaluated(average, tmp_path):
    model = image_net()
    run = trainer_for(
        model,
        PublicStatistics(PUBLIC, 4),
        evaluate_on=tacit.HeldOut(TEST, every=1),
        moving_average=None if average is None else MovingAverage(average),
    ).fit()
    assert len(run.history) == 3
    assert run.history[-1].loss == pytest.approx(run.evaluate(TEST).loss)
    held = buffers(model)
    PublicStatistics(PUBLIC, 4).apply(model)
    assert same(buffers(model), held)
    assert any("public records 'images-7'" in note for note in run.notes)
    assert run.plan.prelude == ()
    save_run(run, tmp_path)
    refuse_private_statistics(run.model)


def test_the_training_records_are_not_public():
    private = images(24)
    with pytest.raises(NotPublic):
        trainer_for(image_net(), PublicStatistics(private, 4), private=private)


@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_released_statistics_are_planned_charged_and_set_once(relation, tmp_path):
    path, private = tmp_path / "ledger.sqlite", images(24)
    model, release = image_net(), ReleasedStatistics(private, 4.0)
    looks = Looks()
    trainer = trainer_for(
        model,
        release,
        private=private,
        relation=relation,
        evaluate_on=tacit.HeldOut(TEST, every=1),
        callbacks=[looks],
        ledger=tacit.LedgerRun(path, "one"),
    )
    assert trainer.plan.prelude == (release.event,)
    initial = buffers(model)
    run = trainer.fit()
    assert all(same(seen, initial) for seen in looks.seen)
    assert [evaluation.step for evaluation in run.history] == [3]
    assert run.history[0].loss == pytest.approx(run.evaluate(TEST).loss)
    assert any("charged" in note and "nothing was evaluated before" in note for note in run.notes)
    assert not any(torch.equal(b, initial[n]) for n, b in buffers(model).items())
    with tacit.Ledger(path) as ledger:
        (charge,) = ledger.statement().runs
    assert json.loads(charge.plan.to_json())["prelude"] == [4.0]
    assert charge.epsilon == run.epsilon > epsilon_of_event(release.event, 1e-5, relation)
    save_run(run, tmp_path)

    # Whoever goes on with the run is told so before a step is spent.
    again = trainer_for(
        model, ReleasedStatistics(private, 4.0), private=private, relation=relation,
        ledger=tacit.LedgerRun(path, "one"),
    )  # fmt: skip
    with pytest.raises(BudgetExceeded, match="has been made"):
        again.fit()


def test_the_noise_is_calibrated_with_the_release():
    private = images(24)
    release = ReleasedStatistics(private, 3.0)
    budget = tacit.Budget(2.0, 1e-5)
    alone = trainer_for(
        image_net(), PublicStatistics(PUBLIC, 4), private=private, noise=None,
        budget=budget,
    )  # fmt: skip
    both = trainer_for(image_net(), release, private=private, noise=None, budget=budget)
    assert both.plan.noise_multiplier > alone.plan.noise_multiplier
    assert both.plan.epsilon(3, 1e-5) <= 2.0
    with pytest.raises(BudgetExceeded, match="before the run"):
        trainer_for(
            image_net(),
            ReleasedStatistics(private, 0.1),
            private=private,
            noise=None,
            budget=budget,
        )


def test_a_run_that_breaks_off_leaves_no_statistics_and_has_paid_for_them(tmp_path):
    class Kill(tacit.training.Callback):
        def on_step(self, trainer, step):
            raise RuntimeError("killed")

    path, private = tmp_path / "ledger.sqlite", images(24)
    model, release = image_net(), ReleasedStatistics(private, 4.0)
    initial = buffers(model)
    with pytest.raises(RuntimeError, match="killed"):
        trainer_for(model, release, private=private, ledger=path, callbacks=[Kill()]).fit()
    assert same(buffers(model), initial)
    with tacit.Ledger(path) as ledger:
        (charge,) = ledger.statement().runs
    assert charge.plan.prelude == (release.event,)
    assert charge.epsilon > epsilon_of_event(release.event, 1e-5, ADD)


def test_seeds_reach_the_release_and_the_report():
    def run(seed, own=None):
        private = images(24)
        torch.manual_seed(0)
        release = ReleasedStatistics(private, 4.0, seed=own)
        return trainer_for(image_net(), release, private=private, seed=seed).fit()

    assert same(buffers(run(3).model), buffers(run(3).model))
    assert not same(buffers(run(3).model), buffers(run(4).model))
    assert run(3).seeded
