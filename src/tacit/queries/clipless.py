"""Clipless: gradients of a Lipschitz network are bounded by construction, and summed as such."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Self
from weakref import WeakKeyDictionary

from torch import nn

from tacit.batch import Batch
from tacit.data.augmentation import Augmentation
from tacit.lipschitz.loss_constant import ClippedLoss
from tacit.lipschitz.precision import Precision, precision_in_force
from tacit.lipschitz.projection import constraints_of, enforce
from tacit.lipschitz.propagate import Sensitivities, propagate
from tacit.queries.adaptive_norm import COUNT_BOUND, AdaptiveNorm, Thresholds
from tacit.queries.blocks import Blocks, by_parameter, check_cover
from tacit.queries.bounded_gradient import Block, BoundedGradient, Loss, Statistic, trainable
from tacit.queries.clipless_passes import Eager, PassEngine, Passes
from tacit.queries.clipping import accumulator, flattened
from tacit.queries.view_batches import ViewBatches
from tacit.sampling.schemes import Unit


class Clipless:
    """Σ_i ∇_θ ℓ(f_θ(x_i), y_i), with no clipping of parameter gradients  [clipless paper, Alg. 2].

    One record's gradient of parameter θ is at most Δ_θ, the bound that `propagate` carries through
    the network; a block's is (Σ_θ Δ_θ²)^(1/2). That holds for weights in their layers' sets, so
    weights that are not are shrunk first: soundness does not depend on whether the loop projects.
    One forward and one backward pass of plain training, whatever the batch.

    `gradient_clip` limits the norm of each record's loss gradient *in the outputs* to C. Then C
    takes the place of the loss's constant: less bias than clipping parameter gradients, and less
    noise than the loss's worst case. For a linear model on inputs of one norm it is per-sample
    clipping. An `AdaptiveNorm` follows a quantile of those norms, for a count that is charged.
    `augmentation` averages each record's gradient over views, each within the bound. A record that
    is not finite adds nothing. `engine=Replayed()` makes the passes one CUDA graph.
    """

    unit = Unit.RECORD

    def __init__(
        self,
        *,
        gradient_clip: float | AdaptiveNorm | None = None,
        blocks: Blocks | Callable[[nn.Module], Blocks] = by_parameter,
        augmentation: Augmentation | None = None,
        engine: PassEngine | None = None,
    ) -> None:
        if isinstance(gradient_clip, int | float) and not 1e-12 <= gradient_clip < math.inf:
            raise ValueError(
                f"gradient_clip is {gradient_clip}; give a finite number of at least 1e-12, or "
                "None for no limit"
            )
        self.gradient_clip = gradient_clip
        self.blocks = blocks
        self.engine: PassEngine = engine or Eager()
        self._views = ViewBatches(augmentation)
        self._threshold: Thresholds | None = None
        self._known: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()

    def fresh(self) -> Self:
        """The same query at its first threshold: what a run begins with."""
        other = copy.copy(self)
        other._threshold = None
        return other

    @property
    def thresholds(self) -> tuple[tuple[float, ...], ...]:
        """Where the clip adapts: each C from the first to the one in force. Public."""
        return tuple(map(tuple, self._threshold.paths)) if self._threshold else ()

    def __call__(self, model: nn.Module, loss: Loss, batch: Batch) -> BoundedGradient:
        parameters = trainable(model)
        clip = self.clip_in_force()
        bounds = self.sensitivities(model, loss, batch.records.shape).by_parameter
        enforce(model)
        adaptive = isinstance(self.gradient_clip, AdaptiveNorm)
        asked = Passes(model, loss, parameters, clip, self._views.views, adaptive)
        total = accumulator(parameters.values())
        count = total.new_zeros(())
        for piece in self._views.of(batch):
            found = self.engine.run(asked, piece)
            total += flattened(found.gradients, parameters, total.dtype)
            if found.count is not None:
                count += found.count
        pieces = total.split([p.numel() for p in parameters.values()])
        sums = {n: t.view_as(p) for (n, p), t in zip(parameters.items(), pieces, strict=True)}
        statistics: tuple[Statistic, ...] = ()
        if self._threshold is not None and isinstance(self.gradient_clip, AdaptiveNorm):
            statistics = (
                Statistic(
                    name="records whose output gradient is below the clip",
                    value=count,
                    bound=COUNT_BOUND,
                    std=self.gradient_clip.noise(batch.divisor),
                    observe=partial(self._threshold.observe, 0, batch.divisor),
                ),
            )
        return BoundedGradient(
            blocks=tuple(
                Block(
                    names=names,
                    parameters=tuple(parameters[n] for n in names),
                    sums=tuple(sums[n] for n in names),
                    bound=math.sqrt(math.fsum(bounds[n] ** 2 for n in names)),
                )
                for names in self.blocks_of(model)
            ),
            divisor=batch.divisor,
            statistics=statistics,
        )

    def blocks_of(self, model: nn.Module) -> Blocks:
        blocks = self.blocks(model) if callable(self.blocks) else self.blocks
        check_cover(blocks, model)
        return blocks

    def clip_in_force(self) -> float | None:
        """C now: a constant, or what the last release has made of the threshold."""
        if not isinstance(self.gradient_clip, AdaptiveNorm):
            return self.gradient_clip
        self._threshold = self._threshold or Thresholds((self.gradient_clip,))
        return self._threshold.norms[0]

    def sensitivities(
        self, model: nn.Module, loss: Loss, input_shape: tuple[int, ...]
    ) -> Sensitivities:
        """The bounds in force. They depend on the layers' sets and not on the weights."""
        clip = self.clip_in_force()
        kinds = {(p.dtype, p.device) for p in model.parameters()}
        precision = max((precision_in_force(*kind) for kind in kinds), key=lambda p: p.slack)
        key = _key(model, loss, clip, input_shape, precision)
        known = self._known.get(model)
        if known is None or known.key != key:
            limited = loss if clip is None else ClippedLoss(loss, clip)
            found = propagate(model, limited, input_shape, precision=precision)
            known = self._known[model] = _Known(key, loss, found)
        return known.found


@dataclass(frozen=True)
class _Known:
    """Bounds, and the loss that they are for: while it is held, no other has its id."""

    key: Hashable
    loss: Loss
    found: Sensitivities


def _key(
    model: nn.Module,
    loss: Loss,
    clip: float | None,
    shape: tuple[int, ...],
    precision: Precision,
) -> Hashable:
    """All that the bounds depend on: another stride or constant is another key."""
    modules = tuple((type(m), id(m), *_plain_attributes(m)) for m in model.modules())
    sets = tuple((id(c.parameter), c.within) for c in constraints_of(model))
    trained = tuple(p.requires_grad for p in model.parameters())
    return id(loss), clip, shape, precision, modules, sets, trained


def _plain_attributes(module: nn.Module) -> list[tuple[str, object]]:
    plain = (bool, int, float, str, tuple)
    return [(k, v) for k, v in vars(module).items() if isinstance(v, plain)]
