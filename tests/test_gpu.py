"""What must also hold on a GPU. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch

import tacit
from tacit.engines import Automatic, BookKeeping, PerRecord

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def records(count: int = 600) -> tacit.Records:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(10, (count,), generator=generator)
    inputs = torch.randn(count, 1, 28, 28, generator=generator)
    inputs[:, 0, :10, :] += 4 * torch.nn.functional.one_hot(targets, 10)[:, :, None]
    return tacit.Records(inputs, targets, num_classes=10, public_size=count)


@pytest.mark.parametrize("pad_to", [None, 32])
def test_the_bounded_sum_is_that_of_the_cpu(pad_to: int | None) -> None:
    torch.manual_seed(0)
    model = tacit.models.mnist_cnn().double()
    data = tacit.Records(records().inputs.double(), records().targets, public_size=600)
    sums = []
    for device in ("cpu", "cuda"):
        sampler = tacit.PoissonSampler(
            data.to(device), expected_batch_size=64, seed=1, pad_to=pad_to, max_physical_batch=32
        )
        query = tacit.PerSampleClip(0.1, blocks=tacit.by_layer)
        batch = sampler.next_batch()
        assert batch.inputs.device.type == device
        bounded = query(model.to(device), tacit.losses.CrossEntropy(), batch)
        sums.append([s.cpu() for block in bounded.blocks for s in block.sums])
    for on_cpu, on_gpu in zip(*sums, strict=True):
        torch.testing.assert_close(on_cpu, on_gpu, rtol=1e-9, atol=1e-12)


def test_noise_has_the_declared_deviation() -> None:
    model = torch.nn.Linear(1000, 1000, bias=False).cuda()
    empty = tacit.Records(torch.zeros(0, 1000), torch.zeros(0, dtype=torch.long), public_size=100)
    sampler = tacit.PoissonSampler(empty.to("cuda"), expected_batch_size=10, steps=2)
    mechanism = tacit.Mechanism(tacit.PerSampleClip(0.5), sampler, noise_multiplier=3.0)
    ledger = tacit.Ledger(None, tacit.Budget(50.0, 1e-5))
    grads = []
    for batch in sampler:
        ledger.release(mechanism.privatise(model, tacit.losses.CrossEntropy(), batch), into=model)
        grads.append(model.weight.grad.clone() * 10)
    for grad in grads:
        assert grad.std().item() == pytest.approx(1.5, rel=8e-3)
    correlation = torch.corrcoef(torch.stack([g.flatten() for g in grads]))[0, 1]
    assert abs(correlation.item()) < 6e-3


def test_training_reaches_a_use(tmp_path) -> None:
    data = records(3000)
    model = tacit.models.mlp(data.shape, 10).to("cuda")
    run = tacit.Trainer(
        model,
        loss=tacit.losses.CrossEntropy(),
        query=tacit.PerSampleClip(0.25),
        sampler=tacit.PoissonSampler(data, expected_batch_size=1000, steps=30, pad_to=32),
        optimizer=torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.9),
        budget=tacit.Budget(8.0, 1e-4),
        evaluate_on=tacit.Unprotected(data),
        ledger=tmp_path / "ledger.sqlite",
        moving_average=tacit.MovingAverage(0.9),
        callbacks=(),
    ).fit()
    assert next(run.model.parameters()).device.type == "cuda"
    assert run.epsilon <= 8
    assert run.evaluate(data).accuracy > 0.5
    facts = tacit.save_run(run, tmp_path / "run", data)
    assert facts["peak_memory_bytes"] > 0


CONVOLUTIONS = [
    torch.nn.Conv2d(3, 32, 3, padding=1),
    torch.nn.Conv2d(3, 40, (3, 5), stride=2, padding=(2, 1)),
    torch.nn.Conv2d(3, 7, 3, dilation=2, bias=False),
    torch.nn.Conv2d(3, 6, 4, groups=3),
    torch.nn.Conv2d(3, 5, 3, padding=1, padding_mode="reflect"),
    torch.nn.ConvTranspose2d(3, 5, 3, stride=2),
]


@pytest.mark.parametrize("first", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("deep", [False, True])
def test_book_keeping_is_exact(first: torch.nn.Module, deep: bool) -> None:
    """Rows are kept for wide images and few filters, contracted for small ones and many."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = [first, torch.nn.Tanh()]
    if deep:
        layers += [torch.nn.AdaptiveAvgPool2d(4), torch.nn.LazyConv2d(96, 3, padding=1)]
        layers += [torch.nn.Tanh(), torch.nn.Conv2d(96, 130, 3, padding=1), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.LazyLinear(10)).cuda()
    inputs = torch.randn(33, 3, 17, 15, device="cuda")
    model(inputs)
    targets = torch.randint(10, (33,), device="cuda")
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        for max_norm in (1e-2, 1e3):
            batch = tacit.sampling.batch_of(
                inputs, targets, divisor=1.0, scheme=tacit.sampling.Poisson(0.5)
            )
            found = [
                tacit.PerSampleClip(max_norm, engine=engine)(
                    model, torch.nn.CrossEntropyLoss(), batch
                )
                for engine in (PerRecord(), BookKeeping())
            ]
            for slow, fast in zip(found[0].blocks[0].sums, found[1].blocks[0].sums, strict=True):
                scale = float(slow.abs().max())
                torch.testing.assert_close(fast, slow, rtol=1e-3, atol=1e-4 * scale)
    finally:
        torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("coarse", [False, True])
