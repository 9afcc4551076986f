"""Every route and sampler, listed once: a new query is one more line in ALL_QUERIES.

Every contract in this folder then runs over it, with every model in `contract_models` that it
takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from contract_models import ALL_MODELS, VOCABULARY, ModelCase
from torch import Tensor, nn

import tacit
from tacit import AdaptiveNorm, Clipless, Normalise, PerSampleClip, Records, Relation
from tacit.data import Augmentation
from tacit.engines import PerRecord
from tacit.queries import LayerFactors, LayerwiseNorms


@dataclass(frozen=True)
class QueryCase:
    """A route. `takes` says which models it can train, `attains` how tight its bound must be.

    `adapts`: it releases statistics beside the gradient, and changes with them.
    """

    name: str
    make: Callable[[nn.Module], tacit.queries.GradientQuery]
    takes: Callable[[ModelCase], bool] = lambda model: not model.lipschitz
    attains: float = 0.95
    adapts: bool = False


def one_norm_a_layer(model: nn.Module) -> PerSampleClip:
    norms = np.geomspace(0.003, 0.03, len(tacit.by_layer(model)))
    return PerSampleClip([float(norm) for norm in norms], blocks=tacit.by_layer)


def stretched(rows: Tensor) -> Tensor:
    """View k of a record, for k = 0, 1, 2: each row from itself and its place, nothing drawn."""
    k = (torch.arange(len(rows)) % 3).view(-1, *(1,) * (rows.dim() - 1))
    return rows * (1 + 0.3 * k) if rows.is_floating_point() else (rows + k) % VOCABULARY


def a_few(model: ModelCase) -> bool:
    """Enough for a query that differs from another in one respect only."""
    return model.name in ("mlp", "cnn-group-norm", "embedding", "tied-weights")


def on_rows(model: ModelCase) -> bool:
    """Models that take the rows of `PUBLIC`."""
    return model.name in ("mlp", "tied-weights", "layer-norm", "partly-frozen")


class HalfFrozen:
    """Every other entry of every parameter no longer moves."""

    def active(self, model: nn.Module) -> dict[str, Tensor]:
        return {
            name: (torch.arange(p.numel()) % 2 == 0).view_as(p)
            for name, p in model.named_parameters()
            if p.requires_grad
        }


def is_lipschitz(model: ModelCase) -> bool:
    return model.lipschitz


PUBLIC = Records(
    torch.randn(24, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    torch.arange(24) % 2,
    name="public",
)
THREE_VIEWS = Augmentation(3, stretched)
# The noise leaves room for a gradient in batches of a few records.
FOLLOWING = AdaptiveNorm(0.05, learning_rate=0.5, count_noise=10.0)

ALL_QUERIES = [
    QueryCase("flat", lambda model: PerSampleClip(0.05), takes=lambda model: True),
    QueryCase("clipless", lambda model: Clipless(), takes=is_lipschitz, attains=0.02),
    QueryCase(
        "clipless-clipped", lambda model: Clipless(gradient_clip=0.05), is_lipschitz, attains=0.02
    ),
    QueryCase(
        "clipless-adaptive",
        lambda model: Clipless(gradient_clip=FOLLOWING),
        takes=is_lipschitz,
        attains=0.02,
        adapts=True,
    ),
    QueryCase(
        "clipless-augmented",
        lambda model: Clipless(gradient_clip=0.05, augmentation=THREE_VIEWS, blocks=tacit.by_layer),
        takes=is_lipschitz,
        attains=0.02,
    ),
    QueryCase("flat-per-record", lambda model: PerSampleClip(0.05, engine=PerRecord())),
    QueryCase("by-layer", lambda model: PerSampleClip(0.02, blocks=tacit.by_layer)),
    QueryCase("by-parameter", lambda model: PerSampleClip(0.01, blocks=tacit.by_parameter)),
    QueryCase("several-norms", one_norm_a_layer),
    QueryCase("normalise", lambda model: PerSampleClip(0.05, rule=Normalise()), takes=a_few),
    QueryCase(
        "normalise-by-layer",
        lambda model: PerSampleClip(0.02, rule=Normalise(0.0), blocks=tacit.by_layer),
        takes=a_few,
    ),
    QueryCase("adaptive", lambda model: PerSampleClip(FOLLOWING), takes=a_few, adapts=True),
    QueryCase(
        "adaptive-by-layer",
        lambda model: PerSampleClip(FOLLOWING, blocks=tacit.by_layer),
        takes=a_few,
        adapts=True,
    ),
    QueryCase(
        "layerwise",
        lambda model: PerSampleClip(LayerwiseNorms(PUBLIC, 0.02), blocks=tacit.by_parameter),
        takes=on_rows,
    ),
    QueryCase(
        "layerwise-original",
        lambda model: PerSampleClip(
            LayerwiseNorms(PUBLIC), blocks=tacit.by_layer, engine=PerRecord()
        ),
        takes=on_rows,
        attains=0.3,  # mean norms, which not every record reaches
    ),
    QueryCase(
        "factors",
        lambda model: PerSampleClip(LayerFactors(PUBLIC, 0.02), blocks=tacit.by_layer),
        takes=on_rows,
    ),
    QueryCase(
        "factors-per-record",
        lambda model: PerSampleClip(
            LayerFactors(PUBLIC, 0.02), blocks=tacit.by_layer, engine=PerRecord()
        ),
        takes=on_rows,
    ),
    QueryCase(
        "half-frozen",
        lambda model: PerSampleClip(0.02, blocks=tacit.by_layer, frozen=HalfFrozen()),
        takes=a_few,
        attains=0.8,
    ),
    QueryCase(
        "half-frozen-per-record",
        lambda model: PerSampleClip(0.05, frozen=HalfFrozen(), engine=PerRecord()),
        takes=a_few,
        attains=0.8,
    ),
    QueryCase("augmented", lambda model: PerSampleClip(0.05, augmentation=THREE_VIEWS)),
    QueryCase(
        "augmented-adaptive-per-record",
        lambda model: PerSampleClip(FOLLOWING, augmentation=THREE_VIEWS, engine=PerRecord()),
        takes=a_few,
        adapts=True,
    ),
]


@dataclass(frozen=True)
class SamplerCase:
    """A sampler. `by_id`: removing a record leaves the others' draws as they were, seed by seed."""

    name: str
    make: Callable[..., tacit.sampling.Sampler]
    relations: tuple[Relation, ...] = tuple(Relation)
    by_id: bool = False
    may_be_empty: bool = True


