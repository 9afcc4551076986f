"""The engine on a GPU: fused recurrences, autocast, TensorFloat-32 and deterministic mode."""

from __future__ import annotations

import warnings

import pytest
import torch
from engine_checks import assert_same, batch_for, one_by_one, recording_engine, sums_of
from gradient_checks import outer_products, share
from test_engine_precision import Everything, tokens, whole
from test_products import cancelling
from torch import nn

import tacit
from tacit import AdaptiveNorm, Normalise, PerSampleClip, RandomCropFlip
from tacit.data import Augmentation
from tacit.engines import Automatic, BookKeeping, ClipTask, PerRecord, Recorder
from tacit.engines.recorder import capture
from tacit.queries import Clip
from tacit.queries.bounded_gradient import trainable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LOSS = nn.CrossEntropyLoss()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Everything().cuda()


@pytest.mark.parametrize("training", [True, False])
def test_every_kind_of_rule_together_in_float64(model, training):
    batch = batch_for(tokens(4).cuda())
    model = model.double().train(training)
    with torch.backends.cudnn.flags(enabled=training):  # cuDNN has no backward in evaluation mode
        expected = one_by_one(model, batch, 0.5)
    assert_same(sums_of(PerSampleClip(0.5), model, batch), expected)


def test_bfloat16_autocast_keeps_the_bound(model):
    inputs = tokens(4).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        sums_of(PerSampleClip(0.1), model, batch_for(inputs))
        for i in range(4):
            one = whole(sums_of(PerSampleClip(0.1), model, batch_for(inputs[i : i + 1])))
            # Where rows are not kept, the norm allows for TensorFloat-32's roundings.
            assert 0.1 * (1 - 2e-2) <= one.norm() <= 0.1


@pytest.mark.parametrize("tensor_float", [False, True])
def test_terms_that_cancel_keep_the_bound(tensor_float):
    torch.manual_seed(0)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tensor_float
    try:
        for size in (1.0, 1e3, 1e6):
            for rest in (0.0, 1e-3, 1.0):
                a, b = cancelling(5, 300, 400, size, rest)
                assert share(outer_products(a.cuda(), b.cuda()), 1e-3) <= 1
                one, two = torch.full((1, 3, 5000), 0.7), torch.full((1, 3, 700), size)
                assert share(outer_products(one.cuda(), two.cuda()), 1e-3) <= 1
        assert torch.backends.cuda.matmul.allow_tf32 == tensor_float
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def image_setting(count=48):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(4),
        nn.Flatten(),
        nn.Linear(256, 10),
    )
    inputs, targets = torch.randn(count, 3, 16, 16), torch.randint(10, (count,))
    return model.cuda(), inputs.cuda(), targets.cuda()


@pytest.fixture
def fine():
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def close(one, other):
    assert_same(one.sums, other.sums, tolerance=1e-4)
    for a, b in zip(one.counts, other.counts, strict=True):
        assert float(a) == pytest.approx(float(b), abs=1e-2)


@pytest.mark.usefixtures("fine")
@pytest.mark.parametrize("rule", [Clip(), Normalise()], ids=repr)
@pytest.mark.parametrize("views", [1, 4])
def test_a_replayed_step_reads_the_threshold_in_force(rule, views):
    """One recording, a threshold that rises and falls between steps, masks and a NaN."""
    model, inputs, targets = image_setting()
    replay, plain = Automatic(Recorder(compile=False)), BookKeeping()
    blocks = tacit.by_layer(model)
    for step, scale in enumerate((1.0, 0.1, 10.0, 1e-3, 1.0)):
        norms = tuple(scale * (h + 1) for h in range(len(blocks)))
        task = ClipTask(model, LOSS, trainable(model), blocks, norms, rule, views, counted=True)
        if step == 3:
            inputs[:views] = torch.nan
        piece = tacit.sampling.batch_of(
            inputs, targets, divisor=1.0, scheme=tacit.sampling.Poisson(0.5)
        )
        piece = piece.with_mask(torch.arange(len(inputs), device="cuda") < 40)
        close(replay.clipped_sums(task, piece), plain.clipped_sums(task, piece))
    assert replay.recorder.num_recorded == 1


@pytest.mark.usefixtures("fine")
@pytest.mark.parametrize("views", [2, 16])
def test_views_on_a_gpu_are_those_of_single_records(views):
    model, inputs, targets = image_setting(6)
    batch = tacit.sampling.batch_of(
        inputs, targets, divisor=1.0, scheme=tacit.sampling.Poisson(0.5)
    )

    def stretched(rows):
        k = torch.arange(len(rows), device=rows.device) % views
        return rows * (1 + 0.1 * k.view(-1, 1, 1, 1))

    found = [
        sums_of(
            PerSampleClip(0.3, augmentation=Augmentation(views, stretched), engine=engine),
            model,
            batch,
            LOSS,
        )
        for engine in (BookKeeping(), PerRecord())
    ]
    assert_same(*found, tolerance=1e-4)


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("rule", [Clip(), Normalise(0.0)], ids=repr)
def test_one_record_keeps_the_bound_with_views_in_any_precision(coarse, rule):
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = coarse
    try:
        for seed in range(10):
            model, inputs, targets = image_setting(1)
            augmentation = Augmentation(8, RandomCropFlip(2))
            batch = tacit.sampling.batch_of(
                inputs * 10.0 ** (seed - 5),
                targets,
                divisor=1.0,
                scheme=tacit.sampling.Poisson(0.5),
            )
            query = PerSampleClip(1e-2, rule=rule, augmentation=augmentation)
            assert whole(sums_of(query, model, batch, LOSS)).norm() <= 1e-2
    finally:
        torch.backends.cudnn.allow_tf32 = before


