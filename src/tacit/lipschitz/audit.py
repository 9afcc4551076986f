"""Attacks the bounds that layers and models claim, for authors of layers.

    from tacit.lipschitz import audit_layer
    print(audit_layer(MyLayer(), input_shape=(3, 8, 8), input_norm=2.0).require())

Gradient ascent over inputs, cotangents and feasible weights, in float64, looks for a value above a
bound. Adding, removing and replacing records shows whether one record touches another. An attack
that finds nothing proves nothing; one that finds something settles the matter.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tacit.errors import UnboundedLayer
from tacit.lipschitz.attack import (
    RECORDS,
    Points,
    climb,
    find_differences,
    find_faults,
    randomise,
    same_draws,
    start_points,
)
from tacit.lipschitz.program import compile_program
from tacit.lipschitz.projection import enforce
from tacit.lipschitz.propagation import input_lipschitz, sensitivities_of
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


@dataclass(frozen=True)
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

    def __str__(self) -> str:
        lines = [f"{self.subject}: {'passed' if self.passed else 'FAILED'}"]
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
    layer's present mode. Batches of 1, 2, 3 and 7 records must agree with each other and with the
    program that is bounded, in outputs, cotangents and parameter gradients. Raises `UnboundedLayer`
    if the layer claims nothing.
    """
    work = _Copy(layer, input_shape, input_norm, steps, rows, restarts, seed)
    claims = sensitivities_of(work.program, 1.0, work.shape, input_norm)
    steepest = input_lipschitz(work.program, work.shape, input_norm)
    longest = work.largest(work.output_norms, "x")
    findings = [Finding("output norm", claims.output.norm, longest)]
    if math.isfinite(steepest):
        both_ways = (work.largest(work.cotangent_norms, "xg"), work.largest(work.secants, "xx"))
        findings.append(Finding("Lipschitz constant", steepest, _worst(both_ways)))
    for name, claimed in claims.by_parameter.items():
        found = work.largest(work.gradient_norms_of(name), "xg")
        findings.append(Finding(f"gradient of {name}", claimed, found))
    faults = work.faults(backwards=math.isfinite(steepest))
    return AuditReport(type(layer).__name__, tuple(findings), tuple(faults))


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
    """
    work = _Copy(model, input_shape, input_norm, steps, rows, restarts, seed)
    if targets.is_floating_point():
        targets = targets.double()
    labels = targets[torch.arange(rows) % len(targets)]
    claims = sensitivities_of(work.program, loss, work.shape, input_norm)
    outputs = claims.output.shape
    constant = loss_constant(loss, math.prod(outputs))
    free = start_points(outputs, math.inf, rows, work.generator)
    found = climb(lambda h: _steepness(loss, h, labels), [free], nn.Module(), steps)
    findings = [Finding("loss constant", constant, found)]
    for name, claimed in claims.by_parameter.items():
        values = work.loss_gradient_norms_of(name, loss, labels)
        findings.append(Finding(f"gradient of {name}", claimed, work.largest(values, "x")))
    faults = work.faults(backwards=False) + work.loss_faults(loss, targets, claims.by_parameter)
    return AuditReport(type(model).__name__, tuple(findings), tuple(faults))


class _Copy:
    """The module under attack, and the values that ascent maximises: one number per row."""

    def __init__(
        self,
        module: nn.Module,
        shape: Sequence[int],
        input_norm: float,
        steps: int,
        rows: int,
        restarts: int,
        seed: int,
    ) -> None:
        if not input_norm > 0:
            raise ValueError(f"input_norm is {input_norm}; give a number above 0")
        self.original = copy.deepcopy(module).to("cpu", torch.float64)
        self.model = self.original
        self.shape, self.input_norm = tuple(shape), float(input_norm)
        self.steps, self.rows, self.restarts = steps, rows, restarts
        self.generator = torch.Generator().manual_seed(seed)
        enforce(self.original)
        self.program = compile_program(self.original)

    def largest(self, values: Callable[..., Tensor], free: str) -> float:
        """The most that ascent reaches. `free` says what moves: x an input, g a unit cotangent."""
        reached = []
        for attempt in range(self.restarts):
            self.model = copy.deepcopy(self.original)
            if attempt:
                randomise(self.model, self.generator)
            points = [self._inputs() if kind == "x" else self._cotangents() for kind in free]
            reached.append(climb(values, points, self.model, self.steps))
        self.model = self.original
        return _worst(reached)

    def output_norms(self, x: Tensor) -> Tensor:
        return _row_norms(same_draws(self.model, x))

    def cotangent_norms(self, x: Tensor, g: Tensor) -> Tensor:
        y = same_draws(self.model, x)
        if not y.requires_grad:
            return x.new_zeros(len(x))
        (pulled,) = torch.autograd.grad((g * y).sum(), x, create_graph=True, allow_unused=True)
        return x.new_zeros(len(x)) if pulled is None else _row_norms(pulled)

    def secants(self, x: Tensor, other: Tensor) -> Tensor:
        """‖f(x) − f(x')‖/‖x − x'‖, for half of the rows with x' close to x."""
        near = x.detach().lerp(other, 1e-4)
        even = (torch.arange(len(x)) % 2 == 0).view((len(x),) + (1,) * (x.dim() - 1))
        other = torch.where(even, near, other)
        moved = same_draws(self.model, x) - same_draws(self.model, other)
        # Closer than this, the difference of two outputs is rounding.
        apart = _row_norms(x - other).clamp_min(1e-8 * min(self.input_norm, 1.0))
        return _row_norms(moved) / apart

    def gradient_norms_of(self, name: str) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, g: self._norms(name, (g * same_draws(self.model, x)).flatten(1).sum(dim=1))

    def loss_gradient_norms_of(
        self, name: str, loss: Loss, labels: Tensor
    ) -> Callable[[Tensor], Tensor]:
        return lambda x: self._norms(name, _alone(loss, same_draws(self.model, x), labels))

    def _norms(self, name: str, of_rows: Tensor) -> Tensor:
        parameter = self.model.get_parameter(name)
        each = [
            torch.autograd.grad(of_row, parameter, create_graph=True, allow_unused=True)[0]
            for of_row in of_rows
        ]
        norms = [of_rows.new_zeros(()) if g is None else torch.linalg.vector_norm(g) for g in each]
        return torch.stack(norms)

    def faults(self, backwards: bool) -> list[str]:
        records, replacement = self._batch()
        rows = torch.cat((records, replacement))
        return [
            *find_faults(self.original, records, replacement, backwards),
            *find_differences(self.original, self.program, rows),
        ]

    def loss_faults(self, loss: Loss, targets: Tensor, bounds: dict[str, float]) -> list[str]:
        """Whether the loss of a batch is the mean, or the sum, of its records' losses."""
        records, _ = self._batch()
        # One record is alone in its class, which shows a loss that divides by class counts.
        labels = targets[torch.tensor([0] * (RECORDS - 1) + [len(targets) - 1])]
        outputs = self.original(records)
        together, alone = loss(outputs, labels), _alone(loss, outputs, labels)
        for whole in (alone.mean(), alone.sum()):
            if torch.allclose(together, whole, 1e-9, 1e-12):
                return []
        moved = self._moved_by_one(loss, records, labels, bounds)
        return [
            "the loss of a batch is neither the mean nor the sum of its records' losses, so one "
            f"record changes what others contribute: removing one moved the summed gradient by "
            f"{moved:.3g} times its bound"
        ]

    def _moved_by_one(
        self, loss: Loss, records: Tensor, labels: Tensor, bounds: dict[str, float]
    ) -> float:
        names = [name for name, bound in bounds.items() if bound > 0]
        parameters = [self.original.get_parameter(name) for name in names]

        def summed(rows: Tensor, of: Tensor) -> Sequence[Tensor | None]:
            total = len(rows) * loss(self.original(rows), of)
            return torch.autograd.grad(total, parameters, allow_unused=True)

        pairs = zip(summed(records, labels), summed(records[:-1], labels[:-1]), strict=True)
        apart = [0.0 if a is None or b is None else float((a - b).norm()) for a, b in pairs]
        return max((d / bounds[n] for n, d in zip(names, apart, strict=True)), default=math.nan)

    def _batch(self) -> tuple[Tensor, Tensor]:
        points = start_points(self.shape, self.input_norm, RECORDS + 1, self.generator).rows
        # The first row is unlike all others.
        return points[1:], points[:1]

    def _inputs(self) -> Points:
        return start_points(self.shape, self.input_norm, self.rows, self.generator)

    def _cotangents(self) -> Points:
        shape = tuple(self.model(torch.zeros(1, *self.shape, dtype=torch.float64)).shape[1:])
        return start_points(shape, 1.0, self.rows, self.generator, sphere=True)


def _worst(values: Sequence[float]) -> float:
    """The largest; max() would drop a NaN that does not come first."""
    return next((value for value in values if not math.isfinite(value)), max(values))


def _alone(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of each record as a batch of one."""
    rows = zip(outputs.split(1), targets.split(1), strict=True)
    return torch.stack([loss(output, target).sum() for output, target in rows])


def _steepness(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    total = _alone(loss, outputs, targets).sum()
    (gradients,) = torch.autograd.grad(total, outputs, create_graph=True)
    return _row_norms(gradients)


def _row_norms(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows.flatten(1), dim=1)
