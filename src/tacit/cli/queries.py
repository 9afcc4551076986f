"""The query that `tacit train` is asked for, from its options."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tacit.cli.clip_options import RULES, RuleName, augmentation_from, threshold_from
from tacit.cli.layerwise_options import BlocksName, LayerwiseOptions
from tacit.cli.local_options import LocalOptions
from tacit.cli.networks import QueryName
from tacit.cli.statistics_options import require_rows_enough
from tacit.data import Records
from tacit.engines import Recorder
from tacit.queries import (
    Automatic,
    BatchClip,
    BookKeeping,
    Clipless,
    GradientQuery,
    PerRecord,
    PerSampleClip,
)
from tacit.queries.bounded_gradient import Loss
from tacit.queries.clipped_query import Frozen
from tacit.queries.mini_sets import SetEngine

__all__ = ["BlocksName", "EngineName", "QueryOptions"]


class EngineName(enum.StrEnum):
    AUTOMATIC = "automatic"
    BOOK_KEEPING = "book-keeping"
    PER_RECORD = "per-record"


@dataclass(frozen=True)
class QueryOptions:
    """What was asked, with the recipe's values where nothing was.

    `set_size` is that of mini-sets, and 1 where records are clipped alone; `per_epoch` the steps
    of an epoch, after which constants are estimated anew.
    """

    query: QueryName
    max_norm: float
    gradient_clip: float | None
    rule: RuleName
    adaptive_quantile: float | None
    augment: int | None
    engine: EngineName
    layerwise: LayerwiseOptions = field(default_factory=LayerwiseOptions)
    local: LocalOptions = field(default_factory=LocalOptions)
    set_size: int = 1
    per_epoch: int = 1

    def build(
        self,
        model: nn.Module,
        loss: Loss,
        shape: tuple[int, ...],
        public: Records | None = None,
        frozen: Frozen | None = None,
    ) -> GradientQuery:
        augmentation = augmentation_from(self.augment, shape)
        if self.query is QueryName.CLIPLESS:
            return Clipless(
                gradient_clip=self._gradient_clip(),
                augmentation=augmentation,
                recorder=_RECORDERS[self.engine](),
            )
        gradient = self.local.gradient()
        constants = self.layerwise.constants(public, self.max_norm, self.per_epoch)
        shared: dict[str, Any] = {
            "max_norm": constants or threshold_from(self.max_norm, self.adaptive_quantile),
            "blocks": self.layerwise.blocks_for(model, loss, public, self.set_size, gradient),
            "rule": RULES[self.rule],
            "augmentation": augmentation,
            "frozen": frozen,
        }
        if self.query is QueryName.BATCH_CLIP:
            engine = self._set_engine()
            return BatchClip(
                mini_set_size=self.set_size, gradient=gradient, engine=engine, **shared
            )
        return PerSampleClip(engine=_ENGINES[self.engine](), **shared)

    def require_rows_enough(self, model: nn.Module, shape: tuple[int, ...]) -> None:
        """Raise if BatchNorm cannot normalise what goes through the network together."""
        option = "--mini-set-size" if self.local.name is None else "--local-batch"
        require_rows_enough(model, shape, self.local.rows(self.set_size), option)

    def _set_engine(self) -> SetEngine | None:
        """None chooses by the network: book-keeping where records do not meet, else set by set."""
        if self.engine is EngineName.PER_RECORD:
            raise ValueError("--engine per-record is for --query clip; leave it out")
        return None

    def _gradient_clip(self) -> Any:
        if self.engine is EngineName.PER_RECORD:
            raise ValueError("--engine per-record is for --query clip; leave it out")
        if self.gradient_clip is None:
            if self.adaptive_quantile is not None:
                raise ValueError(
                    "--adaptive-quantile moves a limit on the loss gradient, and --gradient-clip 0 "
                    "sets none; give it a first value"
                )
            return None
        return threshold_from(self.gradient_clip, self.adaptive_quantile)


_RECORDERS: dict[EngineName, Any] = {
    EngineName.AUTOMATIC: Recorder,
    EngineName.BOOK_KEEPING: lambda: Recorder(capture=False, compile=False),
}
_ENGINES: dict[EngineName, Any] = {
    EngineName.AUTOMATIC: Automatic,
    EngineName.BOOK_KEEPING: BookKeeping,
    EngineName.PER_RECORD: PerRecord,
}
