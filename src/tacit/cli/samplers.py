"""The sampler of records that `tacit train` is asked for."""

from __future__ import annotations

from typing import Any

import torch

from tacit.cli.accounting_options import SamplingName
from tacit.records import Records
from tacit.sampling.fixed_size import FixedSizeSampler
from tacit.sampling.poisson import PoissonSampler
from tacit.sampling.sampler import Sampler
from tacit.sampling.shuffle import ShuffleSampler


def record_sampler(
    name: SamplingName,
    records: Records,
    batch: int,
    steps: int,
    physical: int,
    device: torch.device,
    seed: int | None,
) -> Sampler:
    shared: dict[str, Any] = {"max_physical_batch": physical, "seed": seed}
    if name is SamplingName.FIXED_SIZE:
        return FixedSizeSampler(records, batch, steps, **shared)
    if name is SamplingName.SHUFFLE:
        return ShuffleSampler(records, batch, steps, **shared)
    if device.type == "cuda":
        shared["pad_to"] = 32  # few shapes: a new one makes the GPU choose its kernels anew
    return PoissonSampler(records, steps=steps, expected_batch_size=batch, **shared)
