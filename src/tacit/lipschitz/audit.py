"""Attacks the bounds that layers and models claim, for authors of layers.

    from tacit.lipschitz import audit_layer
    print(audit_layer(MyLayer(), input_shape=(3, 8, 8), input_norm=2.0).require())

Gradient ascent over inputs, cotangents and feasible weights, in float64, looks for a value above a
bound. Replacing records, and batches of other sizes, show whether one record touches another. An
attack that finds nothing proves nothing; one that finds something settles the matter.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tacit.errors import UnboundedLayer
from tacit.lipschitz.program import compile_program
from tacit.lipschitz.projection import enforce, project
from tacit.lipschitz.propagation import input_lipschitz, propagate
from tacit.losses.record_loss import loss_constant

# All numbers are float64, so a value above a bound by more than this is not rounding.
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Finding:
    """One claimed bound, and the largest value that the attack reached."""

    what: str
    claimed: float
    reached: float

    @property
    def tightness(self) -> float:
        """reached/claimed. Far below 1, the bound wastes noise or the attack was too weak."""
        if self.claimed == self.reached:
            return 1.0
        return self.reached / self.claimed if self.claimed else math.inf

    @property
    def holds(self) -> bool:
        # Not `reached > claimed`, which is False for a NaN.
        return self.reached <= self.claimed * (1 + TOLERANCE) + 1e-12


@dataclass(frozen=True, repr=False)
class AuditReport:
    """Each claim of a layer or a model, the value reached against it, and the violations in words.

    `passed` means that this attack found nothing. It is no proof.
    """

    subject: str
    findings: tuple[Finding, ...]
    faults: tuple[str, ...] = ()

    @property
    def violations(self) -> tuple[str, ...]:
        return self.faults + tuple(
            f"{f.what}: claimed at most {f.claimed:.6g}, found {f.reached:.6g} "
            f"({f.tightness:.3g} times as much)"
            for f in self.findings
            if not f.holds
        )

    @property
    def passed(self) -> bool:
        return not self.violations

    def tightness(self, what: str) -> float:
        """The tightness of the claim of that name."""
        return next(f.tightness for f in self.findings if f.what == what)

    def require(self) -> AuditReport:
        """Return the report if it passed, else raise `UnboundedLayer` with every violation."""
        if not self.passed:
            raise UnboundedLayer(
                f"{self.subject} breaks its own bounds, so no noise calibrated to them is enough: "
                + "; ".join(self.violations)
            )
        return self

    def __repr__(self) -> str:
        lines = [f"AuditReport of {self.subject}: {'passed' if self.passed else 'FAILED'}"]
        lines += [
            f"  {f.what:<32} claimed {f.claimed:<12.6g} found {f.reached:<12.6g} {f.tightness:.3f}"
            for f in self.findings
        ]
        return "\n".join(lines + [f"  violation: {v}" for v in self.violations])


Loss = Callable[[Tensor, Tensor], Tensor]


def audit_layer(
    layer: nn.Module,
    input_shape: Sequence[int],
    *,
    input_norm: float = 1.0,
    steps: int = 40,
    rows: int = 6,
    restarts: int = 2,
    seed: int = 0,
) -> AuditReport:
    """Attack the three answers of a layer, or of a network without its loss.

    The answers are those of `propagate` for inputs of norm at most `input_norm` and cotangents of
    norm at most 1. Ascent starts from `rows` points at once, with the present weights and then
    `restarts - 1` times with other feasible ones. It works on a copy in float64 on the CPU, in the
    layer's present mode. Batches of 1, 2, 3, 6 and 7 records must agree with each other and with
    the program that is bounded, in outputs, cotangents and parameter gradients. Raises
    `UnboundedLayer` if the layer claims nothing.
    """
    attack = _Attack(layer, 1.0, input_shape, input_norm, steps, rows, restarts, seed)
    steepest = input_lipschitz(attack.program, attack.shape, input_norm)
    longest = attack.largest(lambda x: _row_norms(attack.outputs(x)), "x")
    findings = [Finding("output norm", attack.claims.output.norm, longest)]
    backwards = math.isfinite(steepest)
    if backwards:
        pulled_back = attack.largest(attack.cotangent_norms, "xg")
        moved = attack.largest(attack.secants, "xx")
        findings.append(Finding("Lipschitz constant", steepest, _worst([pulled_back, moved])))

    def products(x: Tensor, g: Tensor) -> Tensor:
        return (g * attack.outputs(x)).flatten(1).sum(dim=1)

    findings += attack.gradient_findings(products, "xg")
    return AuditReport(type(layer).__name__, tuple(findings), tuple(attack.faults(backwards)))


def audit_model(
    model: nn.Module,
    loss: Loss,
    input_shape: Sequence[int],
    targets: Tensor,
    *,
    input_norm: float = math.inf,
    steps: int = 40,
    rows: int = 6,
    restarts: int = 2,
    seed: int = 0,
) -> AuditReport:
    """Attack the bound on one record's gradient of each parameter, and the loss's constant.

    `targets` are the targets to try, one per row, such as `torch.arange(num_classes)`. Inputs have
    any norm, unless the model relies on `input_norm`. The loss of a batch must be the mean or the
    sum of its records' losses, else one record changes what another contributes.

        audit_model(model, CrossEntropy(), (1, 28, 28), torch.arange(10)).require()
    """
    attack = _Attack(model, loss, input_shape, input_norm, steps, rows, restarts, seed)
    if targets.is_floating_point():
        targets = targets.double()
    labels = targets[torch.arange(rows) % len(targets)]
    outputs = attack.claims.output.shape
    free = start_points(outputs, math.inf, rows, attack.generator)
    steepest = climb(lambda h: _steepness(loss, h, labels), [free], nn.Module(), steps)
    findings = [Finding("loss constant", loss_constant(loss, math.prod(outputs)), steepest)]

    def losses(x: Tensor) -> Tensor:
        return _losses_one_by_one(loss, attack.outputs(x), labels)

    findings += attack.gradient_findings(losses, "x")
    faults = attack.faults(backwards=False) + attack.loss_faults(loss, targets)
    return AuditReport(type(model).__name__, tuple(findings), tuple(faults))


class _Attack:
    """A copy of the module under attack, and the values to maximise: one number per row."""

    def __init__(
        self,
        module: nn.Module,
        loss: object,
        input_shape: Sequence[int],
        input_norm: float,
        steps: int,
        rows: int,
        restarts: int,
        seed: int,
    ) -> None:
        if not input_norm > 0:
            raise ValueError(f"input_norm is {input_norm}; give a number above 0")
        self.module = copy.deepcopy(module).to("cpu", torch.float64)
        self.model = self.module  # with the weights of the present attempt
        self.shape, self.input_norm = tuple(input_shape), input_norm
        self.steps, self.rows, self.restarts = steps, rows, restarts
        self.generator = torch.Generator().manual_seed(seed)
        enforce(self.module)
        self.program = compile_program(self.module)
        self.claims = propagate(self.program, loss, self.shape, input_norm)

    def largest(self, values: Callable[..., Tensor], free: str) -> float:
        """The most that ascent reaches. `free` says what moves: x an input, g a unit cotangent."""
        reached = []
        for attempt in range(self.restarts):
            self.model = copy.deepcopy(self.module)
            if attempt:
                randomise(self.model, self.generator)
            points = [self._inputs(self.rows) if x == "x" else self._cotangents() for x in free]
            reached.append(climb(values, points, self.model, self.steps))
        self.model = self.module
        return _worst(reached)

    def outputs(self, x: Tensor) -> Tensor:
        return same_draws(self.model, x)

    def cotangent_norms(self, x: Tensor, g: Tensor) -> Tensor:
        y = self.outputs(x)
        pulled_back = _gradient((g * y).sum(), x) if y.requires_grad else torch.zeros_like(x)
        return _row_norms(pulled_back)

    def secants(self, x: Tensor, other: Tensor) -> Tensor:
        """‖f(x) − f(x')‖/‖x − x'‖, for half of the rows with x' close to x."""
        near = x.detach().lerp(other, 1e-4)
        even = (torch.arange(len(x)) % 2 == 0).view((len(x),) + (1,) * (x.dim() - 1))
        other = torch.where(even, near, other)
        # Closer than this, the difference of two outputs is rounding.
        distances = _row_norms(x - other).clamp_min(1e-8 * min(self.input_norm, 1.0))
        return _row_norms(self.outputs(x) - self.outputs(other)) / distances

    def gradient_findings(self, scalars: Callable[..., Tensor], free: str) -> list[Finding]:
        """For each parameter, the norm of the gradient of `scalars`, which has one per row."""

        def norms(name: str, *points: Tensor) -> Tensor:
            parameter = self.model.get_parameter(name)
            gradients = [_gradient(scalar, parameter) for scalar in scalars(*points)]
            return torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])

        return [
            Finding(f"gradient of {name}", claimed, self.largest(partial(norms, name), free))
            for name, claimed in self.claims.by_parameter.items()
        ]

    def faults(self, backwards: bool) -> list[str]:
        # The last record is unlike all others.
        records = self._inputs(SIZES[-1]).rows.roll(-1, 0)
        return find_faults(self.module, self.program, records, backwards)

    def loss_faults(self, loss: Loss, targets: Tensor) -> list[str]:
        """Whether the loss of a batch is the mean, or the sum, of its records' losses."""
        records = self._inputs(SIZES[-1]).rows
        # One record is the only one of its class, which shows a loss that divides by class counts.
        labels = targets[torch.tensor([0] * (len(records) - 1) + [len(targets) - 1])]
        outputs = same_draws(self.module, records)
        of_batch, losses = loss(outputs, labels), _losses_one_by_one(loss, outputs, labels)
        reductions = (losses.mean(), losses.sum())
        if any(torch.allclose(of_batch, reduced, 1e-9, 1e-12) for reduced in reductions):
            return []
        return [
            "the loss of a batch is neither the mean nor the sum of its records' losses, so one "
            "record changes what others contribute"
        ]

    def _inputs(self, rows: int) -> Points:
        return start_points(self.shape, self.input_norm, rows, self.generator)

    def _cotangents(self) -> Points:
        shape = self.claims.output.shape
        return start_points(shape, 1.0, self.rows, self.generator, sphere=True)


