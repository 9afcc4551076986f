"""What a run looks like from the inside. None of it is private: never publish it with a model.

Except what is made of released weights (`weight_norms`) or of held-out records alone.
"""

from tacit.diagnostics.accuracy_curve import AccuracyCurve, accuracy_curve
from tacit.diagnostics.alignment import ClippingAlignment, clipping_alignment
from tacit.diagnostics.confusion import ConfusionHistory, confusion_matrix
from tacit.diagnostics.curvature import Curvature, Spectrum, hessian_spectrum, lanczos
from tacit.diagnostics.diagnostic import Diagnostic, Point
from tacit.diagnostics.gradient_norms import (
    GradientNormHistory,
    GradientNorms,
    gradient_histogram,
    whole_norms,
)
from tacit.diagnostics.layer_norms import (
    ActivationNorms,
    InputNorms,
    WeightNorms,
    activation_norms,
    input_norms,
    weight_norms,
)

__all__ = [
    "AccuracyCurve",
    "ActivationNorms",
    "ClippingAlignment",
    "ConfusionHistory",
    "Curvature",
    "Diagnostic",
    "GradientNormHistory",
    "GradientNorms",
    "InputNorms",
    "Point",
    "Spectrum",
    "WeightNorms",
    "accuracy_curve",
    "activation_norms",
    "clipping_alignment",
    "confusion_matrix",
    "gradient_histogram",
    "hessian_spectrum",
    "input_norms",
    "lanczos",
    "weight_norms",
    "whole_norms",
]
