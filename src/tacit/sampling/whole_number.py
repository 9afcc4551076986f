"""Counts that a user gives must be whole numbers."""

from __future__ import annotations

import operator
from typing import SupportsIndex


def whole_number(name: str, value: SupportsIndex, least: int) -> int:
    """`value` as an int; ValueError by the argument's `name` where it is none, or below `least`."""
    try:
        count = operator.index(value)
    except TypeError:
        count = None
    if count is None or isinstance(value, bool) or count < least:
        raise ValueError(f"{name} is {value!r}; give a whole number, {least} or more")
    return count
