"""Whether a module sends cotangents back in proportion."""

from __future__ import annotations

import math

from torch import nn


def clips_cotangents(module: nn.Module) -> bool:
    """Whether something inside limits the cotangent, as `ClipGradient` does.

    Without one, a pullback B is linear: B(t·G) = t·B(G). With one it is only increasing: a limit C
    well below G lets half of G through as if it were all of it, so where a cotangent is *shared
    out* among parts, all that is known of each part is B(G).
    """
    limits = (getattr(part, "cotangent_limit", math.inf) for part in module.modules())
    return any(limit < math.inf for limit in limits)
