"""Every loss that has a constant, with the numbers of outputs it is tried on."""

from __future__ import annotations

import torch

from tacit.losses import (
    BinaryCrossEntropy,
    CosineSimilarity,
    CrossEntropy,
    Focal,
    HingeKantorovichRubinstein,
    Huber,
    KantorovichRubinstein,
    MeanAbsoluteError,
    MulticlassHinge,
    MultiLabelCrossEntropy,
    ScaledBinaryCrossEntropy,
    ScaledCrossEntropy,
    SumAbsoluteError,
    SumHuber,
)

REGRESSION = (Huber, MeanAbsoluteError)
CASES = [
    (CrossEntropy(0.05), 10),
    (CrossEntropy(8.0), 2),
    (CrossEntropy(0.5, smoothing=0.3), 2),
    (CrossEntropy(0.5, smoothing=0.3), 10),
    (CrossEntropy(smoothing=1.0), 4),
    (ScaledCrossEntropy(0.05), 10),
    (ScaledCrossEntropy(5.0, smoothing=0.1), 3),
    (BinaryCrossEntropy(0.2), 1),
    (ScaledBinaryCrossEntropy(0.2), 1),
    (MultiLabelCrossEntropy(), 1),
    (MultiLabelCrossEntropy(0.2), 7),
    (MulticlassHinge(0.5), 1),
    (MulticlassHinge(2.0), 2),
    (MulticlassHinge(2.0), 10),
    (KantorovichRubinstein(), 1),
    (KantorovichRubinstein(), 2),
    (KantorovichRubinstein(), 10),
    (HingeKantorovichRubinstein(3.0, 0.5), 1),
    (HingeKantorovichRubinstein(3.0, 0.5), 2),
    (HingeKantorovichRubinstein(0.2, 1.0), 10),
    (CosineSimilarity(0.01), 2),
    (CosineSimilarity(3.0), 10),
    (MeanAbsoluteError(), 1),
    (MeanAbsoluteError(), 6),
    (Huber(0.3), 1),
    (Huber(5.0), 6),
    (Focal(0.0), 3),
    (Focal(0.5), 10),
    (Focal(2.0), 2),
    (Focal(10.0), 10),
    (SumAbsoluteError(), 1),
    (SumAbsoluteError(), 10),
    (SumHuber(0.1), 1),
    (SumHuber(0.7), 10),
    (0.5 * SumAbsoluteError() + SumHuber(0.2) * 3, 4),
]
IDS = [f"{loss}-{k}" for loss, k in CASES]


def targets_for(loss, num_outputs: int, count: int, seed: int = 0) -> torch.Tensor:
    """Targets that the loss takes: real numbers, or classes."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(loss, REGRESSION):
        return torch.randn(count, num_outputs, generator=generator, dtype=torch.float64)
    if isinstance(loss, MultiLabelCrossEntropy):
        return torch.randint(2, (count, num_outputs), generator=generator)
    return torch.randint(max(num_outputs, 2), (count,), generator=generator)


def outputs_for(num_outputs: int, count: int, size: float = 1.0, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return size * torch.randn(count, num_outputs, generator=generator, dtype=torch.float64)
