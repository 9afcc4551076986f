"""The query that `tacit train` is asked for, from its options."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tacit.cli.clip_options import RULES, RuleName, augmentation_from, threshold_from
from tacit.cli.layerwise_options import BlocksName, LayerwiseOptions
from tacit.cli.local_options import LocalOptions
from tacit.cli.networks import QueryName
from tacit.cli.statistics_options import require_rows_enough
from tacit.engines.automatic import Automatic
from tacit.engines.book_keeping import BookKeeping, PerRecord
from tacit.engines.recorder import Recorder
from tacit.queries.batch_clip import BatchClip
from tacit.queries.bounded_gradient import GradientQuery, Loss
from tacit.queries.clipless import Clipless
from tacit.queries.clipped_query import Frozen
from tacit.queries.per_sample_clip import PerSampleClip
from tacit.queries.set_gradients import SetBySet, SetsAsRecords
from tacit.records import Records

__all__ = ["BlocksName", "EngineName", "QueryOptions"]


class EngineName(enum.StrEnum):
    AUTOMATIC = "automatic"
    BOOK_KEEPING = "book-keeping"
    PER_RECORD = "per-record"
    SET_BY_SET = "set-by-set"


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
                recorder=self._engine(),
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
            if self.engine is EngineName.BOOK_KEEPING and self.local.name is not None:
                raise ValueError(
                    f"--local is {self.local.name}, and --engine book-keeping takes mean gradients "
                    "alone; give --engine automatic or set-by-set, or leave --local out"
                )
            return BatchClip(
                mini_set_size=self.set_size, gradient=gradient, engine=self._engine(), **shared
            )
        return PerSampleClip(engine=self._engine(), **shared)

    def require_rows_enough(self, model: nn.Module, shape: tuple[int, ...]) -> None:
        """Raise if BatchNorm cannot normalise what goes through the network together."""
        option = "--mini-set-size" if self.local.name is None else "--local-batch"
        require_rows_enough(model, shape, self.local.rows(self.set_size), option)

    def _engine(self) -> Any:
        known = _ENGINES[self.query]
        if self.engine not in known:
            raise ValueError(
                f"--engine is {self.engine}, and --query {self.query} has no such engine; give "
                f"--engine {' or '.join(known)}"
            )
        return known[self.engine]()

    def _gradient_clip(self) -> Any:
        if self.gradient_clip is None:
            if self.adaptive_quantile is not None:
                raise ValueError(
                    "--adaptive-quantile moves a limit on the loss gradient, and --gradient-clip 0 "
                    "sets none; give it a first value"
                )
            return None
        return threshold_from(self.gradient_clip, self.adaptive_quantile)


_ENGINES: dict[QueryName, dict[EngineName, Callable[[], Any]]] = {
    QueryName.CLIPLESS: {
        EngineName.AUTOMATIC: Recorder,
        EngineName.BOOK_KEEPING: lambda: Recorder(capture=False, compile=False),
    },
    QueryName.CLIP: {
        EngineName.AUTOMATIC: Automatic,
        EngineName.BOOK_KEEPING: BookKeeping,
        EngineName.PER_RECORD: PerRecord,
    },
    QueryName.BATCH_CLIP: {
        EngineName.AUTOMATIC: lambda: None,  # the certificate chooses
        EngineName.BOOK_KEEPING: lambda: SetsAsRecords(BookKeeping()),
        EngineName.SET_BY_SET: SetBySet,
    },
}
