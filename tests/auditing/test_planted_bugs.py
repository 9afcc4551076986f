"""Bugs that void a guarantee, planted one by one: the audits find each, and pass the right code."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from setups import LOSS, POISSON, PlainClip, lipschitz_mlp, mlp, records
from torch import Tensor, nn

import tacit
from tacit import (
    BatchClip,
    Clipless,
    Mechanism,
    MiniSetSampler,
    PendingRelease,
    PerSampleClip,
    Relation,
    ShuffleSampler,
    auditing,
)
from tacit.auditing import Verdict
from tacit.lipschitz import BoundedInput, MaxMin, SpectralBall, SpectralConv2d, SpectralLinear
from tacit.queries import BoundedGradient
from tacit.sampling import Poisson

torch.set_num_threads(1)


def assert_caught(planted: Verdict, honest: Verdict, *words: str) -> None:
    """The planted bug is found, in these words, and the right code passes the same audit."""
    assert honest.holds, honest
    assert not planted.holds
    said = "; ".join(planted.faults)
    assert all(word in said for word in words), said
    with pytest.raises(tacit.errors.AuditFailed):
        planted.require()


# ---- the noise -----------------------------------------------------------------------------------


def noise_of(mechanism) -> Verdict:
    return auditing.check_noise(
        PerSampleClip(0.1), mlp(), LOSS, records(), POISSON, mechanism=mechanism, numbers=6000
    )


@functools.cache
def honest_noise() -> Verdict:
    return noise_of(Mechanism)


class Scaled:
    """A stream whose normals are too small, behind deviations that are right."""

    def __init__(self, randomness, factor: float) -> None:
        self.randomness, self.factor = randomness, factor
        self.seed = randomness.seed

    def stream(self, purpose, *step):
        stream = self.randomness.stream(purpose, *step)
        if purpose != "noise":
            return stream
        wrapped = type("Wrapped", (), {})()
        wrapped.flat_normals = lambda *args: self.factor * stream.flat_normals(*args)
        return wrapped


class DrawsTooLittle(Mechanism):
    def privatise(self, model, loss, batch):
        pending = super().privatise(model, loss, batch)
        pending._randomness = Scaled(pending._randomness, self.factor(batch))
        return pending

    def factor(self, batch) -> float:
        return 0.9


class PlansTooLittle(Mechanism):
    def privatise(self, model, loss, batch):
        pending = super().privatise(model, loss, batch)
        pending.stds = tuple(0.9 * std for std in pending.stds)
        return pending


class DividesByPieces(DrawsTooLittle):
    def factor(self, batch) -> float:
        return 1 / max(1, len(list(batch.physical())))


class NothingIfEmpty(DrawsTooLittle):
    def factor(self, batch) -> float:
        return float(len(batch) > 0)


@pytest.mark.parametrize("planted", [DrawsTooLittle, PlansTooLittle])
def test_noise_of_nine_tenths(planted):
    words = "0.9" if planted is PlansTooLittle else "times the deviation that it should have"
    assert_caught(noise_of(planted), honest_noise(), words)


def test_noise_divided_by_the_number_of_physical_batches():
    assert_caught(noise_of(DividesByPieces), honest_noise(), "steps in pieces")


def test_no_noise_on_an_empty_batch():
    found = noise_of(NothingIfEmpty)
    assert_caught(found, honest_noise(), "steps empty")
    assert not any("steps as drawn" in fault for fault in found.faults)


class Repeating(PendingRelease):
    def draw_into(self, model, *charge):
        super().draw_into(model, "always the same")


class ForgetsTheLedger(Mechanism):
    """The noise depends on the seed and the step, and not on what was charged for it."""

    def privatise(self, model, loss, batch):
        pending = super().privatise(model, loss, batch)
        pending.__class__ = Repeating
        return pending


def test_a_seed_used_twice():
    assert_caught(noise_of(ForgetsTheLedger), honest_noise(), "twice from one seed")


class GlobalGenerator:
    """A stream that draws from PyTorch's generator."""

    seed = None

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def stream(self, purpose, *step):
        if purpose != "noise":
            return tacit.randomness.Randomness().stream(purpose, *step)
        wrapped = type("Wrapped", (), {})()
        wrapped.flat_normals = lambda sizes, *_: torch.randn(
            sum(sizes), generator=self.generator, dtype=torch.float64
        )
        return wrapped


