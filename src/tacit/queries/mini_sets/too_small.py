"""A mini-set that BatchNorm cannot normalise adds nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_TORCH_SAYS = "Expected more than 1 value per channel"


@contextmanager
def too_small_is_nothing() -> Iterator[bool]:
    """Go on after it where BatchNorm refused a set of one record; other errors are raised.

    A set may come down to one record: the last of a partition, or one whose others are missing. Of
    one number a channel there is no variance, and PyTorch raises. A run that ends or does not end
    depending on one record would tell of that record, so such a set's gradient is zero instead,
    which every bound allows.
    """
    try:
        yield True
    except ValueError as error:
        if _TORCH_SAYS not in str(error):
            raise
