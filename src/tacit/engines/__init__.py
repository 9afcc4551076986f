"""How per-record gradients are computed, for any program.

A pass under shadow memory (`shadow`) proves which record every number belongs to and where
parameters meet records (`plan`). A step asks autograd for the cotangents there, and the rules of a
few operators (`rules`, `products`, `convolution`) turn them into norms and clipped sums
(`book_keeping`, `sums`). What no rule covers runs once per record (`loop`). The whole step is
captured or compiled where that pays (`recorder`, `automatic`). Queries enter through an engine's
`clipped_sums`; everything that PyTorch does not offer in public is in `torch_internals`.
"""

from tacit.engines.automatic import Automatic
from tacit.engines.book_keeping import BookKeeping
from tacit.engines.clipping import Clipped, Engine, Task
from tacit.engines.loop import PerRecord
from tacit.engines.recorder import Recorder
from tacit.engines.rules import Use, gradient_rule

__all__ = [
    "Automatic",
    "BookKeeping",
    "Clipped",
    "Engine",
    "PerRecord",
    "Recorder",
    "Task",
    "Use",
    "gradient_rule",
]
