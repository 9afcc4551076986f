"""How large a record may be, where nothing limits it, before its numbers leave floating point.

A network need not begin with `BoundedInput`: an activation such as tanh bounds what comes after it.
In front of that a finite record of 10³⁸ can become ∞ − ∞ = NaN, and one NaN voids the whole sum. So
a record with an entry above `largest_entry` adds nothing, as one that is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from tacit.errors import UnboundedLayer
from tacit.lipschitz.program import Program
from tacit.lipschitz.propagate import Sensitivities, sensitivities_of

_TRIES = 8


def largest_entry(
    program: Program,
    found: Sensitivities,
    input_shape: Sequence[int],
    dtypes: Iterable[torch.dtype],
) -> float:
    """The largest |x_j| of a record for which no activation overflows; ∞ if none can.

    `found` are the bounds for inputs of any norm: where all activations have one there is nothing
    to do. Otherwise n entries of at most T have norm at most T·√n, which `propagate` carries on;
    T is lowered until all activations are below the cube root of the largest number of the
    narrowest of `dtypes`, 7·10¹² for float32, since layers take squares and cubes. It depends on
    the layers' sets and not on any record.
    """
    if math.isfinite(_longest(found)):
        return math.inf
    limit = min(torch.finfo(dtype).max for dtype in dtypes) ** (1 / 3)
    entry = limit
    for _ in range(_TRIES):
        norm = entry * math.sqrt(math.prod(input_shape))
        finite = sensitivities_of(program, found.cotangent, input_shape, norm)
        longest = max(norm, _longest(finite))
        if longest <= limit:
            return entry
        if not math.isfinite(longest):
            break
        entry *= limit / (2 * longest)
    raise UnboundedLayer(
        "a layer has no bound on its output even where its input has one, so a record may overflow "
        "in it; begin the model with tacit.lipschitz.BoundedInput(max_norm)"
    )


def _longest(found: Sensitivities) -> float:
    return max((row.output_norm for row in found.layers), default=0.0)
