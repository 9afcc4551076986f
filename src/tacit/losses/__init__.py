"""Losses: one number per record, with the Lipschitz constant that the clipless route needs.

A loss is called as loss(outputs, targets). `losses_of` gives its value for each record, whatever
its reduction; `loss_named` finds a registered one; `check_loss` and `attack_constant` attack what a
loss declares. `watched` runs a model for losses that read its pre-activations.
"""

from tacit.losses.classification import (
    BinaryCrossEntropy,
    CosineSimilarity,
    CrossEntropy,
    Focal,
    HingeKantorovichRubinstein,
    KantorovichRubinstein,
    MulticlassHinge,
    MultiLabelCrossEntropy,
    ScaledBinaryCrossEntropy,
    ScaledCrossEntropy,
    TokenCrossEntropy,
)
from tacit.losses.loss_check import LossCheck, attack_constant, check_loss, largest_gradient
from tacit.losses.record_loss import (
    LipschitzLoss,
    LipschitzSum,
    RecordLoss,
    Scheduled,
    WeightedSum,
    WithConstant,
    losses_of,
    weighted_sum,
)
from tacit.losses.registry import Task, loss_named, register_loss, registered_losses
from tacit.losses.regression import (
    Huber,
    MeanAbsoluteError,
    MeanSquaredError,
    SumAbsoluteError,
    SumHuber,
    SumSquaredError,
)
from tacit.losses.tailored import PreActivationPenalty, TailoredLoss, watched

__all__ = [
    "BinaryCrossEntropy",
    "CosineSimilarity",
    "CrossEntropy",
    "Focal",
    "HingeKantorovichRubinstein",
    "Huber",
    "KantorovichRubinstein",
    "LipschitzLoss",
    "LipschitzSum",
    "LossCheck",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "MultiLabelCrossEntropy",
    "MulticlassHinge",
    "PreActivationPenalty",
    "RecordLoss",
    "ScaledBinaryCrossEntropy",
    "ScaledCrossEntropy",
    "Scheduled",
    "SumAbsoluteError",
    "SumHuber",
    "SumSquaredError",
    "TailoredLoss",
    "Task",
    "TokenCrossEntropy",
    "WeightedSum",
    "WithConstant",
    "attack_constant",
    "check_loss",
    "largest_gradient",
    "loss_named",
    "losses_of",
    "register_loss",
    "registered_losses",
    "watched",
    "weighted_sum",
]
