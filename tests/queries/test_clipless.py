"""The clipless query: bounds that hold for the numbers added, and the same sums as autograd."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import nn

import tacit
from tacit import AdaptiveNorm, Clipless, Records
from tacit.checks.side_effects import frozen
from tacit.data import Augmentation
from tacit.engines.recorder import Recorder, model_state
from tacit.errors import UnboundedLayer
from tacit.lipschitz import (
    AddBias,
    BoundedInput,
    ClipGradient,
    MaxMin,
    Parameterless,
    Scale,
    SpectralConv1d,
    SpectralLinear,
    Sum,
)
from tacit.lipschitz.layers.limits import limit_rows
from tacit.losses import CrossEntropy, MeanSquaredError, WithConstant


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        BoundedInput(1.0, sphere=True), SpectralLinear(5, 8), MaxMin(), SpectralLinear(8, 3)
    ).double()


def batch_of(n: int, seed: int = 1, **options: object) -> tacit.Batch:
    torch.manual_seed(seed)
    inputs, targets = torch.randn(n, 5).double(), torch.randint(3, (n,))
    return tacit.sampling.batch_of(
        inputs, targets, divisor=10, scheme=tacit.sampling.Poisson(0.1), **options
    )


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("physical", [None, 1, 4])
def test_the_sums_are_those_of_a_loop(clip: float | None, physical: int | None) -> None:
    model, loss, batch = network(), CrossEntropy(0.2), batch_of(9, max_physical=physical)
    found = Clipless(gradient_clip=clip)(model, loss, batch)
    total = [torch.zeros_like(p) for p in model.parameters()]
    for x, y in zip(batch.inputs, batch.targets, strict=True):
        outputs = model(x[None])
        leaf = outputs.detach().requires_grad_()
        (g,) = torch.autograd.grad(loss(leaf, y[None]), leaf)
        if clip is not None:
            g = g * min(1.0, clip / float(g.norm()))
        for part, each in zip(
            total, torch.autograd.grad(outputs, list(model.parameters()), g), strict=True
        ):
            part += each
    for block, expected in zip(found.blocks, total, strict=True):
        torch.testing.assert_close(block.sums[0], expected, rtol=1e-10, atol=1e-12)


def test_an_empty_batch_is_zeros() -> None:
    found = Clipless()(network(), CrossEntropy(), batch_of(0))
    assert all(not part.any() for block in found.blocks for part in block.sums)


def test_linear_on_a_sphere_is_per_sample_clipping() -> None:
    """Where the input's norm is constant, clipping the output gradient clips the weight's."""
    torch.manual_seed(0)
    model = nn.Sequential(BoundedInput(1.0, sphere=True), SpectralLinear(5, 3)).double()
    batch, loss = batch_of(7), CrossEntropy(0.1)
    ours = Clipless(gradient_clip=0.5)(model, loss, batch)
    other = tacit.PerSampleClip(0.5)(model, loss, batch)
    # Rounding of the sum enlarges the one; clipping lowers its constant instead.
    assert ours.blocks[0].bound == pytest.approx(other.blocks[0].bound, rel=3e-4)
    torch.testing.assert_close(
        ours.blocks[0].sums[0], other.blocks[0].sums[0], rtol=1e-6, atol=1e-9
    )


def test_the_bound_is_the_smaller_of_clip_and_loss() -> None:
    batch = batch_of(3)
    free = Clipless()(network(), CrossEntropy(2.0), batch).blocks[-1].bound
    loose = Clipless(gradient_clip=99.0)(network(), CrossEntropy(2.0), batch).blocks[-1].bound
    tight = Clipless(gradient_clip=0.1)(network(), CrossEntropy(2.0), batch).blocks[-1].bound
    assert free == pytest.approx(math.sqrt(2) / 2, rel=1e-3)
    assert loose == free
    assert tight == pytest.approx(0.1, rel=1e-3)


def test_weights_outside_their_sets_are_shrunk_before_they_are_used() -> None:
    model = network()
    with torch.no_grad():
        model[3].weight.mul_(50)
    found = Clipless(gradient_clip=0.2)(model, CrossEntropy(0.01), batch_of(1))
    for block in found.blocks:
        assert float(block.sums[0].norm()) <= block.bound


def test_a_changed_layer_has_a_changed_bound() -> None:
    model, query, loss = network(), Clipless(), CrossEntropy()
    before = query(model, loss, batch_of(1)).blocks[0].bound
    model[0].max_norm = 3.0
    after = query(model, loss, batch_of(1)).blocks[0].bound
    assert after == pytest.approx(3 * before)


def test_what_has_no_bound_is_refused_in_words() -> None:
    with pytest.raises(UnboundedLayer, match="no known Lipschitz constant"):
        Clipless()(network(), MeanSquaredError(), batch_of(2))
    with pytest.raises(UnboundedLayer, match="no known Lipschitz constant"):
        Clipless()(network(), nn.functional.cross_entropy, batch_of(2))
    with pytest.raises(UnboundedLayer, match="BoundedInput"):
        Clipless()(network()[1:], CrossEntropy(), batch_of(2))
    ordinary = nn.Sequential(BoundedInput(), nn.Linear(5, 3)).double()
    with pytest.raises(UnboundedLayer, match="Linear"):
        Clipless()(ordinary, CrossEntropy(), batch_of(2))
    Clipless(gradient_clip=1.0)(network(), nn.functional.cross_entropy, batch_of(2))
    Clipless()(network(), WithConstant(nn.functional.cross_entropy, 2.0), batch_of(2))


def test_the_adaptive_clip_moves_with_releases_only() -> None:
    torch.manual_seed(0)
    records = Records(torch.randn(400, 5).double(), torch.randint(3, (400,)), public_size=400)
    sampler = tacit.PoissonSampler(records, 0.5, steps=30, seed=0)
    follow = AdaptiveNorm(50.0, quantile=0.5, learning_rate=0.5)
    query = Clipless(gradient_clip=follow)
    mechanism = tacit.Mechanism(query, sampler, 2.0, seed=0)
    model, loss = network(), CrossEntropy(0.1)
    with tacit.Ledger(budget=tacit.Budget(100.0, 1e-5)) as ledger:
        ledger.begin(mechanism.plan)
        for batch in sampler:
            private = mechanism.privatise(model, loss, batch)
            before = mechanism.query.thresholds
            ledger.release(private, into=model)
            assert len(mechanism.query.thresholds[0]) == len(before[0]) + 1
    # Output gradients of this loss are at most √2/τ = 14.1; half of them are below the clip.
    assert 2.0 < mechanism.query.thresholds[0][-1] < 14.2
    assert query.thresholds == ()


def test_a_whole_run_with_a_certificate(tmp_path) -> None:
    torch.manual_seed(0)
    centres = torch.randn(3, 5) * 2
    targets = torch.randint(3, (600,))
    records = Records(centres[targets] + 0.3 * torch.randn(600, 5), targets, 3, public_size=600)
    model = tacit.models.lipschitz_mlp((5,), 3, hidden=(16,))
    trainer = tacit.Trainer(
        model,
        loss=CrossEntropy(0.1),
        query=Clipless(gradient_clip=1.0),
        sampler=tacit.PoissonSampler(records, expected_batch_size=200, steps=40),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        budget=tacit.Budget(8.0, 1e-4),
        callbacks=(),
    )
    run = trainer.fit()
    facts = run.facts(records)
    assert facts["accuracy"] > 0.8
    assert facts["certificate"]["certified_accuracy"][0]["share"] == facts["accuracy"]
    assert "certified accuracy" in run.summary(records)


@pytest.mark.parametrize("clip", [-1.0, 0.0, math.inf, math.nan])
def test_a_clip_that_is_none_is_refused(clip: float) -> None:
    with pytest.raises(ValueError, match="gradient_clip is"):
        Clipless(gradient_clip=clip)


def test_a_constant_that_is_too_small_is_enforced() -> None:
    """The loss's constant is what is accounted for, so it is also what is let through."""
    loss = WithConstant(CrossEntropy(0.01), 0.1)  # the truth is 141
    found = Clipless()(network(), loss, batch_of(1))
    for block in found.blocks:
        assert float(block.sums[0].norm()) <= block.bound
        assert block.bound <= 0.11


