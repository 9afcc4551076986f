"""The contract matrix: route × engine × model × dtype × piece size × number of records × change.

A row names one value of each factor. `FULL` is every admissible row; `PAIRWISE` is a small part of
it in which every admissible pair of values still occurs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from contract_checks import added, distances, shares
from contract_models import MATRIX_MODELS, MATRIX_VOCABULARY, ModelCase
from pairwise import Constraint, Row, pairwise
from torch import nn

import tacit
from tacit import (
    AdaptiveNorm,
    Batch,
    BatchClip,
    Clipless,
    Normalise,
    PerSampleClip,
    Records,
    Relation,
)
from tacit.data import Augmentation
from tacit.engines import Automatic, BookKeeping, PerRecord, Recorder
from tacit.queries import LayerFactors, LayerwiseNorms, LocalRun, SetBySet, SetsAsRecords
from tacit.sampling import MiniSets, Poisson

SET_SIZE = 2
CLIP = 2.0**-5
LOSS = tacit.losses.CrossEntropy(temperature=0.5)


def twice(rows: torch.Tensor) -> torch.Tensor:
    """Two views of a record: itself, and itself halved or shifted. Nothing is drawn."""
    k = (torch.arange(len(rows), device=rows.device) % 2).view(-1, *(1,) * (rows.dim() - 1))
    return rows / (1 + k) if rows.is_floating_point() else (rows + k) % MATRIX_VOCABULARY


class HalfFrozen:
    """Every other entry of every parameter does not move."""

    def active(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return {
            name: (torch.arange(p.numel(), device=p.device) % 2 == 0).view_as(p)
            for name, p in model.named_parameters()
        }


def several(model: nn.Module) -> list[float]:
    return [CLIP / (1 + i) for i in range(len(tacit.by_parameter(model)))]


def adaptive() -> AdaptiveNorm:
    return AdaptiveNorm(CLIP, learning_rate=0.5, count_noise=10.0)


# A route makes a query from a model, an engine and a public set of records.
Make = Callable[[nn.Module, object, Records], tacit.queries.GradientQuery]

BY_RECORD: dict[str, Make] = {
    "flat": lambda m, e, p: PerSampleClip(CLIP, engine=e),
    "by-layer": lambda m, e, p: PerSampleClip(CLIP, blocks=tacit.by_layer, engine=e),
    "several-norms": lambda m, e, p: PerSampleClip(several(m), blocks=tacit.by_parameter, engine=e),
    "normalise": lambda m, e, p: PerSampleClip(CLIP, rule=Normalise(), engine=e),
    "adaptive": lambda m, e, p: PerSampleClip(adaptive(), blocks=tacit.by_layer, engine=e),
    "layerwise": lambda m, e, p: PerSampleClip(
        LayerwiseNorms(p, CLIP), blocks=tacit.by_parameter, engine=e
    ),
    "factors": lambda m, e, p: PerSampleClip(
        LayerFactors(p, CLIP), blocks=tacit.by_layer, engine=e
    ),
    "half-frozen": lambda m, e, p: PerSampleClip(CLIP, frozen=HalfFrozen(), engine=e),
    "augmented": lambda m, e, p: PerSampleClip(CLIP, augmentation=Augmentation(2, twice), engine=e),
}
BY_CONSTRUCTION: dict[str, Make] = {
    "clipless": lambda m, e, p: Clipless(recorder=e),
    "clipless-clipped": lambda m, e, p: Clipless(
        gradient_clip=CLIP, blocks=tacit.by_layer, recorder=e
    ),
    "clipless-adaptive": lambda m, e, p: Clipless(gradient_clip=adaptive(), recorder=e),
    "clipless-augmented": lambda m, e, p: Clipless(augmentation=Augmentation(2, twice), recorder=e),
}
BY_SET: dict[str, Make] = {
    "sets": lambda m, e, p: BatchClip(CLIP, SET_SIZE, engine=e),
    "sets-by-layer": lambda m, e, p: BatchClip(CLIP, SET_SIZE, blocks=tacit.by_layer, engine=e),
    "sets-adaptive": lambda m, e, p: BatchClip(adaptive(), SET_SIZE, engine=e),
    "sets-layerwise": lambda m, e, p: BatchClip(
        LayerwiseNorms(p, CLIP), SET_SIZE, blocks=tacit.by_parameter, engine=e
    ),
    "sets-local-run": lambda m, e, p: BatchClip(
        CLIP,
        SET_SIZE,
        gradient=LocalRun(functools.partial(torch.optim.SGD, lr=0.5), at_once=1),
        engine=e,
    ),
}
ROUTES = BY_RECORD | BY_CONSTRUCTION | BY_SET

ENGINES_BY_RECORD: dict[str, Callable[[], object]] = {
    "book-keeping": BookKeeping,
    "per-record": PerRecord,
    # Both sums by one program: a step that compiles between them rounds otherwise under autocast.
    "automatic": lambda: Automatic(Recorder(compile=False)),
}
ENGINES_BY_CONSTRUCTION = {
    "eager": lambda: Recorder(capture=False, compile=False),
    "recorded-passes": Recorder,
}
ENGINES_BY_SET = {
    "set-by-set": SetBySet,
    "sets-as-records": SetsAsRecords,
    "default-sets": lambda: None,
}
ENGINES = ENGINES_BY_RECORD | ENGINES_BY_CONSTRUCTION | ENGINES_BY_SET

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "autocast": torch.float32,
}
PIECES = {"whole": None, "two": 2, "one": 1}
MODELS = {case.name: case for case in MATRIX_MODELS}
# A sum of N equal numbers, rounded to bfloat16, jumps between N and N + 1 for N = 1028 and 4112.
SIZES = {str(n): n for n in (1, 2, 7, 65, 1028, 4112, 8192)}
CHANGES = ("add", "remove", "replace")

FACTORS = {
    "route": tuple(ROUTES),
    "engine": tuple(ENGINES),
    "model": tuple(MODELS),
    "dtype": tuple(DTYPES),
    "piece": tuple(PIECES),
    "size": tuple(SIZES),
    "change": CHANGES,
}


FAMILIES = (
    (BY_RECORD, ENGINES_BY_RECORD),
    (BY_CONSTRUCTION, ENGINES_BY_CONSTRUCTION),
    (BY_SET, ENGINES_BY_SET),
)


def engine_of_route(route: str, engine: str) -> bool:
    if route == "sets-local-run" and engine not in ("set-by-set", "default-sets"):
        return False  # the other engines compute mean gradients alone
    return any(route in routes and engine in engines for routes, engines in FAMILIES)


def model_of_engine(engine: str, model: str) -> bool:
    if model == "batch-norm":  # its records meet, so it is trained in sets
        return engine in ENGINES_BY_SET and engine != "sets-as-records"
    return MODELS[model].lipschitz == (engine in ENGINES_BY_CONSTRUCTION)


def passes(route: str, engine: str, piece: str, size: str) -> int:
    """How many passes through the model a query takes."""
    n, rows = SIZES[size], PIECES[piece]
    if route in BY_SET:
        one_by_one = route == "sets-local-run" or engine == "set-by-set"
        return -(-n // SET_SIZE) if one_by_one or rows else 1
    views = 2 if route.endswith("augmented") else 1
    if engine == "per-record":
        return n * views
    return -(-n * views // rows) if rows else 1


def affordable(route: str, engine: str, model: str, piece: str, size: str) -> bool:
    """Thousands of passes only where a pass is quick."""
    count = passes(route, engine, piece, size)
    quick = engine in ("eager", "set-by-set", "per-record") and model.endswith("ties")
    return count <= (130 if model in SLOW else 600) or (quick and count <= 8192)


SLOW = ("cnn-group-norm", "attention", "recurrent", "lipschitz-cnn")
RUNS = [
    Constraint(("route", "engine"), engine_of_route),
    Constraint(("engine", "model"), model_of_engine),
]
QUICK = Constraint(("route", "engine", "model", "piece", "size"), affordable)
# Rounding shows in low precision, in whole batches and in large ones: they fill the free places.
WEIGHTS = {("piece", "whole"): 4.0, ("size", "1028"): 4.0, ("size", "4112"): 3.0}
WEIGHTS |= {("dtype", "bfloat16"): 3.0, ("dtype", "autocast"): 3.0}
PAIRWISE = pairwise(FACTORS, [*RUNS, QUICK], WEIGHTS)


def full() -> Iterator[Row]:
    """Every route, engine, dtype, piece size, number of records and change that can be combined.

    The models take turns; where a query takes thousands of passes, only the quickest model does.
    """
    for route, engine in itertools.product(ROUTES, ENGINES):
        if not engine_of_route(route, engine):
            continue
        rest = itertools.product(DTYPES, PIECES, SIZES, CHANGES)
        for turn, (dtype, piece, size, change) in enumerate(rest):
            fit = [model for model in MODELS if model_of_engine(engine, model)]
            if passes(route, engine, piece, size) > 1100:
                fit = [model for model in fit if model.endswith("ties")]
            model = fit[turn % len(fit)]
            yield dict(
                zip(FACTORS, (route, engine, model, dtype, piece, size, change), strict=True)
            )


@dataclass(frozen=True)
class Setting:
    """A row as objects: a model, records and a query of their dtype."""

    row: Row
    device: str = "cpu"

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.row["dtype"]]

    @property
    def in_sets(self) -> bool:
        return self.row["route"] in BY_SET

    @property
    def case(self) -> ModelCase:
        return MODELS[self.row["model"]]

    def drawn(self, n: int, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        inputs = self.case.draw(n).to(self.device)
        return inputs.to(self.dtype) if inputs.is_floating_point() else inputs

    def query(self, model: nn.Module) -> tacit.queries.GradientQuery:
        public = Records(
            self.drawn(8, seed=7), torch.arange(8, device=self.device) % 2, name="public"
        )
        engine = ENGINES[self.row["engine"]]()
        return ROUTES[self.row["route"]](model, engine, public)

    def model(self) -> nn.Module:
        return self.case.model().to(self.device, self.dtype)

    def neighbours(self) -> tuple[Records, Records]:
        """N identical records, and the same with one added, removed or replaced.

        The new record of a replacement has the other class, so its gradient points the other way;
        in a set it is also larger than the others, so that it turns the whole set around.
        """
        n = SIZES[self.row["size"]]
        x = self.drawn(1, seed=1)
        labels = torch.zeros(n, dtype=torch.long, device=self.device)
        here = Records(x.expand(n, *x.shape[1:]).clone(), labels, public_size=n)
        if self.row["change"] == "add":
            return here, added(here, x[0], 0)
        if self.row["change"] == "remove":
            return here, here.without(n // 2)
        larger = x[0] * 16 if self.in_sets and x.is_floating_point() else x[0]
        return here, here.replaced(0, larger, 1)

    @property
    def relation(self) -> Relation:
        replaced = self.row["change"] == "replace"
        return Relation.REPLACE_ONE if replaced else Relation.ADD_OR_REMOVE_ONE

    def batch(self, records: Records) -> Batch:
        size, scheme = PIECES[self.row["piece"]], Poisson(0.5)
        if self.in_sets:
            scheme = MiniSets(SIZES[self.row["size"]] + SET_SIZE, SET_SIZE, rate=0.5)
        return Batch(
            records=records,
            indices=torch.arange(len(records), device=self.device),
            divisor=10.0,
            scheme=scheme,
            groups=records.record_ids // SET_SIZE if self.in_sets else None,
            max_physical=size,
        )

    @contextlib.contextmanager
    def arithmetic(self) -> Iterator[None]:
        """Autocast where the row asks for it; oneDNN's bfloat16 kernels off.

        oneDNN's bfloat16 kernels stop the process on virtual machines that hide AMX.
        """
        low = self.row["dtype"] in ("bfloat16", "autocast")
        mine = self.row["dtype"] == "autocast"
        with (
            torch.backends.mkldnn.flags(enabled=not low),
            torch.autocast(self.device, torch.bfloat16, enabled=mine),
        ):
            yield


def moves(setting: Setting, query, model: nn.Module) -> list[float]:
    """‖S(D) − S(D')‖ / Δ of each block and statistic, and of all blocks together."""
    with setting.arithmetic():
        here, there = (query(model, LOSS, setting.batch(some)) for some in setting.neighbours())
    joint = math.hypot(*distances(here, there)[: len(here.blocks)])
    declared = math.hypot(*here.sensitivities(setting.relation))
    return [*shares(here, there, setting.relation), joint / declared]