REPLACE = (Relation.REPLACE_ONE,)

ALL_SAMPLERS = [
    SamplerCase("poisson", lambda data, **kw: tacit.PoissonSampler(data, 0.5, **kw)),
    SamplerCase("poisson-small-rate", lambda data, **kw: tacit.PoissonSampler(data, 0.15, **kw)),
    SamplerCase(
        "fixed-size",
        lambda data, **kw: tacit.FixedSizeSampler(data, 5, **kw),
        relations=REPLACE,
        may_be_empty=False,
    ),
    SamplerCase(
        "mini-sets-chosen",
        lambda data, **kw: tacit.MiniSetSampler(data, 3, chosen=2, **kw),
        by_id=True,
    ),
    SamplerCase(
        "mini-sets-rate",
        lambda data, **kw: tacit.MiniSetSampler(data, 3, rate=0.4, **kw),
        by_id=True,
    ),
    SamplerCase(
        "shuffle",
        lambda data, **kw: tacit.ShuffleSampler(data, 5, **kw),
        relations=REPLACE,
        may_be_empty=False,
    ),
]


@dataclass
class Pair:
    """One query with one model, and records for it."""

    query_case: QueryCase
    model_case: ModelCase

    def __post_init__(self) -> None:
        self.model = self.model_case.model()
        self.query = self.query_case.make(self.model)
        self.loss = tacit.losses.CrossEntropy(temperature=0.5)

    def records(self, n: int = 6, seed: int = 1) -> Records:
        torch.manual_seed(seed)
        return Records(self.model_case.draw(n), torch.randint(0, 2, (n,)), public_size=n)

    def draw(self, n: int) -> Tensor:
        return self.model_case.draw(n)


def first_pair(query_case: QueryCase) -> Pair:
    """A query with the first model that it takes, where the model does not matter."""
    return Pair(query_case, next(m for m in ALL_MODELS if query_case.takes(m)))


PAIRS = [(q, m) for q in ALL_QUERIES for m in ALL_MODELS if q.takes(m)]
