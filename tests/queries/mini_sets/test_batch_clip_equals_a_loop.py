"""Every engine of batch clipping gives the sums of a plain loop, in float64."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from set_loop import (
    a_batch,
    batch_norm_cnn,
    batch_norm_mlp,
    loop,
    mlp,
    some_records,
    sums_of,
)
from torch import nn
from torch.func import functional_call

import tacit
from tacit import BatchClip, MiniSetSampler, PerSampleClip
from tacit.engines import BookKeeping
from tacit.losses import CrossEntropy
from tacit.queries import LocalRun, MeanGradient
from tacit.queries.bounded_gradient import trainable

LOSS = CrossEntropy()
MODELS = {
    "mlp": (mlp, (4,)),
    "bn-mlp": (batch_norm_mlp, (4,)),
    "bn-cnn": (batch_norm_cnn, (1, 4, 4)),
}
ENGINES = {
    "default": None,
    "set-by-set": tacit.queries.SetBySet(),
}


def made(name: str, n: int = 14):
    make, shape = MODELS[name]
    torch.manual_seed(1)
    return make(), some_records(n, shape)


@pytest.mark.parametrize("blocks", [tacit.by_layer, tacit.by_parameter, None])
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MODELS)
def test_all_engines_agree_with_the_loop(name, engine, size, blocks):
    model, records = made(name)
    batch = a_batch(records, size, chosen=2)
    query = BatchClip(0.1, size, blocks=blocks, engine=ENGINES[engine])
    found = query(model, LOSS, batch)
    names = query.blocks_of(model)
    expected = loop(model, LOSS, batch, names, [0.1] * len(names))
    for key, value in sums_of(found).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-12)
    assert found.divisor == 2


@pytest.mark.parametrize("size", [2, 4])
def test_sets_as_records_is_the_fast_engine_for_models_without_batch_norm(size):
    model, records = made("mlp")
    batch = a_batch(records, size)
    slow = BatchClip(0.1, size, engine=tacit.queries.SetBySet())(model, LOSS, batch)
    fast = BatchClip(0.1, size, engine=tacit.queries.SetsAsRecords())(model, LOSS, batch)
    for key, value in sums_of(fast).items():
        torch.testing.assert_close(value, sums_of(slow)[key], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("engine", ["default", "set-by-set"])
@pytest.mark.parametrize("blocks", [None, tacit.by_layer])
def test_sets_of_one_are_individual_clipping(engine, blocks):
    model, records = made("mlp")
    batch = a_batch(records, 1, chosen=6)
    one = BatchClip(0.05, 1, blocks=blocks, engine=ENGINES[engine])
    each = PerSampleClip(0.05, blocks=blocks)
    found, expected = one(model, LOSS, batch), each(model, LOSS, batch)
    for key, value in sums_of(found).items():
        torch.testing.assert_close(value, sums_of(expected)[key], rtol=1e-9, atol=1e-12)
    assert found.unit is expected.unit
    for relation in tacit.Relation:
        assert found.sensitivities(relation) == expected.sensitivities(relation)
    assert found.divisor == pytest.approx(expected.divisor)


def test_sets_of_one_may_come_from_any_sampler():
    model, records = made("mlp")
    batch = tacit.PoissonSampler(records, 0.5, seed=0).next_batch()
    found = BatchClip(0.05, 1)(model, LOSS, batch)
    expected = PerSampleClip(0.05)(model, LOSS, batch)
    for key, value in sums_of(found).items():
        torch.testing.assert_close(value, sums_of(expected)[key], rtol=1e-9, atol=1e-12)
    assert found.divisor == expected.divisor


def by_optimizer(make, epochs, at_once):
    """A local run by hand, on a copy of the model."""

    def gradient(model, loss, x, y):
        copy = {n: p.detach().clone().requires_grad_() for n, p in trainable(model).items()}
        stepper = make(list(copy.values()))
        for _ in range(epochs):
            for start in range(0, len(x), at_once):
                stepper.zero_grad()
                outputs = functional_call(model, copy, (x[start : start + at_once],))
                nn.functional.cross_entropy(outputs, y[start : start + at_once]).backward()
                stepper.step()
        return {n: (p - copy[n]).detach() for n, p in trainable(model).items()}

    return gradient


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.SGD, lr=0.3),
        partial(torch.optim.SGD, lr=0.3, momentum=0.9),
        partial(torch.optim.Adam, lr=0.1),
    ],
    ids=["sgd", "momentum", "adam"],
)
@pytest.mark.parametrize(("epochs", "at_once"), [(1, 1), (2, 2)])
def test_a_local_run_is_clipped_as_a_gradient_is(make, epochs, at_once):
    model, records = made("mlp")
    batch = a_batch(records, 4)
    query = BatchClip(0.4, 4, gradient=LocalRun(make, epochs, at_once), blocks=tacit.by_layer)
    before = {n: p.clone() for n, p in model.named_parameters()}
    found = sums_of(query(model, LOSS, batch))
    expected = loop(
        model, LOSS, batch, tacit.by_layer(model), [0.4] * 2, by_optimizer(make, epochs, at_once)
    )
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-8, atol=1e-10)
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())


def test_physical_limits_and_padding_change_nothing():
    model, records = made("bn-mlp", n=20)
    for options in ({}, {"max_physical_batch": 4}, {"max_physical_batch": 7}, {"pad_to": 8}):
        sampler = MiniSetSampler(records, 4, chosen=3, seed=5, **options)
        found = sums_of(BatchClip(0.1, 4)(model, LOSS, sampler.next_batch()))
        if not options:
            expected = found
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-12)


def test_an_augmented_set_is_the_mean_over_all_views():
    model, records = made("mlp")
    batch = a_batch(records, 3)
    doubled = tacit.data.Augmentation(2, lambda x: x)
    found = sums_of(BatchClip(0.1, 3, augmentation=doubled)(model, LOSS, batch))
    expected = sums_of(BatchClip(0.1, 3)(model, LOSS, batch))
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-12)


def test_normalised_sets_have_the_norm_itself():
    model, records = made("bn-mlp", n=8)
    batch = a_batch(records, 4, chosen=1)
    found = BatchClip(0.3, 4, rule=tacit.Normalise(0.0))(model, LOSS, batch)
    total = torch.cat([s.reshape(-1) for s in found.blocks[0].sums])
    assert float(total.norm()) == pytest.approx(0.3, rel=1e-6)


def test_a_set_goes_the_same_way_whoever_else_is_there():
    """Without another set's record it is alone in its size, and book-keeping clips it still."""
    model, records = made("mlp", n=12)
    model.float()
    records = dataclasses.replace(records, inputs=records.inputs.float())
    sampler = MiniSetSampler(records, 6, rate=1.0)
    batch = sampler.next_batch()
    other = int(batch.groups[-1])
    of_other = (batch.groups == other).nonzero().flatten()
    fewer = batch.only(torch.arange(len(batch)) != of_other[0])
    engines = []

    class Watched(BookKeeping):
        def clipped_sums(self, task, piece):
            if task.views > 1:  # the check asks about single records
                engines.append((task.views, len(piece)))
            return super().clipped_sums(task, piece)

    query = BatchClip(0.01, 6, engine=tacit.queries.SetsAsRecords(Watched()))
    query(model, LOSS, batch)
    query(model, LOSS, fewer)
    assert engines == [(6, 12), (6, 6), (5, 5)]  # book-keeping each time, never another way


def test_the_default_engine_depends_on_what_is_public():
    passes = []

    class OneByOne(MeanGradient):  # asked for a set's gradient by the engine that runs sets alone
        def __call__(self, *arguments):
            passes.append(1)
            return super().__call__(*arguments)

    model, records = made("mlp", n=12)
    query = BatchClip(0.1, 4, gradient=OneByOne())
    batch = MiniSetSampler(records, 4, rate=1.0).next_batch()
    query(model, LOSS, batch)
    query(model, LOSS, batch.only(batch.groups == batch.groups[0]))  # one set, by chance
    assert not passes
    query(model, LOSS, a_batch(records, 4, chosen=1))  # one set in every step
    assert passes
