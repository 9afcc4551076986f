"""Clipless: gradients of a Lipschitz network are bounded by construction, and summed as such.

The forward and the backward pass of the clipless query, as they are or as one CUDA graph.

The loss's gradient in the outputs is taken first, one row a record, and limited if so asked; then
it is sent back through the network in one pass: Σ_i J_iᵀ g_i, with J_i the Jacobian of record i's
outputs in the parameters. That is plain training's own work.

All of it runs in float32 or wider (`in_wide_precision`): see `tacit.lipschitz.rounding`.

Clipless: gradients of a Lipschitz network are bounded by construction, and summed as such.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tacit.checks.side_effects import function_kind, watched_step
from tacit.data.augmentation import Augmentation
from tacit.engines.automatic import padded, rows_for
from tacit.engines.clipping import ClipTask, accumulator, centred_count, flattened
from tacit.engines.model_certificate import certify
from tacit.engines.recorder import Outputs, Recorder
from tacit.lipschitz.integrity import require_no_hooks_of_all_modules, require_plain_gradients
from tacit.lipschitz.layers.clip_gradient import limit_rows
from tacit.lipschitz.program import Program, compile_program, fingerprint
from tacit.lipschitz.projection import enforce
from tacit.lipschitz.propagation import Sensitivities, largest_entry, sensitivities_of
from tacit.lipschitz.rounding import ROWS_AT_ONCE, Rounding, public_rows, rounding_of
from tacit.losses.per_record import losses_of
from tacit.losses.record_loss import ClippedLoss
from tacit.precision import in_wide_precision, wide, wide_dtype
from tacit.queries.bounded_gradient import (
    Blocks,
    BoundedGradient,
    Loss,
    blocks_from,
    by_parameter,
    check_cover,
)
from tacit.queries.per_sample_clip import ViewBatches
from tacit.queries.thresholds import AdaptiveNorm, Following, Thresholds
from tacit.sampling.batch import Batch
from tacit.sampling.scheme import Unit
from tacit.torch_internals import swapped


@dataclass(frozen=True)
class Passes:
    """What is asked: whose gradients of which loss, and what they are limited to in the outputs.

    `limit` is the bound that is accounted for: the clip, or the loss's own constant, which a loss
    that keeps to it does not feel. `below` asks for the centred count of the records whose output
    gradient is below it. `views` is how many rows a record has. A record with an entry above
    `largest` in size adds nothing, since it may overflow on its way.
    """

    model: nn.Module
    loss: Loss
    parameters: dict[str, nn.Parameter]
    limit: float | Tensor
    below: float | Tensor | None = None
    views: int = 1
    largest: float = math.inf


@dataclass(frozen=True)
class Sums:
    """Σ_i of the records' gradients, by parameter; the count, where it was asked for."""

    gradients: dict[str, Tensor]
    count: Tensor | None


def sums_of(asked: Passes, inputs: Tensor, targets: Tensor, mask: Tensor | None) -> Sums:
    with in_wide_precision(asked.model, inputs.device) as copies:
        weights = [copies.get(id(p), p) for p in asked.parameters.values()]
        return _sums(asked, weights, wide(inputs), wide(targets), mask)


def _sums(
    asked: Passes, weights: list[Tensor], inputs: Tensor, targets: Tensor, mask: Tensor | None
) -> Sums:
    """`weights` are the tensors that the pass runs with: parameters, or float32 copies of them."""
    keep = _finite(inputs) & _finite(targets)
    if asked.largest < math.inf:
        keep = keep & (inputs.abs() <= asked.largest).reshape(len(inputs), -1).all(dim=1)
    if mask is not None:
        keep = keep & mask
    # 0 · NaN is NaN: what must not count is replaced before it enters. Whether anything is must
    # not be asked, as a recording would keep the answer.
    inputs = torch.where(_as_rows(keep, inputs), inputs, 0)
    targets = torch.where(_as_rows(keep, targets), targets, 0)
    with torch.enable_grad():
        outputs = asked.model(inputs)
        leaf = outputs.detach().requires_grad_()
        losses = losses_of(asked.loss, leaf, targets)
        (cotangent,) = torch.autograd.grad(losses.sum(), leaf)
    with torch.no_grad():
        # Who does not count, counts for nothing in the count as well.
        cotangent = torch.where(_as_rows(keep, cotangent), cotangent, 0)
        limited, norms, finite = limit_rows(cotangent, asked.limit)
        keep = keep & finite
        count = None
        if asked.below is not None:
            count = centred_count(norms, asked.below, keep) / asked.views
    # Views are averaged after the way back: a layer that limits cotangents limits each view's, and
    # K views of which each was divided by K would pass it whole.
    found = torch.autograd.grad(outputs, weights, limited, allow_unused=True)
    named = {n: g for n, g in zip(asked.parameters, found, strict=True) if g is not None}
    if asked.views > 1:
        named = {name: g / asked.views for name, g in named.items()}
    return Sums(named, count)


