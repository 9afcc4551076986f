"""Random views of records, for gradients that are averaged over several views of each.

The bound on a record holds for any views, as long as the other records' views stay the same. A
transform that takes `words` gets random words for each row, addressed by the record's id: its views
do not depend on who else is in the batch. Other transforms draw row by row from PyTorch's
generator, so without one record all later rows have other views. The guarantee covers that as long
as nobody knows the draws, which `tacit.randomness.step_draws` ensures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar, cast

import torch
from torch import Tensor

from tacit.pytrees import Tree, map_tensors, num_rows
from tacit.randomness import view_stream

T = TypeVar("T")


@dataclass(frozen=True)
class Augmentation:
    """K views of each record, whose gradients are averaged before clipping.  [De 2022]

        g_i = (1/K)·Σ_k ∇ℓ(f(view_k(x_i)), y_i),  then clipped.

    The mean belongs to one record, so clipped to C it adds at most C, as one view would: views cost
    time and no privacy. `transform` takes a batch of inputs and returns as many, in the same order,
    each row made from that row and fresh randomness alone. One that mixes rows (mixup, statistics
    of the batch) would let a record into the others' gradients; it is refused if the first batch
    shows it. One that draws from its own generator cannot be checked: `rows_apart` promises that
    its rows do not meet. If `transform.takes_words` is True, it is called with `words=`, 16 random
    numbers from 0 to 2^32 - 1 for each row.

    If inputs are a pytree, `transform` takes the whole tree and returns one of the same structure,
    so that a view changes an image and its mask alike:

        Augmentation(4, lambda inputs: {**inputs, "image": jitter(inputs["image"])})
    """

    views: int
    transform: Callable[..., Tree]
    rows_apart: bool = False

    def __post_init__(self) -> None:
        if self.views < 1:
            raise ValueError(f"views is {self.views}; give at least 1")

    def views_of(self, inputs: T, record_ids: Tensor | None = None) -> T:
        """(B, …) to (B·K, …), each tensor: rows iK … iK + K − 1 are views of record i."""
        rows = map_tensors(lambda t: torch.repeat_interleave(t, self.views, dim=0), inputs)
        if record_ids is not None and getattr(self.transform, "takes_words", False):
            view = torch.arange(self.views, device=record_ids.device)
            offsets = (record_ids[:, None] * self.views + view).flatten()
            views = self.transform(rows, words=view_stream().blocks(offsets))
        else:
            views = self.transform(rows)
        if not isinstance(rows, Tensor):
            map_tensors(lambda a, b: None, rows, views)  # ValueError for another structure
        count, expected = num_rows(views, "the transform's result"), num_rows(rows)
        if count != expected:
            raise ValueError(
                f"the transform made {count} rows of {expected}; it must make one of each"
            )
        return cast(T, views)


@dataclass(frozen=True)
class RandomCropFlip:
    """A shift of up to `padding` pixels each way, and a mirror image half of the time.

    Pixels from outside are the image reflected at its border, or zeros with `reflect=False`.
    Output (r, c) reads input (r + dy, c + dx), with dy and dx uniform on −p … p for each row of
    the batch: indices and one gather, on the device where the images are.
    """

    padding: int = 4
    reflect: bool = True
    flip: bool = True
    takes_words: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise ValueError(f"padding is {self.padding}; give 0 or more")

    def __call__(self, images: Tensor, words: Tensor | None = None) -> Tensor:
        if not isinstance(images, Tensor):
            raise ValueError(
                f"inputs are a {type(images).__name__}, and crops and flips are for one tensor of "
                "images; write a transform that takes the tree and applies RandomCropFlip to the "
                "images in it, with `takes_words = True` and `words` passed on"
            )
        if images.dim() != 4:
            raise ValueError(
                f"a batch of inputs has shape {tuple(images.shape)}; crops and flips are for "
                "images, (records, channels, height, width)"
            )
        height, width = images.shape[2:]
        if self.reflect and self.padding >= min(height, width):
            raise ValueError(
                f"padding is {self.padding} and the images are {height} by {width}; reflection "
                "needs less padding than that, or give reflect=False"
            )
        if words is None:
            words = torch.randint(1 << 32, (len(images), 3), device=images.device)
        rows_BH, inside_BH = self._places(words[:, :1], height)
        columns_BW, inside_BW = self._places(words[:, 1:2], width)
        if self.flip:
            mirrored = words[:, 2:3] < 1 << 31
            columns_BW = torch.where(mirrored, columns_BW.flip(1), columns_BW)
            inside_BW = torch.where(mirrored, inside_BW.flip(1), inside_BW)
        places = (rows_BH[:, :, None] * width + columns_BW[:, None, :]).flatten(1)
        flat = images.flatten(2)
        cropped = flat.gather(2, places[:, None, :].expand_as(flat)).view_as(images)
        if self.reflect:
            return cropped
        inside = inside_BH[:, None, :, None] & inside_BW[:, None, None, :]
        return torch.where(inside, cropped, torch.zeros_like(cropped))

    def _places(self, words_B1: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Where each output line reads, for each image, and whether that is inside the image."""
        shift_B1 = (words_B1 * (2 * self.padding + 1) >> 32) - self.padding
        places = torch.arange(size, device=words_B1.device) + shift_B1
        inside = (places >= 0) & (places < size)
        if not self.reflect:
            return places.clamp(0, size - 1), inside
        last = size - 1
        return last - (last - places.abs()).abs(), inside
