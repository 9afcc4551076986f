"""Clipless: gradients of a Lipschitz network are bounded by construction, and summed as they are.

A step first takes the loss's gradient in the outputs, one row per record, and limits it to the
bound that is accounted for. Then one backward pass gives Σ_i J_iᵀ g_i, with J_i the Jacobian of
record i's outputs in the parameters. That is the work of plain training. All of it runs in float32
or wider (`in_wide_precision`): see `tacit.precision`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tacit.checks.side_effects import function_kind, watched_step
from tacit.data.augmentation import Augmentation
from tacit.engines.clipping import ClipTask, centred_count, flattened, sum_of_flat
from tacit.engines.model_check import check_model
from tacit.engines.recorder import (
    Outputs,
    RecordedStep,
    Recorder,
    constants_on,
    padded,
)
from tacit.lipschitz.integrity import require_no_hooks_of_all_modules, require_plain_gradients
from tacit.lipschitz.layers.limits import limit_rows
from tacit.lipschitz.program import Program, compile_program, fingerprint
from tacit.lipschitz.projection import enforce
from tacit.lipschitz.propagation import Sensitivities, largest_entry, propagate
from tacit.losses.record_loss import ClippedLoss, losses_of
from tacit.precision import (
    ROWS_AT_ONCE,
    Rounding,
    in_wide_precision,
    public_rows,
    rounding_of,
    wide,
    wide_dtype,
)
from tacit.pytrees import call_model
from tacit.queries.bounded_gradient import (
    Blocks,
    BoundedGradient,
    Loss,
    blocks_from,
    by_parameter,
    check_cover,
)
from tacit.queries.thresholds import AdaptingQuery, AdaptiveNorm, Thresholds
from tacit.queries.views import ViewBatches
from tacit.sampling.sampler import Batch
from tacit.sampling.scheme import Unit

_COUNT = "#count"


@dataclass(frozen=True)
class CliplessStep:
    """The two passes as a function of records, mask, limits and weights, which can be recorded.

    `limit` is the bound that is accounted for: the clip, or the loss's own constant. The latter
    changes nothing for a loss whose gradients are within its constant. `below` asks for the centred
    count of the records whose output gradient is below it. `views` is the number of rows per
    record. A record with an entry above `largest` in size adds nothing, since it may overflow.
    """

    model: nn.Module
    loss: Loss
    parameters: dict[str, nn.Parameter]
    limit: float | Tensor
    below: float | Tensor | None = None
    views: int = 1
    largest: float = math.inf

    def through(self, recorder: Recorder, piece: Batch) -> Outputs:
        """Σ_i of the records' gradients by parameter, and the count under its own name."""
        device = piece.indices.device
        if piece.mask is None and recorder.captures(device):
            piece = padded(piece, self.views)
        mask = [] if piece.mask is None else [piece.mask]
        settings = self.below is None, self.views, self.largest, bool(mask)
        limits = constants_on(device, [self.limit, self.below or 0.0])
        step = RecordedStep(
            model=self.model,
            kind=(id(self.loss), tuple(self.parameters), settings),
            parameters=self.parameters,
            batch=[piece.inputs, piece.targets, *mask, limits],
            work=self._run,
        )
        return recorder(step)

    def _run(self, parameters: Any, batch: Sequence[Tensor]) -> Outputs:
        inputs, targets, *mask, limits = batch
        below = None if self.below is None else limits[1]
        step = replace(self, parameters=parameters, limit=limits[0], below=below)
        with in_wide_precision(self.model, inputs.device) as copies:
            weights = [copies.get(id(p), p) for p in parameters.values()]
            return step.sums(weights, wide(inputs), wide(targets), mask[0] if mask else None)

    def sums(
        self, weights: list[Tensor], inputs: Tensor, targets: Tensor, mask: Tensor | None
    ) -> Outputs:
        """`weights` are the tensors that the pass runs with: parameters, or float32 copies."""

        def of_each_record(rows: Tensor) -> Tensor:
            return rows.reshape(len(rows), -1).all(dim=1)

        keep = of_each_record(inputs.isfinite()) & of_each_record(targets.isfinite())
        if self.largest < math.inf:
            keep = keep & of_each_record(inputs.abs() <= self.largest)
        if mask is not None:
            keep = keep & mask

        def kept(rows: Tensor) -> Tensor:
            return torch.where(keep.view(-1, *(1 for _ in rows.shape[1:])), rows, 0)

        # 0 · NaN is NaN: what must not count is replaced before it enters. No branch on whether
        # there is any, since a recording would keep the answer.
        inputs, targets = kept(inputs), kept(targets)
        with torch.enable_grad():
            outputs = call_model(self.model, inputs)
            leaf = outputs.detach().requires_grad_()
            losses = losses_of(self.loss, leaf, targets)
            (cotangent,) = torch.autograd.grad(losses.sum(), leaf)
        sums: Outputs = {}
        with torch.no_grad():
            # A record that does not count does not enter the count either.
            limited, norms, finite = limit_rows(kept(cotangent), self.limit)
            if self.below is not None:
                sums[_COUNT] = centred_count(norms, self.below, keep & finite) / self.views
        # Views are averaged after the way back: a layer that limits cotangents limits each view's,
        # and K views of which each was divided by K would pass it whole.
        grads = torch.autograd.grad(outputs, weights, limited, allow_unused=True)
        for name, gradient in zip(self.parameters, grads, strict=True):
            if gradient is not None:
                sums[name] = gradient / self.views if self.views > 1 else gradient
        return sums