def test_a_record_adds_at_most_its_bound_in_any_precision(coarse: bool) -> None:
    """One record alone: what reaches the sum has a norm of at most C, TensorFloat-32 or not."""
    torch.manual_seed(0)
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = coarse
    try:
        model = torch.nn.Sequential(
            torch.nn.Conv2d(16, 256, 3, padding=1), torch.nn.Flatten(), torch.nn.Linear(4096, 10)
        ).cuda()
        for scale in (1e-2, 1.0, 3.0):
            for _ in range(20):
                inputs = scale * torch.randn(1, 16, 4, 4, device="cuda")
                batch = tacit.sampling.batch_of(
                    inputs,
                    torch.zeros(1, dtype=torch.long, device="cuda"),
                    divisor=1.0,
                    scheme=tacit.sampling.Poisson(0.5),
                )
                bounded = tacit.PerSampleClip(1e-3)(model, torch.nn.CrossEntropyLoss(), batch)
                total = torch.cat([s.flatten() for s in bounded.blocks[0].sums])
                assert total.norm() <= 1e-3
                assert total.norm() >= 0.9e-3 or scale == 3.0  # a sure answer has no gradient
    finally:
        torch.backends.cudnn.allow_tf32 = before


def test_a_replayed_step_is_the_step_itself() -> None:
    """Over several batches, two shapes, masks, changing weights and a record that is not finite."""
    torch.manual_seed(0)
    model = tacit.models.mnist_cnn().cuda()
    data = records(300).to("cuda")
    replay, plain = Automatic(), BookKeeping()
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        for step in range(8):
            if step == 5:
                data.inputs[:40] = float("nan")
            size = 64 if step % 2 else 96
            rows = torch.randperm(300, device="cuda")[:size]
            mask = torch.arange(size, device="cuda") < size - 10
            batch = tacit.Batch(data, rows, 1.0, tacit.sampling.Poisson(0.5), mask=mask)
            found = [
                tacit.PerSampleClip(0.1, engine=engine)(model, tacit.losses.CrossEntropy(), batch)
                for engine in (replay, plain)
            ]
            for fast, slow in zip(found[0].blocks[0].sums, found[1].blocks[0].sums, strict=True):
                assert fast.isfinite().all()
                torch.testing.assert_close(fast, slow, rtol=1e-3, atol=1e-5)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.01 * torch.randn_like(parameter))
    finally:
        torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_masks_are_secret_in_recorded_steps_too(drop: float) -> None:
    """The generators are set to a secret stream and back around steps that are CUDA graphs."""
    records = tacit.Records(torch.randn(64, 8), torch.arange(64) % 3, 3, public_size=64).to("cuda")
    sums = []
    for _ in range(2):
        torch.manual_seed(7)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Dropout(drop), torch.nn.Linear(16, 3)
        ).cuda()
        sampler = tacit.MiniSetSampler(records, 1, steps=4, rate=1.0, seed=0)
        mechanism = tacit.Mechanism(tacit.PerSampleClip(0.1), sampler, 1.0)
        torch.manual_seed(0)
        before = torch.cuda.get_rng_state()
        for batch in sampler:
            private = mechanism.privatise(model, tacit.losses.CrossEntropy(), batch)
        assert torch.equal(before, torch.cuda.get_rng_state())
        sums.append(torch.cat([t.flatten() for b in private._bounded.blocks for t in b.sums]))
    assert torch.allclose(*sums, rtol=1e-3, atol=1e-5) is (drop == 0)


def test_poisson_batches_have_one_shape() -> None:
    """Another number of rows may mean another kernel, which rounds every record differently."""
    sampler = tacit.PoissonSampler(records().to("cuda"), expected_batch_size=64, steps=200, seed=0)
    rows = [len(batch) for batch in sampler]
    pieces = {len(piece) for batch in sampler for piece in batch.physical()}
    assert pieces == {64 + 2 * 8}
    assert set(rows) == {80, 160}
    assert rows.count(160) < 20
    drawn = [int(batch.mask.sum()) for batch in sampler]
    assert min(drawn) < 60 < 68 < max(drawn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_record_more_in_a_sampled_batch_moves_the_sum_by_its_bound(dtype) -> None:
    """4,000 identical records, whose roundings would all go the same way."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(16 * 64, 10),
    ).to("cuda", dtype)  # fmt: skip
    one, label = torch.randn(1, 3, 8, 8), torch.zeros(1, dtype=torch.int64)
    inputs = one.expand(4200, -1, -1, -1).to("cuda", dtype)
    data = tacit.Records(inputs, label.expand(4200).to("cuda"), public_size=4200)
    sampler = tacit.PoissonSampler(data, expected_batch_size=4000, seed=0)
    batch = sampler.next_batch()
    query = tacit.PerSampleClip(1.0)

    def total(mask: torch.Tensor) -> torch.Tensor:
        bounded = query(model, tacit.losses.CrossEntropy(), batch.with_mask(mask))
        return torch.cat([s.flatten().double() for b in bounded.blocks for s in b.sums])

    place = int(batch.mask.nonzero()[-1])
    fewer = batch.mask.clone()
    fewer[place] = False
    bound = query(model, tacit.losses.CrossEntropy(), batch).blocks[0].bound
    assert float((total(batch.mask) - total(fewer)).norm()) <= bound