def _worst(values: Sequence[float]) -> float:
    """The largest; max() would drop a NaN that does not come first."""
    return next((value for value in values if not math.isfinite(value)), max(values))


def _losses_one_by_one(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of each record as a batch of one."""
    rows = zip(outputs.split(1), targets.split(1), strict=True)
    return torch.stack([loss(output, target).sum() for output, target in rows])


def _steepness(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    return _row_norms(_gradient(_losses_one_by_one(loss, outputs, targets).sum(), outputs))


def _gradient(scalar: Tensor, of: Tensor) -> Tensor:
    """∂scalar/∂of, which can be differentiated again; zeros where nothing depends on `of`."""
    (gradient,) = torch.autograd.grad(scalar, of, create_graph=True, materialize_grads=True)
    return gradient


def _row_norms(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows.flatten(1), dim=1)


# ---- ascent --------------------------------------------------------------------------------------


@dataclass
class Points:
    """Rows of points that ascent moves, in a ball of `radius` or on the unit sphere."""

    rows: Tensor
    radius: float
    sphere: bool
    generator: torch.Generator

    def move(self, uphill: Tensor | None, stride: float, wander: bool) -> None:
        """A normalised step along the gradient; on the sphere, straight to its direction.

        Cotangents are on the sphere, and the value is convex in them (the norm of a linear image):
        moving to the normalised gradient is power iteration, which never decreases it.
        """
        flat = self.rows.detach().flatten(1)
        up = torch.zeros_like(flat) if uphill is None else uphill.flatten(1).nan_to_num(0.0)
        length = up.norm(dim=1, keepdim=True)
        ahead = torch.where(length > 0, up / length.clamp_min(1e-300), 0.0)
        if self.sphere:
            moved = torch.where(length > 0, ahead, flat)
        else:
            reach = flat.norm(dim=1, keepdim=True) if math.isinf(self.radius) else self.radius
            moved = flat + stride * reach * ahead
            norms = moved.norm(dim=1, keepdim=True).clamp_min(1e-300)
            moved = moved * (self.radius / norms).clamp(max=1.0)
        if wander:
            # A gradient of 0 is common for piecewise linear functions: try another piece.
            fresh = torch.randn(flat.shape, generator=self.generator, dtype=flat.dtype)
            fresh = fresh * flat.norm(dim=1, keepdim=True) / fresh.norm(dim=1, keepdim=True)
            moved = torch.where(length > 0, moved, fresh)
        self.rows = moved.reshape(self.rows.shape)


def start_points(
    shape: Sequence[int], radius: float, rows: int, generator: torch.Generator, sphere: bool = False
) -> Points:
    """A constant, a single entry, alternating signs, and random rows: typical extreme points.

    In a ball one row is well inside and one at 0, where functions can be steepest or undefined.
    """
    n = math.prod(shape)
    start = torch.randn(rows, n, generator=generator, dtype=torch.float64)
    patterns = (torch.ones(n), torch.arange(n) == n // 2, (-1.0) ** torch.arange(n))
    for row, pattern in zip(start, patterns, strict=False):
        row.copy_(pattern)
    start /= start.norm(dim=1, keepdim=True)
    if not sphere:
        sizes = (1.0, 1.0, 1.0, 1.0, 0.3, 0.0) if math.isfinite(radius) else (1, 10, 0.1, 100)
        scale = torch.tensor([sizes[i % len(sizes)] for i in range(rows)], dtype=torch.float64)
        start *= scale[:, None] * (radius if math.isfinite(radius) else 1.0)
    return Points(start.reshape(rows, *shape), radius, sphere, generator)


def climb(
    values: Callable[..., Tensor], points: Sequence[Points], model: nn.Module, steps: int
) -> float:
    """The largest value reached; NaN or ∞ if one appears.

    `values` gives one number per row. In the first half all rows climb, in the second only the best
    one, so that the weights, which rows share, serve it. Weights are projected after each step.
    """
    weights = [p for p in model.parameters() if p.requires_grad]
    best = 0.0
    for step in range(steps):
        rows = [p.rows.requires_grad_(True) for p in points]
        heights = values(*rows)
        reached = heights.detach()
        if not reached.isfinite().all():
            return float(reached[~reached.isfinite()][0])
        best = max(best, float(reached.max()))
        goal = heights.sum() if 2 * step < steps else heights.max()
        try:
            uphill: Sequence[Tensor | None] = torch.autograd.grad(
                goal, [*rows, *weights], allow_unused=True
            )
        except RuntimeError:
            # Not differentiable twice: a constant, or a backward pass of its own. Points wander.
            uphill = [None] * (len(rows) + len(weights))
        stride = 1 - step / steps
        for p, up in zip(points, uphill, strict=False):
            p.move(up, stride, wander=3 * step < steps)
        if weights and step % 2:
            with torch.no_grad():
                for weight, up in zip(weights, uphill[len(points) :], strict=True):
                    length = 0.0 if up is None else float(up.norm())
                    if up is not None and 0 < length < math.inf:
                        weight.add_(up * weight.norm().clamp_min(0.1), alpha=stride / length)
            project(model)
    return best


def randomise(model: nn.Module, generator: torch.Generator) -> None:
    """Replace the weights by other feasible ones: large random ones, projected."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.copy_(10 * torch.randn(weight.shape, generator=generator))
    project(model)


# ---- isolation of records ------------------------------------------------------------------------

SIZES = (1, 2, 3, 6, 7)
_ROUNDING = 1e-9


def same_draws(module: nn.Module, x: Tensor, seed: int = 0) -> Tensor:
    """module(x) with the same random numbers each time; the caller's generator is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        # A copy: a module may write into its input.
        output: Tensor = module(x.clone())
    return output


def find_faults(
    module: nn.Module, program: nn.Module, records: Tensor, backwards: bool
) -> list[str]:
    """In words, every way in which one record was seen to touch another.

    The values and cotangents of the others must stay when a record is replaced, or when there are
    fewer records, since a forward may read their number. The gradient of a sum must be the sum of
    gradients, and buffers must stay. Cotangents of inputs need not be finite unless `backwards`.
    At every number of records the module must be the program that is bounded and trained.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}

    def run(rows: Tensor, what: nn.Module = module) -> _Pass:
        return _run(what, rows, parameters)

    whole, rest = run(records), run(records[:-1])
    faults = []
    if not whole.outputs.isfinite().all():
        faults.append("a finite record has an output that is not finite")
    if backwards and not whole.cotangents.isfinite().all():
        faults.append("a finite record has a cotangent that is not finite")
    replaced = run(torch.cat((records[:-2], records[-1:])))
    replacing = "replacing a record changes the {} of the others"
    comparisons = [(replacing, rest, replaced, len(records) - 2)]
    # Another batch size draws other random numbers, so nothing can be compared.
    if not _differ(same_draws(module, records, 1), same_draws(module, records, 2)):
        among = f"than the same among {len(records)}"
        gradients = torch.stack([run(row).gradients for row in records.split(1)])
        for n in SIZES:
            first = run(records[:n])
            comparisons.append((f"{n} records have other {{}} {among}", whole, first, n))
            if _differ(first.gradients, gradients[:n].sum(dim=0)):
                faults.append(f"the gradient of {n} records is not the sum of their gradients")
    for words, one, other, kept in comparisons:
        if _differ(one.outputs[:kept], other.outputs[:kept]):
            faults.append(words.format("outputs"))
        if _differ(one.cotangents[:kept], other.cotangents[:kept]):
            faults.append(words.format("cotangents"))
    for name, buffer in module.named_buffers():
        if not torch.equal(buffer, before[name]):
            faults.append(f"buffer {name!r} depends on the records it saw, which releases them")
    given = records.clone()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        module(given)
    if (_row_norms(given) > _row_norms(records) * (1 + _ROUNDING) + _ROUNDING).any():
        faults.append("it writes something longer over its input, which others may read")
    for n in SIZES:
        if any(map(_differ, run(records[:n]), run(records[:n], program))):
            faults.append(f"for {n} records its forward is not the program that is bounded")
    return faults


