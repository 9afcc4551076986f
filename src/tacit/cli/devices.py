"""The device that a command is asked for."""

from __future__ import annotations

import torch

_WAYS = "give cpu, cuda or auto"


def device_from(name: str) -> torch.device:
    """The device by name, or an error if this machine has none of that name; auto chooses."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device is {name!r}, which is no device; {_WAYS}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device is {name!r}, which Tacit does not run on; {_WAYS}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"--device is {name!r}, and PyTorch finds no CUDA GPU here; give cpu or auto"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"--device is {name!r}, and there are {torch.cuda.device_count()} GPUs here, counted "
            f"from 0; {_WAYS}"
        )
    return device
