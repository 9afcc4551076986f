"""Constants from a public set: their formulas, and that they are public."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import tacit
from tacit import BatchClip, PerSampleClip, Records
from tacit.engines import PerRecord
from tacit.errors import NotPublic
from tacit.losses import CrossEntropy
from tacit.queries import Decaying, LayerFactors, LayerwiseNorms
from tacit.queries.bounded_gradient import trainable

sys.path.insert(0, str(Path(__file__).parent / "mini_sets"))
from set_loop import a_batch, batch_norm_mlp, loop, mean_gradient, mlp, norm, some_records

LOSS = CrossEntropy()


def public_records(n=24, seed=9) -> Records:
    torch.manual_seed(seed)
    inputs = torch.randn(n, 4, dtype=torch.float64)
    return Records(inputs, torch.randint(0, 2, (n,)), public_size=n, name="public")


def expected_by_hand(model, public, blocks, size) -> list[float]:
    sets = [slice(i, i + size) for i in range(0, len(public) - size + 1, size)]
    each = [mean_gradient(model, LOSS, public.inputs[s], public.targets[s]) for s in sets]
    return [float(sum(norm(g[n] for n in names) for g in each) / len(each)) for names in blocks]


@pytest.mark.parametrize("make", [mlp, batch_norm_mlp])
@pytest.mark.parametrize("size", [2, 6])
@pytest.mark.parametrize("master", [None, 0.03])
def test_norms_of_sets_follow_the_public_set(make, size, master):
    torch.manual_seed(0)
    model, public, private = make(), public_records(), some_records(12)
    query = BatchClip(LayerwiseNorms(public, master), size, blocks=tacit.by_parameter)
    found = query(model, LOSS, a_batch(private, size, chosen=2))
    e = expected_by_hand(model, public, tacit.by_parameter(model), size)
    largest = max(e)
    wanted = [max(x, 1e-3 * largest) * (1 if master is None else master / largest) for x in e]
    assert [block.bound for block in found.blocks] == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("engine", [None, PerRecord()])
def test_norms_of_records_follow_the_public_set(engine):
    torch.manual_seed(0)
    model, public, private = mlp(), public_records(), some_records(12)
    query = PerSampleClip(LayerwiseNorms(public, 0.03), blocks=tacit.by_layer, engine=engine)
    batch = tacit.PoissonSampler(private, 0.5, seed=0).next_batch()
    found = query(model, LOSS, batch)
    e = expected_by_hand(model, public, tacit.by_layer(model), 1)
    wanted = [0.03 * x / max(e) for x in e]
    assert [block.bound for block in found.blocks] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("engine", [tacit.queries.SetBySet(), tacit.queries.SetsAsRecords()])
def test_factors_clip_the_whole_once(engine):
    torch.manual_seed(0)
    model, public, private = mlp(), public_records(), some_records(12)
    query = BatchClip(LayerFactors(public, 0.2), 3, blocks=tacit.by_parameter, engine=engine)
    batch = a_batch(private, 3, chosen=2)
    (block,) = query(model, LOSS, batch).blocks
    e = expected_by_hand(model, public, tacit.by_parameter(model), 3)
    m = dict(zip(trainable(model), [max(e) / x for x in e], strict=True))
    assert block.bound == pytest.approx(0.2, rel=1e-10)
    assert block.factors == pytest.approx(list(m.values()), rel=1e-6)

    def scaled(*args):
        return {n: m[n] * g for n, g in mean_gradient(*args).items()}

    expected = loop(model, LOSS, batch, (tuple(m),), [0.2], scaled)
    for name, value in zip(block.names, block.sums, strict=True):
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("engine", [None, PerRecord()])
def test_factors_hold_the_joint_bound_record_by_record(engine):
    torch.manual_seed(0)
    model, public = mlp(), public_records()
    query = PerSampleClip(LayerFactors(public, 0.01), blocks=tacit.by_layer, engine=engine)
    for seed in range(5):
        private = some_records(1, seed=seed)
        batch = tacit.PoissonSampler(private, 1.0).next_batch()
        (block,) = query(model, LOSS, batch).blocks
        assert float(norm(block.sums)) <= 0.01
        assert float(norm(block.sums)) >= 0.00999


def test_after_the_noise_the_factors_are_divided_out():
    torch.manual_seed(0)
    model, public, private = mlp(), public_records(), some_records(12)
    sampler = tacit.MiniSetSampler(private, 3, 40, chosen=2, seed=1)
    query = BatchClip(LayerFactors(public, 0.2), 3, blocks=tacit.by_parameter)
    quiet = tacit.Mechanism(query, sampler, 0.0)
    batch = sampler.next_batch()
    (block,) = query(model, LOSS, batch).blocks
    quiet.privatise(model, LOSS, batch).draw_into(model)
    for p, s, m in zip(block.parameters, block.sums, block.factors, strict=True):
        torch.testing.assert_close(p.grad, s / m / 2)


def test_noise_is_in_proportion_to_the_layers_and_pays_no_root_of_their_number():
    torch.manual_seed(0)
    model, public, private = mlp(), public_records(), some_records(12)
    sampler = tacit.MiniSetSampler(private, 3, 4, chosen=2, seed=1)
    query = BatchClip(LayerFactors(public, 0.2), 3, blocks=tacit.by_parameter)
    mechanism = tacit.Mechanism(query, sampler, 1.5, relation=tacit.Relation.REPLACE_ONE)
    private_gradient = mechanism.privatise(model, LOSS, sampler.next_batch())
    assert private_gradient.stds == pytest.approx((1.5 * 2 * 0.2,))
    e = expected_by_hand(model, public, tacit.by_parameter(model), 3)
    wanted = [1.5 * 2 * 0.2 / 2 * x / max(e) for x in e]
    assert list(mechanism.noise_of.values()) == pytest.approx(wanted, rel=1e-6)


def test_a_master_constant_moves_with_releases_and_not_with_questions():
    torch.manual_seed(0)
    model, public, private = mlp(), public_records(), some_records(12)
    sampler = tacit.MiniSetSampler(private, 3, 9, chosen=2, seed=1)
    source = LayerwiseNorms(public, Decaying(0.1, 0.5, every=2), every=2)
    mechanism = tacit.Mechanism(BatchClip(source, 3, blocks=tacit.by_layer), sampler, 1.0)
    ledger = tacit.Ledger(None, tacit.Budget(1e6, 1e-5))
    ledger.begin(mechanism.plan)
    largest = []
    for batch in sampler:
        for _ in range(2):
            asked = mechanism.query(model, LOSS, batch)
        largest.append(max(block.bound for block in asked.blocks))
        ledger.release(mechanism.privatise(model, LOSS, batch), into=model)
    assert largest == pytest.approx([0.1 * 0.5 ** (t // 2) for t in range(9)])
    assert [step for step, _ in mechanism.query.estimates] == [0, 2, 4, 6, 8]


def test_a_run_begins_with_estimates_of_its_own():
    model, public, private = mlp(), public_records(), some_records(12)
    query = BatchClip(LayerwiseNorms(public, 0.1, every=100), 3, blocks=tacit.by_layer)
    batch = a_batch(private, 3)
    query(model, LOSS, batch)
    assert len(query.estimates) == 1
    assert query.fresh().estimates == ()


def test_a_layer_without_a_gradient_keeps_a_constant_above_zero():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double()
    nn.init.zeros_(model[1].weight)  # nothing comes back to the first layer
    public, private = public_records(), some_records(12)
    norms = BatchClip(LayerwiseNorms(public, 0.1), 3, blocks=tacit.by_layer)
    bounds = [b.bound for b in norms(model, LOSS, a_batch(private, 3)).blocks]
    assert bounds == pytest.approx([1e-4, 0.1])
    factors = BatchClip(LayerFactors(public, 0.1), 3, blocks=tacit.by_layer)
    (block,) = factors(model, LOSS, a_batch(private, 3)).blocks
    assert sorted(set(block.factors)) == pytest.approx([1.0, 1000.0])


def test_weights_that_went_astray_leave_the_last_estimates():
    from tacit.queries.thresholds import Estimates

    held = Estimates(LayerwiseNorms(public_records(), 0.1))
    held.take([1.0, 2.0])
    held.advance()
    held.take([float("nan"), 2.0])
    assert held.constants.norms == pytest.approx((0.05, 0.1))


# What is used as public must not be private.


def test_private_records_are_refused_as_public():
    model, private = mlp(), some_records(12)
    batch = a_batch(private, 3)
    for public in (
        private,
        Records(private.inputs[2:9], private.targets[2:9], name="slice"),
        Records(private.inputs.clone(), private.targets, name="copy"),
        Records(private.inputs[4:].clone(), private.targets[4:], name="part"),
        Records(torch.zeros(0, 4, dtype=torch.float64), torch.zeros(0).long(), name="empty"),
    ):
        query = BatchClip(LayerwiseNorms(public, 0.1), 3, blocks=tacit.by_layer)
        with pytest.raises(NotPublic, match=r"public|empty"):
            query(model, LOSS, batch)
        query = PerSampleClip(LayerFactors(public, 0.1), blocks=tacit.by_layer)
        with pytest.raises(NotPublic):
            query(model, LOSS, batch)


def test_a_few_equal_rows_pass():
    public, private = public_records(), some_records(12)
    public.inputs[3] = private.inputs[5]
    query = BatchClip(LayerwiseNorms(public, 0.1), 3, blocks=tacit.by_layer)
    query(mlp(), LOSS, a_batch(private, 3))


def test_a_public_share_is_taken_by_id():
    records = some_records(40)
    public, private = tacit.split_public(records, 0.25)
    assert (len(public), len(private)) == (10, 30)
    assert (public.public_size, private.public_size) == (10, 30)
    assert sorted(private.record_ids.tolist()) == list(range(30))
    rows = {tuple(r.tolist()) for r in records.inputs}
    assert {tuple(r.tolist()) for r in torch.cat([public.inputs, private.inputs])} == rows
    for index in range(40):  # without a record, everybody else is where they were
        _, other = tacit.split_public(records.without(index), 0.25)
        kept = {
            tuple(r.tolist()): i
            for r, i in zip(private.inputs, private.record_ids.tolist(), strict=True)
        }
        for row, i in zip(other.inputs, other.record_ids.tolist(), strict=True):
            assert kept[tuple(row.tolist())] == i
    assert "10 of 40 records were given up" in private.notes[-1]
    query = BatchClip(LayerwiseNorms(public, 0.1), 3, blocks=tacit.by_layer)
    query(mlp(), LOSS, a_batch(private, 3))


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, float("nan")])
def test_a_share_is_between_nothing_and_all(share):
    with pytest.raises(ValueError, match="share"):
        tacit.split_public(some_records(12), share)


@pytest.mark.parametrize(
    "make",
    [
        lambda public: LayerwiseNorms(public, 0.0),
        lambda public: LayerwiseNorms(public, 0.1, every=0),
        lambda public: LayerwiseNorms(public, 0.1, floor=0.0),
        lambda public: LayerFactors(public, -1.0),
        lambda public: LayerFactors(public, 1.0, records=0),
        lambda public: Decaying(0.1, 1.5, 10),
        lambda public: Decaying(0.1, 0.5, 0),
    ],
)
def test_wrong_settings_are_refused(make):
    with pytest.raises(ValueError, match="give"):
        make(public_records())
