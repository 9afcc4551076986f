"""What a run looks like from the inside. None of it is private: never publish it with a model."""

from tacit.diagnostics.gradient_norms import GradientNorms, gradient_histogram
from tacit.diagnostics.input_norms import InputNorms, input_norms

__all__ = ["GradientNorms", "InputNorms", "gradient_histogram", "input_norms"]
