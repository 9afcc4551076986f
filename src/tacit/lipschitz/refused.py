"""Why a module has no bound."""

from __future__ import annotations


class Refused(ValueError):
    """What is wrong, the rule and the way out; the walk through the network adds where it is."""
