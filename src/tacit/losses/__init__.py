"""Losses of one record; each says its Lipschitz constant, or that it has none."""

from tacit.losses.attack import attack_constant, largest_gradient
from tacit.losses.binary_cross_entropy import BinaryCrossEntropy, ScaledBinaryCrossEntropy
from tacit.losses.cosine_similarity import CosineSimilarity
from tacit.losses.cross_entropy import CrossEntropy, ScaledCrossEntropy
from tacit.losses.hinge import MulticlassHinge
from tacit.losses.hinge_kantorovich_rubinstein import HingeKantorovichRubinstein
from tacit.losses.kantorovich_rubinstein import KantorovichRubinstein
from tacit.losses.record_loss import LipschitzLoss, RecordLoss
from tacit.losses.regression import Huber, MeanAbsoluteError, MeanSquaredError
from tacit.losses.with_constant import WithConstant

__all__ = [
    "BinaryCrossEntropy",
    "CosineSimilarity",
    "CrossEntropy",
    "HingeKantorovichRubinstein",
    "Huber",
    "KantorovichRubinstein",
    "LipschitzLoss",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "MulticlassHinge",
    "RecordLoss",
    "ScaledBinaryCrossEntropy",
    "ScaledCrossEntropy",
    "WithConstant",
    "attack_constant",
    "largest_gradient",
]