class _Pass(NamedTuple):
    """Outputs, cotangents of the inputs, and the gradient in all parameters as one vector."""

    outputs: Tensor
    cotangents: Tensor
    gradients: Tensor


def _run(module: nn.Module, records: Tensor, parameters: Sequence[Tensor]) -> _Pass:
    """Both passes for Σ_i ⟨g, y_i⟩ with the same cotangent g for each record."""
    x = records.clone().requires_grad_(True)
    y = same_draws(module, x)
    g = torch.linspace(-1, 1, max(y[0].numel(), 1), dtype=y.dtype).cos()
    total = (y.flatten(1) * g).sum()
    sources = [x, *parameters]
    gradients: Sequence[Tensor] = [torch.zeros_like(source) for source in sources]
    if total.requires_grad:
        gradients = torch.autograd.grad(total, sources, materialize_grads=True)
    in_parameters = torch.cat([x.new_zeros(1), *map(torch.flatten, gradients[1:])])
    return _Pass(y.detach(), gradients[0], in_parameters)


def _differ(a: Tensor, b: Tensor) -> bool:
    """Whether they differ by more than rounding. Values that are not finite are another fault."""
    if a.shape != b.shape:
        return True
    a, b = a.nan_to_num(0.0), b.nan_to_num(0.0)
    size = torch.maximum(a.abs(), b.abs()).max() if a.numel() else torch.zeros(())
    return bool(((a - b).abs() > _ROUNDING * size).any())