class RecordedPasses:
    """Runs the passes through a recorder: as they are, as one CUDA graph, or compiled."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.recorder = recorder or Recorder()

    def run(self, asked: Passes, piece: Batch) -> Sums:
        if len(piece) == 0:
            return sums_of(asked, piece.inputs, piece.targets, piece.mask)
        if piece.mask is None and self.recorder.records(piece.indices.device):
            piece = padded(piece, rows_for(piece, asked.views))
        step = _Step(asked, piece.mask is not None)
        found = self.recorder(step, step.batch(piece))
        count = found.pop(_COUNT, None) if _COUNT in found else None
        return Sums({name: found[name] for name in asked.parameters if name in found}, count)

    def forget(self) -> None:
        """Give the recordings' memory back; later steps record anew."""
        self.recorder.forget()


_COUNT = "#count"


@dataclass
class _Step:
    """The passes as a function of records, mask, limits and weights."""

    asked: Passes
    masked: bool

    @property
    def model(self) -> nn.Module:
        return self.asked.model

    @property
    def key(self) -> Hashable:
        asked = self.asked
        what = (id(asked.loss), tuple(asked.parameters), asked.below is None)
        return what, asked.views, asked.largest, self.masked

    def batch(self, piece: Batch) -> list[Tensor]:
        """Everything that changes from step to step: a Python number would be recorded for good."""
        numbers = [float(self.asked.limit), float(self.asked.below or 0.0)]
        limits = torch.tensor(numbers, dtype=torch.float64)
        if piece.indices.is_cuda:
            limits = limits.pin_memory().to(piece.indices.device, non_blocking=True)
        mask = [piece.mask] if piece.mask is not None else []
        return [piece.inputs, piece.targets, *mask, limits]

    def run(self, batch: Sequence[Tensor]) -> Outputs:
        return self._run(self.asked, batch)

    def run_with(self, weights: dict[str, Tensor], batch: Sequence[Tensor]) -> Outputs:
        own = {id(p): name for name, p in self.model.named_parameters()}  # a program's own names
        parameters: Any = {n: weights[own[id(p)]] for n, p in self.asked.parameters.items()}
        with swapped(self.model, weights):
            return self._run(replace(self.asked, parameters=parameters), batch)

    def _run(self, asked: Passes, batch: Sequence[Tensor]) -> Outputs:
        inputs, targets, *mask, limits = batch
        below = None if asked.below is None else limits[1]
        asked = replace(asked, limit=limits[0], below=below)
        found = sums_of(asked, inputs, targets, mask[0] if self.masked else None)
        return found.gradients | ({} if found.count is None else {_COUNT: found.count})


def _finite(rows: Tensor) -> Tensor:
    return rows.reshape(len(rows), -1).isfinite().all(dim=1)


def _as_rows(keep: Tensor, like: Tensor) -> Tensor:
    return keep.view((len(like),) + (1,) * (like.dim() - 1))


# Of one model: training and evaluation, each with and without something.
_MOST_PROGRAMS = 4


