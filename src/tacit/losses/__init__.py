"""Losses of one record; each says its Lipschitz constant, or that it has none."""

from tacit.losses.classification import (
    BinaryCrossEntropy,
    CosineSimilarity,
    CrossEntropy,
    Focal,
    HingeKantorovichRubinstein,
    KantorovichRubinstein,
    MulticlassHinge,
    ScaledBinaryCrossEntropy,
    ScaledCrossEntropy,
    TokenCrossEntropy,
)
from tacit.losses.loss_constant import attack_constant, largest_gradient
from tacit.losses.pre_activations import watched
from tacit.losses.record_loss import (
    LipschitzLoss,
    LipschitzSum,
    RecordLoss,
    Scheduled,
    Task,
    WeightedSum,
    WithConstant,
    weighted_sum,
)
from tacit.losses.record_losses import losses_of
from tacit.losses.registry import (
    LossCheck,
    check_loss,
    loss_named,
    register_loss,
    registered_losses,
)
from tacit.losses.regression import (
    Huber,
    MeanAbsoluteError,
    MeanSquaredError,
    SumAbsoluteError,
    SumHuber,
    SumSquaredError,
)
from tacit.losses.tailored import PreActivationPenalty, TailoredLoss

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
