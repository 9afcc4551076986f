"""How much time does a private step take apart from its gradient, relative to a bare step?

The bare step takes the next slice of the data, runs forward and backward, and steps the
optimizer. The other step does the same through Tacit's pipeline: Poisson sampling, the mechanism's
noise, a ledger on disk, release into `.grad`. Both use the plain gradient of the batch, so only the
pipeline differs. (The gradient is *not* bounded: nothing here is private.)

Blocks of steps of the two kinds alternate in one process; times are medians over blocks.

    python benchmarks/pipeline_overhead.py --device cpu --out result.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch
from timing import alternate, ratios, report, step_on
from torch import nn

import tacit
from tacit.queries.bounded_gradient import Block, BoundedGradient, Loss, trainable
from tacit.sampling.sampler import Batch
from tacit.sampling.scheme import Unit


class PlainSum:
    """The gradient of the summed loss by plain autograd, with a bound that is only claimed."""

    unit = Unit.RECORD

    def __call__(self, model: nn.Module, loss: Loss, batch: Batch) -> BoundedGradient:
        parameters = trainable(model)
        losses = nn.functional.cross_entropy(model(batch.inputs), batch.targets, reduction="none")
        value = losses.sum() if batch.mask is None else (losses * batch.mask).sum()
        sums = torch.autograd.grad(value, list(parameters.values()))
        block = Block(tuple(parameters), tuple(parameters.values()), sums, bound=1.0)
        return BoundedGradient((block,), batch.divisor)


class GivenSum:
    """A gradient that was computed before, to time the pipeline alone."""

    unit = Unit.RECORD

    def __call__(self, model: nn.Module, loss: Loss, batch: Batch) -> BoundedGradient:
        parameters = trainable(model)
        _ = batch.inputs, batch.targets  # gathering the records is part of the pipeline
        sums = tuple(p.detach() for p in parameters.values())
        block = Block(tuple(parameters), tuple(parameters.values()), sums, bound=1.0)
        return BoundedGradient((block,), batch.divisor)


def records_like_cifar(count: int, device: torch.device) -> tacit.Records:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 3, 32, 32, generator=generator)
    targets = torch.randint(10, (count,), generator=generator)
    return tacit.Records(inputs, targets, num_classes=10, public_size=count).to(device)


class Bare:
    """Plain training on consecutive slices."""

    def __init__(self, records: tacit.Records, batch_size: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.records, self.batch_size, self.at = records, batch_size, 0
        self.model = tacit.models.cifar_cnn().to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def step(self) -> None:
        if self.at + self.batch_size > len(self.records):
            self.at = 0
        rows = slice(self.at, self.at + self.batch_size)
        self.at += self.batch_size
        self.optimizer.zero_grad(set_to_none=True)
        outputs = self.model(self.records.inputs[rows])
        nn.functional.cross_entropy(outputs, self.records.targets[rows]).backward()
        self.optimizer.step()


class Pipeline:
    """The same gradient through sampler, mechanism and ledger."""

    def __init__(
        self,
        records: tacit.Records,
        batch_size: int,
        device: torch.device,
        file: Path,
        steps: int,
        pad_to: int | None,
    ) -> None:
        torch.manual_seed(0)
        self.model = tacit.models.cifar_cnn().to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.loss = tacit.losses.CrossEntropy()
        self.sampler = tacit.PoissonSampler(
            records, expected_batch_size=batch_size, steps=steps, pad_to=pad_to
        )
        budget = tacit.Budget(epsilon=50.0, delta=1e-5)
        self.mechanism = tacit.Mechanism(PlainSum(), self.sampler, noise_multiplier=1.0)
        self.ledger = tacit.Ledger(file, budget)
        self.ledger.begin(self.mechanism.plan)

    def alone(self) -> None:
        """Everything but the gradient, the backward pass and the optimizer."""
        self.mechanism.query = GivenSum()
        batch = self.sampler.next_batch()
        private = self.mechanism.privatise(self.model, self.loss, batch)
        self.ledger.release(private, into=self.model)

    def step(self) -> None:
        batch = self.sampler.next_batch()
        private = self.mechanism.privatise(self.model, self.loss, batch)
        self.ledger.release(private, into=self.model)
        self.optimizer.step()


def measure(
    batch_size: int, pad_to: int | None, device: torch.device, blocks: int, steps: int, size: int
) -> dict:
    records = records_like_cifar(size, device)
    with tempfile.TemporaryDirectory() as folder:
        total = (2 * blocks + 2) * steps
        bare = Bare(records, batch_size, device)
        pipeline = Pipeline(
            records, batch_size, device, Path(folder) / "ledger.sqlite", total, pad_to
        )
        kinds = {"bare": step_on(device, bare.step), "pipeline": step_on(device, pipeline.step)}
        alternate(kinds, 1, steps)
        times = alternate(kinds, blocks, steps)
        alone = alternate({"alone": step_on(device, pipeline.alone)}, blocks + 1, steps)["alone"][
            1:
        ]
        pipeline.ledger.close()
    over = ratios(times, "bare")["pipeline"]
    return {
        "batch_size": batch_size,
        "pad_to": pad_to,
        "bare_ms": 1e3 * statistics.median(times["bare"]),
        "pipeline_ms": 1e3 * statistics.median(times["pipeline"]),
        "pipeline_alone_ms": 1e3 * statistics.median(alone),
        "ratio_median": over["median"],
        "ratio_quartiles": over["quartiles"],
        "blocks": blocks,
        "steps_per_block": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1024])
    parser.add_argument("--pad-to", type=int, nargs="+", default=[0], help="0: not padded")
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--steps", type=int, default=50, help="steps in a block")
    parser.add_argument("--records", type=int, default=50_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    results = [
        measure(size, pad or None, device, options.blocks, options.steps, options.records)
        for size in options.batch_sizes
        for pad in options.pad_to
    ]
    print(json.dumps(results, indent=2))
    report(
        "time of a step with everything but the gradient, over a bare step",
        device,
        results,
        options.out,
        model="cifar_cnn of Losing Less, float32",
    )


if __name__ == "__main__":
    main()