def test_an_adaptive_run_that_is_recorded_follows_its_norms():
    model, inputs, targets = image_setting(512)
    records = tacit.Records(inputs, targets, public_size=512)
    sampler = tacit.PoissonSampler(records, expected_batch_size=256, steps=60, pad_to=64, seed=0)
    query = PerSampleClip(
        AdaptiveNorm(1e-2),
        augmentation=Augmentation(2, RandomCropFlip(2)),
        engine=Automatic(Recorder(compile=False)),
    )
    mechanism = tacit.Mechanism(query, sampler, 2.0, seed=0)
    with tacit.Ledger(budget=tacit.Budget(100.0, 1e-5)) as ledger:
        for batch in sampler:
            ledger.release(mechanism.privatise(model, LOSS, batch), into=model)
    (path,) = mechanism.query.thresholds
    norms = []
    for i in range(64):
        one = tacit.sampling.batch_of(
            inputs[i : i + 1], targets[i : i + 1], divisor=1.0, scheme=tacit.sampling.Poisson(0.5)
        )
        norms.append(whole(sums_of(PerSampleClip(1e9), model, one, LOSS)).norm())
    middle = float(torch.stack(norms).median())
    assert len(path) == 61
    assert middle / 2 < path[-1] < 2 * middle


@pytest.mark.usefixtures("fine")
def test_the_default_records_and_gives_the_same_sums_for_many_sizes():
    model, inputs, targets = image_setting(96)
    query, plain = PerSampleClip(0.3), PerSampleClip(0.3, engine=BookKeeping())
    # The first step of a size is planned, and the third after it is recorded.
    for count in (64, 64, 64, 61, 62, 62, 62, 63, 90, 91, 92, 92, 64, 1, 1, 1, 1, 0, 63):
        batch = tacit.sampling.batch_of(
            inputs[:count], targets[:count], divisor=1.0, scheme=tacit.sampling.Poisson(0.5)
        )
        found, expected = (sums_of(q, model, batch, LOSS) for q in (query, plain))
        assert_same(found, expected, tolerance=1e-4)
    assert isinstance(query.engine, Automatic)
    assert query.engine.recorder.num_recorded == 4  # of 62, 64, 92 records, and of one


def test_a_recording_that_fails_leaves_the_generator_usable():
    inputs = torch.randn(8, device="cuda")

    def asks_for_a_number() -> torch.Tensor:
        noisy = inputs + torch.randn_like(inputs)
        return noisy * float(noisy.sum())

    before = torch.randn(4, device="cuda")
    with pytest.raises(RuntimeError):
        capture(asks_for_a_number)
    torch.cuda.synchronize()
    after = torch.randn(4, device="cuda")
    assert not torch.equal(before, after)
    graph, found = capture(lambda: torch.randn_like(inputs))
    graph.replay()
    one = found.clone()
    graph.replay()
    assert not torch.equal(one, found)
    assert torch.randn(4, device="cuda").isfinite().all()


class Residual(nn.Module):
    """A forward pass as users write them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)) + x)


def test_a_forward_pass_of_the_users_own_is_recorded():
    torch.manual_seed(0)
    model = Residual().cuda()
    inputs, targets = torch.randn(32, 4).cuda(), torch.randint(3, (32,)).cuda()
    query, plain = PerSampleClip(0.3), PerSampleClip(0.3, engine=BookKeeping())
    for _ in range(5):
        batch = tacit.sampling.batch_of(
            inputs, targets, divisor=1.0, scheme=tacit.sampling.Poisson(0.5)
        )
        found, expected = (sums_of(q, model, batch, LOSS) for q in (query, plain))
        assert_same(found, expected, tolerance=1e-4)
        inputs = inputs + 0.1 * torch.randn_like(inputs)
    assert query.engine.recorder.num_recorded == 1


@pytest.mark.usefixtures("fine")
def test_a_compiled_step_gives_the_same_sums():
    model, inputs, targets = image_setting()
    query = PerSampleClip(0.3, engine=recording_engine(capture=False))  # compiled or nothing
    plain = PerSampleClip(0.3, engine=BookKeeping())
    for step in range(6):
        batch = tacit.sampling.batch_of(
            inputs + step, targets, divisor=1.0, scheme=tacit.sampling.Poisson(0.5)
        )
        found, expected = (sums_of(q, model, batch, LOSS) for q in (query, plain))
        assert_same(found, expected, tolerance=1e-3)
    assert query.engine.recorder.num_recorded == 1


def test_a_step_whose_only_recording_was_dropped_is_recorded_again():
    """A pool of CUDA graphs ends with its last graph, although a result in it may still live."""
    query = PerSampleClip(1.0, engine=Automatic(Recorder(compile=False)))
    model = nn.Sequential(nn.Linear(5, 4), nn.Softplus(), nn.Linear(4, 3)).cuda()
    inputs = torch.randn(6, 5).cuda()
    kept = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model[1].beta in (1.0, 2.0, 3.0):  # a recording depends on it
            for _ in range(6):
                kept.append(sums_of(query, model, batch_for(inputs)))
            assert query.engine.recorder.num_recorded == 1