class Clipless(Following):
    """Σ_i ∇_θ ℓ(f_θ(x_i), y_i), with no clipping of parameter gradients  [clipless paper, Alg. 2].

    One record's gradient of parameter θ is at most Δ_θ, the bound that `propagate` carries through
    the network; a block's is (Σ_θ Δ_θ²)^(1/2). That holds for weights in their layers' sets, so
    weights that are not are shrunk first: soundness does not depend on whether the loop projects.
    One forward and one backward pass of plain training, whatever the batch.

    The bounds are those of the program that runs. The model is compiled once into a
    `tacit.lipschitz` program of known steps; the bounds are propagated through these steps, and
    records are sent through the same steps. The model's own Python code never sees a record.

    `gradient_clip` limits the norm of each record's loss gradient *in the outputs* to C. Then C
    takes the place of the loss's constant, and less noise is needed than for the loss's worst
    case; the constant itself is enforced in the same way. For a linear model on inputs of one norm
    it is per-sample clipping. An `AdaptiveNorm` follows a quantile of those norms, for a count that
    is charged. `augmentation` averages each record's gradient over views, each within the bound. A
    record that is not finite adds nothing, nor one so large that it may overflow before anything
    limits it. The passes are recorded where that pays (`Recorder`).

    A model of bfloat16 or float16 weights, or one that is called under autocast, is run in float32
    all the same: a sum over records that is rounded to 8 bits moves by many times the bound when
    one record is added. The bound of a block is enlarged by what rounding can make of a sum in the
    arithmetic that is used (`tacit.lipschitz.rounding`).
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
        self.engine = RecordedPasses(recorder)
        self._views = ViewBatches(augmentation)
        self._programs: WeakKeyDictionary[nn.Module, dict[Hashable, Program]] = WeakKeyDictionary()
        self._known: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()

    def __call__(self, model: nn.Module, loss: Loss, batch: Batch) -> BoundedGradient:
        known = self._known_of(model, loss, batch.records.shape)
        blocks = self.blocks_of(model)
        program, found = known.program, known.found
        parameters = program.trained
        enforce(model, program.constraints())
        below = self.clip_in_force() if isinstance(self.gradient_clip, AdaptiveNorm) else None
        views, largest = self._views.views, known.largest
        asked = Passes(program, loss, parameters, found.cotangent, below, views, largest)
        total = accumulator(parameters.values())
        counts = total.new_zeros(1)

        def seen(inputs: Tensor) -> Tensor:
            views = self._views.first(inputs)
            _require_shape(batch, views.shape[1:])
            return _like(views, parameters)

        def check() -> bool:
            task = ClipTask(program, loss, parameters, (tuple(parameters),), (1.0,))
            return certify(task, batch, seen)

        with watched_step(program, check, (function_kind(loss), tuple(parameters))):
            for piece in self._views.of(batch.at_most(ROWS_AT_ONCE, self._views.views)):
                _require_shape(batch, piece.records.shape)
                sums = self.engine.run(asked, piece)
                total += flattened(sums.gradients, parameters)
                if sums.count is not None:
                    counts += sums.count
        larger = 1 + known.rounding.slack_of_sum(public_rows(batch.divisor))
        bounds = [larger * math.hypot(*(found.by_parameter[n] for n in names)) for names in blocks]
        followed = self._thresholds
        return BoundedGradient(
            blocks=blocks_from(total, parameters, blocks, bounds),
            divisor=batch.divisor,
            statistics=followed.statistics(counts, batch.divisor) if followed else (),
        )

    def expect(self, steps: int) -> None:
        """Announce how many steps are to come, so that compiling can be decided at once."""
        self.engine.recorder.expect(steps)

    def __getstate__(self) -> dict[str, Any]:
        """A copy compiles its models itself: programs are of the parameters they were made from."""
        return {n: v for n, v in vars(self).items() if n not in ("_programs", "_known")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _programs=WeakKeyDictionary(), _known=WeakKeyDictionary())

    def blocks_of(self, model: nn.Module) -> Blocks:
        blocks = self.blocks(model) if callable(self.blocks) else self.blocks
        check_cover(blocks, model)
        return blocks

    def clip_in_force(self) -> float | None:
        """C now: a constant, or what the last release has made of the threshold."""
        if not isinstance(self.gradient_clip, AdaptiveNorm):
            return self.gradient_clip
        self._thresholds = self._thresholds or Thresholds((self.gradient_clip,))
        return self._thresholds.norms[0]

    def sensitivities(
        self, model: nn.Module, loss: Loss, input_shape: tuple[int, ...]
    ) -> Sensitivities:
        """The bounds on one record's gradient. They depend on the layers' sets, not on the weights.

        A block's bound is that of its parameters, and what rounding can make of a sum.
        """
        return self._known_of(model, loss, input_shape).found

    def _known_of(self, model: nn.Module, loss: Loss, input_shape: tuple[int, ...]) -> _Known:
        program = self._program_of(model)
        clip = self.clip_in_force()
        kinds = {(p.dtype, p.device) for p in program.parameters()}
        rounding = max((rounding_of(*kind) for kind in kinds), key=lambda p: p.slack)
        key = id(loss), clip, input_shape, rounding
        known = self._known.get(model)
        # Answers of a user's own layer may read anything, so they are asked for each time.
        stale = known is None or known.program is not program or known.key != key
        if known is None or stale or program.own_answers:
            limited = loss if clip is None else ClippedLoss(loss, clip)
            found = sensitivities_of(program, limited, input_shape, rounding=rounding)
            wide = {wide_dtype(dtype) for dtype, _ in kinds}
            largest = largest_entry(program, found, input_shape, wide)
            known = self._known[model] = _Known(key, loss, program, found, largest, rounding)
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
class _Known:
    """Bounds of a program and a loss. While the loss is held, no other has its id."""

    key: Hashable
    loss: Loss
    program: Program
    found: Sensitivities
    largest: float
    rounding: Rounding


def _like(inputs: Tensor, parameters: dict[str, nn.Parameter]) -> Tensor:
    """Inputs in the type of the weights; a step itself widens both."""
    dtypes = {p.dtype for p in parameters.values()}
    return inputs.to(dtypes.pop()) if inputs.is_floating_point() and len(dtypes) == 1 else inputs


def _require_shape(batch: Batch, seen: tuple[int, ...]) -> None:
    if tuple(seen) != batch.records.shape:
        raise ValueError(
            f"the augmentation turns records of shape {batch.records.shape} into {tuple(seen)}, "
            "for which no bounds were made; keep their shape"
        )
