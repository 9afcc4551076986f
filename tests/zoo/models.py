"""The zoo: every case by its name, from one file per library."""

from __future__ import annotations

import mode_models
import timm_models
import torch_layers
import torch_models
import torch_programs
import torchvision_models
import transformers_text
import transformers_vision_and_sound
from zoo_case import CASES, Case

__all__ = ["CASES", "HELD_OUT", "LIBRARIES", "LISTED", "Case"]

LIBRARIES = (
    transformers_text,
    transformers_vision_and_sound,
    torchvision_models,
    timm_models,
    torch_models,
    torch_layers,
    torch_programs,
    mode_models,
)
LISTED = tuple(case for case in CASES.values() if not case.held_out)
HELD_OUT = tuple(case for case in CASES.values() if case.held_out)