_MOST_PROGRAMS = 4  # per model: training and evaluation, each with two settings


class Clipless(AdaptingQuery):
    """Σ_i ∇_θ ℓ(f_θ(x_i), y_i), with no clipping of parameter gradients  [Béthune 2024, Alg. 2].

    One record's gradient of parameter θ is at most Δ_θ, the bound that `propagate` carries through
    the network; a block's is (Σ_θ Δ_θ²)^(1/2). That holds for weights in their layers' sets, so
    weights outside of them are shrunk first: soundness does not depend on a projection in the loop.
    A step takes one forward and one backward pass, like plain training, for any batch size.

    The bounds are those of the program that runs. The model is compiled once into a
    `tacit.lipschitz` program of known steps; the bounds are propagated through these steps, and
    records are sent through the same steps. The model's own Python code never sees a record.

    Args:
        gradient_clip: limits the norm of each record's loss gradient *in the outputs* to C. Then C
            takes the place of the loss's constant, and the noise is less than for the loss's worst
            case. Without it, the loss's constant is enforced in the same way. For a linear model on
            inputs of one norm this is per-sample clipping. An `AdaptiveNorm` follows a quantile of
            those norms, for a count that is charged.
        blocks: a function of the model such as `by_parameter` (default), or its value.
        augmentation: averages each record's gradient over views, each within the bound.
        recorder: records the passes where that pays.

    A record adds nothing if it is not finite, or so large that it may overflow inside the network.
    A model of bfloat16 or float16 weights, or one under autocast, still runs in float32: a sum over
    records that is rounded to 8 bits moves by many times the bound when one record is added. The
    bound of a block includes what rounding can add to a sum (`tacit.precision`).

        query = Clipless(gradient_clip=4.0)
        query.sensitivities(model, loss, input_shape=(1, 28, 28))
    """

    unit = Unit.RECORD

    def __init__(
        self,
        *,
        gradient_clip: float | AdaptiveNorm | None = None,
        blocks: Blocks | Callable[[nn.Module], Blocks] = by_parameter,
        augmentation: Augmentation | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        if isinstance(gradient_clip, int | float) and not 1e-12 <= gradient_clip < math.inf:
            raise ValueError(
                f"gradient_clip is {gradient_clip}; give a finite number of at least 1e-12, or "
                "None for no limit"
            )
        self.gradient_clip = gradient_clip
        self.blocks = blocks
        self.recorder = recorder or Recorder()
        self._views = ViewBatches(augmentation)
        self._programs: WeakKeyDictionary[nn.Module, dict[Hashable, Program]] = WeakKeyDictionary()
        self._known: WeakKeyDictionary[nn.Module, _Bounds] = WeakKeyDictionary()

    @property
    def augmentation(self) -> Augmentation | None:
        """The views of a record that its gradient is the mean of."""
        return self._views.augmentation

    def __repr__(self) -> str:
        return f"Clipless(gradient_clip={self.gradient_clip!r})"

    def __call__(self, model: nn.Module, loss: Loss, batch: Batch) -> BoundedGradient:
        known = self._bounds(model, loss, batch.records.shape)
        blocks = self.blocks_of(model)
        program, bounds = known.program, known.sensitivities
        parameters = program.trained
        enforce(model, program.constraints())
        adaptive = isinstance(self.gradient_clip, AdaptiveNorm)
        step = CliplessStep(
            program,
            loss,
            parameters,
            limit=bounds.cotangent,
            below=self.current_clip() if adaptive else None,
            views=self._views.views,
            largest=known.largest,
        )
        counted: list[Tensor] = []

        def first_views(inputs: Tensor) -> Tensor:
            views = self._views.first(inputs)
            _require_shape(batch, views.shape[1:])
            dtypes = {p.dtype for p in parameters.values()}  # a step itself widens both
            plain = not views.is_floating_point() or len(dtypes) > 1
            return views if plain else views.to(dtypes.pop())

        def check() -> bool:
            task = ClipTask(program, loss, parameters, (tuple(parameters),), (1.0,))
            return check_model(task, batch, first_views)

        def flat_sums() -> Iterator[Tensor]:
            limited = batch.at_most(ROWS_AT_ONCE, self._views.views)
            for piece in limited.physical() if plain else self._views.of(limited):
                _require_shape(batch, piece.records.shape)
                sums = step.through(self.recorder, piece)
                if _COUNT in sums:
                    counted.append(sums[_COUNT].clone())  # a recording writes there again
                yield flattened({n: sums[n] for n in parameters if n in sums}, parameters)

        key = function_kind(loss), tuple(parameters)
        plain = self._views.augmentation is None
        replays = plain and not batch.records.is_lazy
        with watched_step(program, check, key, replays=replays):
            total = sum_of_flat(flat_sums(), parameters.values())
        counts = sum(counted, total.new_zeros(1))
        larger = 1 + known.rounding.slack_of_sum(public_rows(batch.divisor))
        limits = [larger * math.hypot(*(bounds.by_parameter[n] for n in b)) for b in blocks]
        constants = self._run_constants
        return BoundedGradient(
            blocks=blocks_from(total, parameters, blocks, limits),
            divisor=batch.divisor,
            statistics=constants.statistics(counts, batch.divisor) if constants else (),
        )

    def expect(self, steps: int) -> None:
        """Announce how many steps are to come, so that compiling can be decided at once."""
        self.recorder.expect(steps)

    def forget(self) -> None:
        """Free the memory of recorded steps."""
        self.recorder.forget()

    def __getstate__(self) -> dict[str, Any]:
        """A copy compiles its models itself, as a program belongs to one model's parameters."""
        return {n: v for n, v in vars(self).items() if n not in ("_programs", "_known")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _programs=WeakKeyDictionary(), _known=WeakKeyDictionary())

    def blocks_of(self, model: nn.Module) -> Blocks:
        blocks = self.blocks(model) if callable(self.blocks) else self.blocks
        check_cover(blocks, model)
        return blocks

    def current_clip(self) -> float | None:
        """C now: a constant, or the threshold after the last release."""
        if not isinstance(self.gradient_clip, AdaptiveNorm):
            return self.gradient_clip
        constants = self._run_constants or self._begin_with(Thresholds((self.gradient_clip,)))
        return constants.constants.norms[0]

    def sensitivities(
        self, model: nn.Module, loss: Loss, input_shape: tuple[int, ...]
    ) -> Sensitivities:
        """The bounds on one record's gradient. They depend on the layers' sets, not on the weights.

        A block's bound is that of its parameters, enlarged by what rounding can add to a sum.
        """
        return self._bounds(model, loss, input_shape).sensitivities

    def _bounds(self, model: nn.Module, loss: Loss, input_shape: tuple[int, ...]) -> _Bounds:
        program = self._program_of(model)
        clip = self.current_clip()
        kinds = {(p.dtype, p.device) for p in program.parameters()}
        rounding = max((rounding_of(*kind) for kind in kinds), key=lambda r: r.slack)
        key = id(loss), clip, input_shape, rounding
        known = self._known.get(model)
        # A user's own layer may compute its bounds from anything, so it is called each time.
        stale = known is None or known.program is not program or known.key != key
        if known is None or stale or program.own_answers:
            limited = loss if clip is None else ClippedLoss(loss, clip)
            bounds = propagate(program, limited, input_shape, rounding=rounding)
            dtypes = {wide_dtype(dtype) for dtype, _ in kinds}
            largest = largest_entry(program, bounds, input_shape, dtypes)
            known = self._known[model] = _Bounds(key, loss, program, bounds, largest, rounding)
        return known

    def _program_of(self, model: nn.Module) -> Program:
        """The program of the model as it is now: in these modes, with these layers and settings."""
        require_no_hooks_of_all_modules()
        programs = self._programs.setdefault(model, {})
        program = programs.get(fingerprint(model))
        if program is None:
            if len(programs) >= _MOST_PROGRAMS:
                programs.clear()
            program = compile_program(model)
            # Taken afterwards, since a forward may count how often it was traced.
            programs[fingerprint(model)] = program
        program.require_originals()
        require_plain_gradients(program.trained.items())
        return program


@dataclass(frozen=True)
class _Bounds:
    """Bounds of a program and a loss. While the loss is held, no other has its id."""

    key: Hashable
    loss: Loss
    program: Program
    sensitivities: Sensitivities
    largest: float
    rounding: Rounding


def _require_shape(batch: Batch, seen: tuple[int, ...]) -> None:
    if tuple(seen) != batch.records.shape:
        raise ValueError(
            f"the augmentation turns records of shape {batch.records.shape} into {tuple(seen)}, "
            "for which no bounds were made; keep their shape"
        )
