"""The query that `tacit train` is asked for, from its options."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from tacit.cli.clip_options import RULES, RuleName, augmentation_from, threshold_from
from tacit.cli.networks import QueryName
from tacit.queries import (
    BookKeeping,
    Clipless,
    Eager,
    GradientQuery,
    PerRecord,
    PerSampleClip,
    Replay,
    Replayed,
    by_layer,
    by_parameter,
)


class BlocksName(enum.StrEnum):
    FLAT = "flat"
    LAYER = "layer"
    PARAMETER = "parameter"


class EngineName(enum.StrEnum):
    BOOK_KEEPING = "book-keeping"
    REPLAY = "replay"
    PER_RECORD = "per-record"


@dataclass(frozen=True)
class QueryOptions:
    """What was asked, with the recipe's values where nothing was."""

    query: QueryName
    max_norm: float
    gradient_clip: float | None
    rule: RuleName
    adaptive_quantile: float | None
    augment: int | None
    blocks: BlocksName
    engine: EngineName

    def build(self, shape: tuple[int, ...]) -> GradientQuery:
        augmentation = augmentation_from(self.augment, shape)
        if self.query is QueryName.CLIPLESS:
            return Clipless(
                gradient_clip=self._gradient_clip(),
                augmentation=augmentation,
                engine=Replayed() if self.engine is EngineName.REPLAY else Eager(),
            )
        return PerSampleClip(
            threshold_from(self.max_norm, self.adaptive_quantile),
            rule=RULES[self.rule],
            blocks=_BLOCKS[self.blocks],
            augmentation=augmentation,
            engine=_ENGINES[self.engine](),
        )

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


_BLOCKS: dict[BlocksName, Any] = {
    BlocksName.FLAT: None,
    BlocksName.LAYER: by_layer,
    BlocksName.PARAMETER: by_parameter,
}
_ENGINES: dict[EngineName, Any] = {
    EngineName.BOOK_KEEPING: BookKeeping,
    EngineName.REPLAY: Replay,
    EngineName.PER_RECORD: PerRecord,
}
