"""Blocks and their constants, as `tacit train` is asked for them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import typer
from torch import nn

from tacit.queries.batch_clip import BatchClip
from tacit.queries.bounded_gradient import Blocks, Loss, by_layer, by_parameter
from tacit.queries.set_gradients import SetGradient
from tacit.queries.thresholds import Decaying, LayerFactors, LayerwiseNorms, group_by_norm
from tacit.records import Records

_SETS_TO_GROUP_BY = 8


class BlocksName(enum.StrEnum):
    FLAT = "flat"
    LAYER = "layer"
    PARAMETER = "parameter"


class LayerwiseName(enum.StrEnum):
    NONE = "none"
    ORIGINAL = "original"
    ENHANCED = "enhanced"
    FACTORS = "factors"


LAYERWISE = typer.Option(
    LayerwiseName.NONE,
    help="Constants of the blocks from public records: enhanced (the master constant, shared out "
    "by norms), original (the norms themselves), factors (one clip, scaled layers).",
)
GROUPS = typer.Option(None, help="Put blocks of similar norms into so many, by public records.")
MASTER_DECAY = typer.Option(None, help="Multiply the master constant by this after every epoch.")


@dataclass(frozen=True)
class LayerwiseOptions:
    """`blocks` names what is clipped together; the rest, where its constants come from."""

    blocks: BlocksName = BlocksName.FLAT
    name: LayerwiseName = LayerwiseName.NONE
    groups: int | None = None
    master_decay: float | None = None

    @property
    def needs_public(self) -> bool:
        return self.name is not LayerwiseName.NONE or self.groups is not None

    @property
    def several(self) -> bool:
        """Whether there are blocks with noise of their own. Factors make one block of all."""
        return self.blocks is not BlocksName.FLAT and self.name is not LayerwiseName.FACTORS

    def check(self, max_norm: float | None, adaptive_quantile: float | None) -> None:
        """Raise for what does not go together; `max_norm` is None where nobody gave one."""
        if self.needs_public and self.blocks is BlocksName.FLAT:
            asked = f"--layerwise {self.name}" if self.groups is None else f"--groups {self.groups}"
            raise ValueError(
                f"{asked} is about the blocks of the gradient, and --blocks flat makes one of it; "
                "give --blocks layer or --blocks parameter"
            )
        if self.name is not LayerwiseName.NONE and adaptive_quantile is not None:
            raise ValueError(
                f"--layerwise {self.name} takes the constants from public records, and "
                f"--adaptive-quantile {adaptive_quantile:g} from private counts; give one of them"
            )
        if self.name is LayerwiseName.ORIGINAL and max_norm is not None:
            raise ValueError(
                f"--max-norm is {max_norm:g}, and --layerwise original clips each block to its own "
                "norm on public records; leave --max-norm out, or give --layerwise enhanced"
            )
        scheduled = (LayerwiseName.ENHANCED, LayerwiseName.FACTORS)
        if self.master_decay is not None and self.name not in scheduled:
            raise ValueError(
                f"--master-decay is {self.master_decay:g}, and --layerwise {self.name} has no "
                "master constant; give --layerwise enhanced or factors"
            )

    def constants(
        self, public: Records | None, master: float, per_epoch: int
    ) -> LayerwiseNorms | LayerFactors | None:
        """Where the query takes its constants from, estimated anew each epoch; None for a C."""
        if self.name is LayerwiseName.NONE:
            return None
        assert public is not None
        if self.name is LayerwiseName.ORIGINAL:
            return LayerwiseNorms(public, every=per_epoch)
        decay = self.master_decay
        schedule = master if decay is None else Decaying(master, decay, per_epoch)
        if self.name is LayerwiseName.FACTORS:
            return LayerFactors(public, schedule, every=per_epoch)
        return LayerwiseNorms(public, schedule, every=per_epoch)

    def blocks_for(
        self,
        model: nn.Module,
        loss: Loss,
        public: Records | None,
        set_size: int,
        gradient: SetGradient | None,
    ) -> Blocks | Callable[[nn.Module], Blocks] | None:
        """By name, or as groups that are fixed here, at the initial weights, from public records.

        A group's norms are those of what will be clipped: of mini-sets of `set_size` records.
        """
        make = _BLOCKS[self.blocks]
        if self.groups is None or make is None:
            return make
        assert public is not None
        some = public.take(slice(max(512, _SETS_TO_GROUP_BY * set_size)))
        probe = BatchClip(1.0, set_size, blocks=make, gradient=gradient)
        return group_by_norm(make(model), probe.expected_norms(model, loss, some), self.groups)


_BLOCKS: dict[BlocksName, Callable[[nn.Module], Blocks] | None] = {
    BlocksName.FLAT: None,
    BlocksName.LAYER: by_layer,
    BlocksName.PARAMETER: by_parameter,
}
