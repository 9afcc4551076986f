"""Numbers that options take, each in its range; an error names the option."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tacit.accounting.pld import LEAST_NOISE

_MOST_SEED = 2**63


def check_numbers(given: Mapping[str, Any]) -> None:
    """Raise if a number of `tacit train` is out of its range. None is not given, and passes."""
    for name in ("epochs", "lr", "max_norm"):
        value = given[name]
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{_option(name)} is {value}; give a finite number above 0")
    momentum = given["momentum"]
    if momentum is not None and not 0 <= momentum < 1:
        raise ValueError(f"--momentum is {momentum}; give at least 0 and less than 1")
    check_gradient_clip(given["gradient_clip"])
    for name in ("batch_size", "local_batch", "max_physical_batch"):
        value = given[name]
        if value is not None and value < 1:
            raise ValueError(f"{_option(name)} is {value}; give at least 1")
    if given["steps"] is not None and given["steps"] < 0:
        raise ValueError(f"--steps is {given['steps']}; give 0 or more")
    seed = given["seed"]
    if seed is not None and not 0 <= seed < _MOST_SEED:
        raise ValueError(f"--seed is {seed}; give 0 or more, and less than 2**63")
    for name in ("noise_multiplier", "scale_noise", "statistics_noise"):
        check_noise(given[name], _option(name))


def check_gradient_clip(value: float | None) -> None:
    """0 is for no limit, and None for the recipe's."""
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise ValueError(
            f"--gradient-clip is {value}; give a finite number above 0, or 0 for no limit"
        )


def check_noise(value: float | None, option: str = "--noise-multiplier") -> None:
    """Raise for noise so little that the accountant's numbers overflow; 0 is no noise at all."""
    if value is not None and (math.isnan(value) or value < 0):
        raise ValueError(f"{option} is {value}; give 0 or more")
    if value is not None and 0 < value < LEAST_NOISE:
        raise ValueError(
            f"{option} is {value:g}, which is too little to account for, and protects nobody; give "
            f"{LEAST_NOISE:g} or more"
        )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
