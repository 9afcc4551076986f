"""What must also hold on a GPU. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch

import tacit

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
        assert grad.std().item() == pytest.approx(1.5, rel=5e-3)
    correlation = torch.corrcoef(torch.stack([g.flatten() for g in grads]))[0, 1]
    assert abs(correlation.item()) < 6e-3


def test_training_reaches_a_use(tmp_path) -> None:
    data = records(3000)
    model = tacit.models.mlp(data.shape, 10)
    run = tacit.Trainer(
        model,
        loss=tacit.losses.CrossEntropy(),
        query=tacit.PerSampleClip(0.25),
        sampler=tacit.PoissonSampler(data, expected_batch_size=1000, steps=30, pad_to=32),
        optimizer=torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.9),
        budget=tacit.Budget(8.0, 1e-4),
        evaluate_on=data,
        device="cuda",
        ledger=tmp_path / "ledger.sqlite",
        moving_average=tacit.MovingAverage(0.9),
        progress=False,
    ).fit()
    assert next(run.model.parameters()).device.type == "cuda"
    assert run.epsilon <= 8
    assert run.evaluate(data).accuracy > 0.5
    facts = tacit.save_run(run, tmp_path / "run", data)
    assert facts["peak_memory_bytes"] > 0
