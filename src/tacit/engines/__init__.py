"""How per-record gradients are computed, clipped and summed, for any program.

A pass under shadow memory (`shadow`) proves which record every number belongs to and where
parameters meet records (`gradient_plan`). A step asks autograd for the cotangents at those places,
and the rules of a few operators (`rules`, `products`, `convolution_gradients`) turn them into norms
and clipped sums (`book_keeping`, `clipping`). What no rule covers runs once per
record. The whole step is captured or compiled where that pays (`recorder`). Queries
enter this package through an engine's `clipped_sums`.
"""

from tacit.engines.book_keeping import Automatic, BookKeeping, PerRecord
from tacit.engines.clipping import Clipped, ClipTask, Engine
from tacit.engines.recorder import Recorder
from tacit.engines.rules import Use, gradient_rule

__all__ = [
    "Automatic",
    "BookKeeping",
    "ClipTask",
    "Clipped",
    "Engine",
    "PerRecord",
    "Recorder",
    "Use",
    "gradient_rule",
]