class Predictable(Mechanism):
    torch_seed = (1 << 50) + 12345  # out of reach for trying seeds

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._randomness = GlobalGenerator(self.torch_seed)


class SmallSeed(Predictable):
    torch_seed = 1000


def prediction_of(mechanism) -> Verdict:
    draws = auditing.noise_of_releases(
        PerSampleClip(0.1), mlp(), LOSS, records(), POISSON, mechanism=mechanism
    )
    return auditing.attack_draws(draws, seeds=range(2048))


@functools.cache
def honest_prediction() -> Verdict:
    return prediction_of(Mechanism)


@pytest.mark.parametrize(
    ("planted", "words"), [(Predictable, "Mersenne Twister"), (SmallSeed, "the seed is 1000")]
)
def test_a_predictable_generator(planted, words):
    assert_caught(prediction_of(planted), honest_prediction(), words)


# ---- the sums ------------------------------------------------------------------------------------


def replayed(query, relation=Relation.ADD_OR_REMOVE_ONE) -> Verdict:
    return auditing.replay_neighbours(query, mlp(), LOSS, records(), relation=relation)


class ActualSize(PlainClip):
    def __call__(self, model, loss, batch):
        return replace(super().__call__(model, loss, batch), divisor=float(max(1, len(batch))))


def test_division_by_the_actual_batch_size():
    honest = replayed(PlainClip())
    assert_caught(replayed(ActualSize()), honest, "the divisor is")

    def released(query):
        return auditing.replay_release(query, mlp(), LOSS, records(), POISSON)

    assert_caught(released(ActualSize()), released(PlainClip()), "declared expected batch size")


class ClipsTheMean(PlainClip):
    """n·clip(mean of the gradients), as one who clips after `loss.mean().backward()`."""

    def clipped(self, rows: Tensor) -> Tensor:
        rows = torch.where(rows.norm(dim=1, keepdim=True).isfinite(), rows, 0.0)
        if len(rows) == 0:
            return rows
        mean = rows.mean(dim=0)
        return (mean * (self.max_norm / mean.norm()).clamp(max=1.0)).expand_as(rows)


def test_clipping_after_averaging():
    assert_caught(replayed(ClipsTheMean()), replayed(PlainClip()), "times its declared sensitivity")


class KeepsNaN(PlainClip):
    def clipped(self, rows: Tensor) -> Tensor:
        norms = rows.norm(dim=1, keepdim=True)
        return rows * (self.max_norm / norms.clamp_min(1e-12)).clamp(max=1.0)


def test_a_record_that_is_not_a_number():
    assert_caught(replayed(KeepsNaN()), replayed(PlainClip()), "by nan")


class RoundsTheSum(PlainClip):
    def total(self, rows: Tensor) -> Tensor:
        return rows.sum(dim=0).bfloat16().double()


def test_sums_in_bfloat16():
    def among(query):
        return auditing.replay_among_identical(query, mlp(), LOSS, records())

    assert_caught(among(RoundsTheSum()), among(PlainClip()), "equal records")
    assert replayed(RoundsTheSum()).largest < 1.1  # a few records hardly show it


def batch_norm_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))


class KeepsStatistics(BatchClip):
    def __call__(self, model, loss, batch):
        bounded = super().__call__(model, loss, batch)
        with torch.no_grad():
            if len(batch) > 1:
                model.train()(batch.inputs)
        return bounded


def test_batch_norm_statistics_that_are_kept():
    def of(query):
        return auditing.replay_neighbours(
            query, batch_norm_model(), LOSS, records(),
            sampler=partial(MiniSetSampler, set_size=4, chosen=3),
        )  # fmt: skip

    assert_caught(of(KeepsStatistics(0.1, 4)), of(BatchClip(0.1, 4)), "1.running_mean")


# ---- the bounds ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class OneForAll(BoundedGradient):
    """A replaced record counts once."""

    def _factor(self, relation):
        return 1


class ForgetsTheTwo(PerSampleClip):
    def __call__(self, model, loss, batch):
        bounded = super().__call__(model, loss, batch)
        return OneForAll(bounded.blocks, bounded.divisor)


