"""Losses of one record; each says its Lipschitz constant, or that it has none."""

from tacit.losses.attack import attack_constant, largest_gradient
from tacit.losses.binary_cross_entropy import BinaryCrossEntropy, ScaledBinaryCrossEntropy
from tacit.losses.cosine_similarity import CosineSimilarity
from tacit.losses.cross_entropy import CrossEntropy, ScaledCrossEntropy
from tacit.losses.focal import Focal
from tacit.losses.hinge import MulticlassHinge
from tacit.losses.hinge_kantorovich_rubinstein import HingeKantorovichRubinstein
from tacit.losses.kantorovich_rubinstein import KantorovichRubinstein
from tacit.losses.pre_activation_penalty import PreActivationPenalty
from tacit.losses.pre_activations import watched
from tacit.losses.record_loss import LipschitzLoss, RecordLoss
from tacit.losses.record_losses import losses_of
from tacit.losses.registry import (
    LossCheck,
    check_loss,
    loss_named,
    register_loss,
    registered_losses,
)
from tacit.losses.regression import Huber, MeanAbsoluteError, MeanSquaredError
from tacit.losses.schedule import Scheduled
from tacit.losses.sums_of_errors import SumAbsoluteError, SumHuber, SumSquaredError
from tacit.losses.tailored import TailoredLoss
from tacit.losses.task import Task
from tacit.losses.token_cross_entropy import TokenCrossEntropy
from tacit.losses.weighted_sum import LipschitzSum, WeightedSum, weighted_sum
from tacit.losses.with_constant import WithConstant

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
