"""How far floating point can carry a layer beyond its bound.

A dot product of n terms is off by at most n·u times the product of the norms, u the unit rounding,
in any order of summation [Higham 2002, §3.1]; TensorFloat-32 and bfloat16 first cut each factor.
Every layer's answers are enlarged by the slack of the arithmetic in force. What other records do
to the rounding of a sum over the batch is not covered by this or by any bound on one record.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """The relative slack that each layer is given."""

    name: str
    slack: float


EXACT = Precision("exact", 0.0)
FLOAT64 = Precision("float64", 2.0**-38)  # 16,384 terms
FLOAT32 = Precision("float32", 2.0**-10)  # 16,384 terms
TENSOR_FLOAT = Precision("TensorFloat-32", 2.0**-9 + 2.0**-10)
HALF = Precision("bfloat16", 2.0**-6)


def precision_in_force(dtype: torch.dtype, device: torch.device) -> Precision:
    """The coarsest arithmetic that a layer of this type on this device may be run in now."""
    if torch.is_autocast_enabled(device.type) or dtype in (torch.bfloat16, torch.float16):
        return HALF
    if dtype is torch.float64:
        return FLOAT64
    coarse = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    return TENSOR_FLOAT if device.type == "cuda" and coarse else FLOAT32