class Growing(nn.Module, Parameterless):
    """A user's layer whose answers read what is no plain value."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = [1.0]

    def forward(self, x):
        return x * self.factors[0]

    def lipschitz(self, x):
        return self.factors[0]


def test_answers_of_a_users_layer_are_asked_each_time() -> None:
    growing = Growing()
    model = nn.Sequential(BoundedInput(), growing, SpectralLinear(5, 3).double())
    query, loss = Clipless(), CrossEntropy()
    before = query(model, loss, batch_of(1)).blocks[0].bound
    growing.factors[0] = 7.0
    assert query(model, loss, batch_of(1)).blocks[0].bound == pytest.approx(7 * before)


def test_views_of_another_shape_are_refused() -> None:
    longer = Augmentation(2, lambda x: torch.cat([x, x], dim=1))
    with pytest.raises(ValueError, match="keep their shape"):
        Clipless(augmentation=longer)(network(), CrossEntropy(), batch_of(3))


def test_a_recording_depends_on_settings() -> None:
    """A clip is a number inside a recorded graph: another clip needs another recording."""
    model = nn.Sequential(BoundedInput(), ClipGradient(1.0), SpectralLinear(5, 3))
    cpu = torch.device("cpu")
    before = model_state(model, cpu)
    assert model_state(model, cpu) == before
    model[1].max_norm = 0.5
    assert model_state(model, cpu) != before


@pytest.mark.filterwarnings("error::UserWarning")
def test_recorded_passes_give_the_same_sums() -> None:
    torch.manual_seed(0)
    model = tacit.models.lipschitz_mlp((4,), 3, hidden=[8]).double()
    loss = tacit.losses.CrossEntropy(0.5)
    query = Clipless(gradient_clip=0.5)
    query.expect(10**9)  # a run that is long enough to compile at once
    plain = Clipless(
        gradient_clip=0.5, recorder=tacit.engines.Recorder(capture=False, compile=False)
    )
    for count in (40, 39, 40, 40, 40, 39, 40, 39, 40):
        inputs = torch.randn(count, 4, dtype=torch.float64)
        inputs[0] = torch.nan
        targets = torch.randint(3, (count,))
        batch = tacit.sampling.batch_of(
            inputs, targets, divisor=1.0, scheme=tacit.sampling.Poisson(0.5)
        )
        pairs = zip(query(model, loss, batch).blocks, plain(model, loss, batch).blocks, strict=True)
        for one, other in pairs:
            for a, b in zip(one.sums, other.sums, strict=True):
                assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.01)
        tacit.project(model)
    assert query.recorder.num_recorded


def test_a_count_is_released_in_every_step_of_a_recording() -> None:
    """A captured graph returns one dict of outputs each time; taking the count out loses it."""

    class OneDict(Recorder):
        outputs: ClassVar[dict[str, torch.Tensor]] = {}

        def __call__(self, step):
            if not self.outputs:
                self.outputs.update(step.run(step.batch))
            return self.outputs

    torch.manual_seed(0)
    model = tacit.models.lipschitz_mlp((4,), 2, hidden=(4,))
    query = Clipless(gradient_clip=tacit.AdaptiveNorm(0.5), recorder=OneDict())
    batch = tacit.sampling.batch_of(
        torch.randn(9, 4), torch.randint(2, (9,)), divisor=9.0, scheme=tacit.sampling.Poisson(0.5)
    )
    first, second = (query(model, CrossEntropy(), batch).statistics[0] for _ in range(2))
    assert first.value == second.value != 0


@pytest.mark.parametrize("views", [1, 8])
def test_clipped_cotangents_are_clipped_view_by_view(views: int) -> None:
    """A cotangent that is divided by the views first would pass a clip K times."""
    torch.manual_seed(0)
    layers = [SpectralLinear(5, 4), ClipGradient(0.05), SpectralLinear(4, 3)]
    model = nn.Sequential(BoundedInput(1.0, sphere=True), *layers).double()
    query = Clipless(augmentation=Augmentation(views, torch.clone) if views > 1 else None)
    found = query(model, CrossEntropy(0.1), batch_of(1)).blocks[0]
    assert 0.9 * found.bound <= float(found.sums[0].norm()) <= found.bound


def test_a_layer_used_once_more_has_another_bound() -> None:
    scale = Scale(3.0)
    model = network()
    query, loss = Clipless(), CrossEntropy()
    before = query(model, loss, batch_of(1)).blocks[0].bound
    for times in (1, 2):
        model.append(scale)
        after = query(model, loss, batch_of(1)).blocks[0].bound
        assert after == pytest.approx(3**times * before, rel=1e-6)


def test_settings_in_lists_count() -> None:
    sizes = [1, (2, [3])]
    before = frozen(sizes)
    assert hash(before) == hash(frozen(sizes))
    sizes[1][1][0] = 4
    assert frozen(sizes) != before


@pytest.mark.parametrize("front", ["linear", "sum", "convolution", "bias"])
def test_a_record_that_would_overflow_adds_nothing(front: str) -> None:
    """Nothing limits it before tanh, and one NaN would void the sum of all."""
    torch.manual_seed(0)
    fronts = {
        "linear": SpectralLinear(4, 4, max_norm=10.0).requires_grad_(False),
        "sum": Sum([Scale(10.0), Scale(-10.0)]),
        "convolution": nn.Sequential(
            nn.Unflatten(1, (1, 4)), SpectralConv1d(1, 1, 3, padding=1), nn.Flatten()
        ).requires_grad_(False),
        # Forwards all is finite; backwards the cube of GELU's formula is not.
        "bias": nn.Sequential(AddBias(4), nn.GELU(approximate="tanh")),
    }
    model = nn.Sequential(fronts[front], nn.Tanh(), SpectralLinear(4, 3))
    query, loss = Clipless(), CrossEntropy()
    for _ in range(20):
        inputs, targets = torch.randn(3, 4), torch.tensor([0, 1, 2])
        alone = tacit.sampling.batch_of(
            inputs[::2], targets[::2], divisor=3.0, scheme=tacit.sampling.Poisson(0.1)
        )
        inputs[1] = 3.3e38 * torch.randn(4).sign()
        batch = tacit.sampling.batch_of(
            inputs, targets, divisor=3.0, scheme=tacit.sampling.Poisson(0.1)
        )
        pairs = zip(query(model, loss, batch).blocks, query(model, loss, alone).blocks, strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one.sums, other.sums)


def test_a_large_record_counts_where_nothing_overflows() -> None:
    """The first layer limits it, or it is not that large."""
    far = tacit.sampling.batch_of(
        1e30 * torch.ones(1, 5), torch.tensor([0]), divisor=1.0, scheme=tacit.sampling.Poisson(0.1)
    )
    assert Clipless()(network().float(), CrossEntropy(), far).blocks[-1].sums[0].any()
    model = nn.Sequential(Scale(2.0), nn.Tanh(), SpectralLinear(5, 3))
    assert not Clipless()(model, CrossEntropy(), far).blocks[0].sums[0].any()
    near = replace(far, records=Records(1e10 * torch.ones(1, 5), torch.tensor([0]), 3))
    assert Clipless()(model, CrossEntropy(), near).blocks[0].sums[0].any()


class Endless(nn.Module, Parameterless):
    """Says nothing about its output."""

    def forward(self, x):
        return x

    def output_norm(self, x):
        return math.inf


def test_a_layer_whose_output_has_no_bound_is_refused() -> None:
    model = nn.Sequential(Endless(), nn.Tanh(), SpectralLinear(5, 3)).double()
    with pytest.raises(UnboundedLayer, match="may overflow"):
        Clipless()(model, CrossEntropy(), batch_of(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_limited_rows_are_within_the_limit_as_they_are_rounded(dtype: torch.dtype) -> None:
    for width in range(2, 200):
        limited, _, _ = limit_rows(torch.ones(1, width, dtype=dtype), 1.0)
        assert 0.98 <= float(limited.double().norm()) <= 1.0
