"""Does a record have the shape of an image that a network can take?"""

from __future__ import annotations

from collections.abc import Sequence


def image_shape(
    shape: Sequence[int], network: str, least: int = 1, multiple: int = 1
) -> tuple[int, int, int]:
    """(channels, height, width), or a ValueError that says what the network asks for."""
    given = "×".join(str(size) for size in shape)
    if len(shape) != 3:
        raise ValueError(
            f"{network} takes images (channels, height, width); these records have the shape "
            f"{given or 'of one number'}: use mlp"
        )
    channels, height, width = shape
    if min(height, width) < least:
        raise ValueError(
            f"{network} takes images of at least {least}×{least}; these records are {given}: "
            "use a network with less pooling, or mlp"
        )
    if height % multiple or width % multiple:
        raise ValueError(
            f"{network} cuts images into patches of {multiple}×{multiple}, which do not fill "
            f"{given}; choose a patch that divides both sides"
        )
    return channels, height, width
