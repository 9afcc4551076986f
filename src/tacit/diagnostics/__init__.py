"""What happens inside a run: norms, alignment, curvature, confusion, accuracy against ε.

**None of it is private**, except what is measured of released weights (`weight_norms`) or of
held-out records alone: do not publish it with a model. A measurement is a function; the callbacks
(`Diagnostic`) repeat it during a run, and each has its picture in the same module.
"""

from tacit.diagnostics.curvature import (
    Curvature,
    Spectrum,
    hessian_spectrum,
    lanczos,
    plot_curvature,
)
from tacit.diagnostics.diagnostic import Diagnostic, Point, first_of
from tacit.diagnostics.gradient_norms import (
    ClippingAlignment,
    GradientNormHistory,
    GradientNorms,
    clipping_alignment,
    gradient_histogram,
    plot_alignment,
    plot_gradient_norm_histograms,
    plot_gradient_norms,
    whole_norms,
)
from tacit.diagnostics.layer_norms import (
    ActivationNorms,
    InputNorms,
    WeightNorms,
    activation_norms,
    input_norms,
    plot_input_norms,
    plot_norms,
    weight_norms,
)
from tacit.diagnostics.predictions import (
    AccuracyCurve,
    ConfusionHistory,
    accuracy_curve,
    confusion_matrix,
    plot_ablation,
    plot_accuracy_against_epsilon,
    plot_confusion,
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
    "first_of",
    "gradient_histogram",
    "hessian_spectrum",
    "input_norms",
    "lanczos",
    "plot_ablation",
    "plot_accuracy_against_epsilon",
    "plot_alignment",
    "plot_confusion",
    "plot_curvature",
    "plot_gradient_norm_histograms",
    "plot_gradient_norms",
    "plot_input_norms",
    "plot_norms",
    "weight_norms",
    "whole_norms",
]