def test_a_bound_that_forgets_the_relation():
    planted, honest = ForgetsTheTwo(0.1), PerSampleClip(0.1)
    assert replayed(planted).holds  # right where a record is added or removed
    relation = Relation.REPLACE_ONE
    assert_caught(replayed(planted, relation), replayed(honest, relation), "under replace-one")


class BoundOfTheMean(Clipless):
    """Sums with the bound of a mean."""

    def __call__(self, model, loss, batch):
        bounded = super().__call__(model, loss, batch)
        blocks = [replace(block, bound=block.bound / batch.divisor) for block in bounded.blocks]
        return replace(bounded, blocks=tuple(blocks))


def test_a_bound_that_forgets_the_batch_factor():
    def of(query):
        return auditing.replay_neighbours(query, lipschitz_mlp(), LOSS, records())

    assert_caught(of(BoundOfTheMean()), of(Clipless()), "times its declared sensitivity")


class ForgetsItsBias(SpectralLinear):
    def output_norm(self, x):
        return self.lipschitz(x) * x.norm


class ForgetsTheStride(SpectralConv2d):
    """Windows that overlap, bounded as if they were disjoint."""

    def output_norm(self, x):
        return SpectralConv2d.output_norm(self, x)

    def lipschitz(self, x):
        return SpectralConv2d.lipschitz(self, x)

    def gradient_norms(self, x, cotangent):
        return {"weight": x.norm * cotangent}


def worst(model: nn.Module, shape: tuple[int, ...]) -> Verdict:
    torch.manual_seed(1)
    some = tacit.Records(torch.randn(8, *shape), torch.arange(8) % 2, num_classes=2)
    return auditing.find_worst_record(
        Clipless(), model.double(), LOSS, some, steps=16, restarts=1, tries=6
    )


def with_bias(layer: type[nn.Module]) -> nn.Module:
    return nn.Sequential(BoundedInput(0.1), layer(4, 6, bias=True), MaxMin(), SpectralLinear(6, 2))


def test_a_bound_that_forgets_the_bias():
    planted, honest = worst(with_bias(ForgetsItsBias), (4,)), worst(with_bias(SpectralLinear), (4,))
    assert_caught(planted, honest, "block [3.weight]")


def with_convolution(layer: type[nn.Module]) -> nn.Module:
    front = layer(1, 2, 3, padding=1, padding_mode="circular")
    return nn.Sequential(BoundedInput(1.0), front, nn.Flatten(), SpectralLinear(32, 2))


def test_a_bound_that_forgets_the_stride():
    shape = (1, 4, 4)
    planted = worst(with_convolution(ForgetsTheStride), shape)
    assert_caught(planted, worst(with_convolution(SpectralConv2d), shape), "block [1.weight]")


@dataclass(frozen=True)
class PowerIterated(SpectralBall):
    """A norm from below, as spectral normalisation has it: ten steps from the vector of ones."""

    def norm_upper(self, stack):
        matrices = stack.double().flatten(2)
        v = torch.full((len(stack), matrices.shape[2], 1), matrices.shape[2] ** -0.5).double()
        for _ in range(10):
            v = matrices.mT @ (matrices @ v)
            v = v / v.norm(dim=1, keepdim=True).clamp_min(1e-12)
        return (matrices @ v).flatten(1).norm(dim=1)


def test_a_projection_certified_by_power_iteration():
    def of(within):
        torch.manual_seed(0)
        model = nn.Sequential(
            BoundedInput(1.0),
            SpectralLinear(4, 8, within=within),
            MaxMin(),
            SpectralLinear(8, 2),
        )
        return auditing.check_projection(model, records())

    assert_caught(of(PowerIterated), of(SpectralBall), "certify norms from above")


# ---- the sample ----------------------------------------------------------------------------------


class CalledPoisson(ShuffleSampler):
    """Shuffled epochs that are accounted as Poisson samples."""

    def __init__(self, data, steps=1, **options):
        super().__init__(data, 12, steps, **options)
        self.scheme = Poisson(12 / len(self.records))


def test_shuffling_accounted_as_poisson():
    def of(sampler):
        return auditing.check_sampler(sampler, records(), steps=1024)

    honest = of(POISSON)
    assert_caught(of(CalledPoisson), honest, "0 times of", "not those that are accounted for")
    assert of(partial(ShuffleSampler, batch_size=12)).holds  # as what it is
