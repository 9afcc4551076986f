"""The L2 radius around a record within which a Lipschitz network's decision cannot change.

A `Certifier` is a network split once for all records: a front, perhaps a sphere, a body and
perhaps a linear head. Each part is a copy whose sets are shrunk or grown to the weights, so its
Lipschitz constant is that of the weights. Scalers that the inputs went through become layers, so
that a radius is in units of the inputs before them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tacit.data.scaling import LinearColour, PublicScaler, RangeScaler, Scaler, UnitNorm
from tacit.errors import UnboundedLayer
from tacit.lipschitz.bounds import Bound, Parameterless
from tacit.lipschitz.integrity import (
    members,
    ours,
    require_no_hidden_code,
    require_no_hooks,
    require_no_hooks_of_all_modules,
)
from tacit.lipschitz.layers.limits import BoundedInput, ClipGradient, scaled_rows
from tacit.lipschitz.program import Program, compile_program, whole
from tacit.lipschitz.projection import Constrained
from tacit.lipschitz.propagation import output_and_lipschitz
from tacit.lipschitz.sets import SLACK
from tacit.lipschitz.steps import located
from tacit.torch_internals import tables_of


def certified_radius(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor | None = None,
    *,
    before: Scaler | Iterable[Scaler] = (),
) -> Tensor:
    """r(x) such that every x + δ with ‖δ‖₂ < r(x) has the class of x; one number per record.

    With an L-Lipschitz network, z_y − z_k moves by at most √2·L·‖δ‖, so
        r = min_{k≠y} (z_y − z_k) / (√2·L),
    with L·‖w_y − w_k‖ in the place of √2·L where the network ends in a linear layer, and |z|/L for
    one output  [Tsuzuku 2018, Prop. 1]. L is an upper bound for the present weights.
    A `BoundedInput` that clips is 1-Lipschitz; one that scales inputs onto a sphere has no constant
    and is handled by angles.

    Args:
        targets: where given, the radius is 0 for a wrong decision.
        before: the scalers that the network's inputs went through. Then `inputs` are those *before*
            scaling, and so is the radius: in pixels, say, and not in deviations from a mean.

        radii = tacit.certificates.certified_radius(model, test.inputs, test.targets)
    """
    certificates = certifier_for(model, inputs.shape[1:], before)(inputs)
    radii_B = certificates.radii_B
    if targets is None:
        return radii_B
    return torch.where(certificates.right(targets.to(radii_B.device)), radii_B, 0.0)


def radius_before_sphere(allowed_B: Tensor, norms_B: Tensor, sphere_norm: float) -> Tensor:
    """How far u may move while X·u/‖u‖ moves by less than `allowed`.

    Let u move by δ with r = ‖δ‖ < ‖u‖. The angle between u and u + δ is at most arcsin(r/‖u‖):
    among the points at distance r, the one where the line from 0 touches the circle is the
    furthest round. Directions an angle θ apart are 2X·sin(θ/2) apart on the sphere, which grows
    with θ up to π. So the angle may be θ = 2·arcsin(min(1, allowed/2X)), and then
        r < ‖u‖·sin(min(θ, π/2)).
    Beyond π/2 the limit is ‖u‖ itself, where u + δ may be 0 and have no direction.
    """
    half = (allowed_B / (2 * sphere_norm)).clamp(max=1.0)
    angle = (2 * half.asin()).clamp(max=math.pi / 2)
    return norms_B * angle.sin()


_ROUNDING = 1 + 1e-9


def slopes_of_scores(lipschitz: float, num_outputs: int, weight: Tensor | None) -> Tensor:
    """s_yk: how far z_y − z_k moves at most when the input of an L-Lipschitz body f moves by 1.

    Behind a linear head Wf(x) + c, z_y − z_k = ⟨w_y − w_k, f(x)⟩ + c_y − c_k, so s_yk =
    L·‖w_y − w_k‖. That is never above √2·L·‖W‖, since w_y − w_k = Wᵀ(e_y − e_k), and far below it
    for similar classes. Without a head W is the identity: √2·L. One output z is scored as (0, z):
    L·‖w‖, or L.
    """
    if weight is None:
        rows, rounding = torch.eye(num_outputs, dtype=torch.float64), 1.0
    else:
        rows, rounding = weight.detach().to(torch.float64), _ROUNDING
    if len(rows) == 1:
        rows = torch.cat([torch.zeros_like(rows), rows])
    # Row by row: the faster |a|² + |b|² − 2ab cancels for similar rows.
    distances = torch.stack([(row - rows).norm(dim=1) for row in rows])
    return lipschitz * distances * rounding


def allowed_moves(scores_BK: Tensor, decided_B: Tensor, slopes_KK: Tensor) -> Tensor:
    """min_{k≠y} (z_y − z_k)/s_yk: below this no z_k reaches z_y.

    0 where the gap is 0 or NaN, ∞ where nothing can close it.
    """
    gaps_BK = scores_BK.gather(1, decided_B[:, None]) - scores_BK
    moves_BK = torch.where(gaps_BK > 0, gaps_BK / slopes_KK[decided_B], 0.0)
    classes_K = torch.arange(scores_BK.shape[1], device=scores_BK.device)
    return torch.where(decided_B[:, None] == classes_K, math.inf, moves_BK).amin(dim=1)


class ScalingLayer(nn.Module, Parameterless):
    """A scaler in front of a network, with its Lipschitz constant."""

    objects = ("scaler",)

    def __init__(self, scaler: Scaler) -> None:
        super().__init__()
        self.scaler, self.constant = scaler, scaler_lipschitz(scaler)

    def forward(self, x: Tensor) -> Tensor:
        return self.scaler(x)

    def output_norm(self, x: Bound) -> float:
        return math.inf  # a mean is subtracted, and the input is not bounded anyway

    def lipschitz(self, x: Bound) -> float:
        return self.constant


def as_layers(before: Scaler | Iterable[Scaler]) -> list[nn.Module]:
    """The scalers as layers. Dividing a record by its norm is the sphere of radius 1."""
    scalers = (before,) if isinstance(before, Scaler) else before
    return [
        BoundedInput(1.0, sphere=True) if type(scaler) is UnitNorm else ScalingLayer(scaler)
        for scaler in scalers
    ]


def scaler_lipschitz(scaler: Scaler) -> float:
    """The Lipschitz constant of a scaler.

    (x − mean)/std: channel c moves by δ_c/std_c, so ‖·‖ ≤ ‖δ‖/min std. The *smallest* deviation
    decides: with the largest, as in published code, a radius is too large by their ratio.
    A range onto another: clipping is 1-Lipschitz, then the steepest slope. A colour matrix: ‖M‖₂.
    """
    if type(scaler) is PublicScaler:
        assert isinstance(scaler.std, Tensor)
        return 1 / float(scaler.std.min())
    if type(scaler) is RangeScaler:
        assert isinstance(scaler.upper, Tensor)
        assert isinstance(scaler.lower, Tensor)
        low, high = scaler.onto
        return (high - low) / float((scaler.upper - scaler.lower).min())
    if isinstance(scaler, LinearColour):
        return scaler.lipschitz
    raise ValueError(
        f"{type(scaler).__name__} has no known Lipschitz constant, so nothing is known of the "
        "inputs before it; certify the scaled inputs by leaving it out of before="
    )


def certified_copy(module: nn.Module) -> nn.Module:
    """The module in float64 and evaluation mode, each weight's set shrunk or grown to hold it.

    It is a snapshot, and changes made to an instance of a layer are refused.

    A layer's Lipschitz constant is for all weights in its set {W : norm(W) ≤ max_norm}. A weight
    whose norm is certified to be at most n is in the set with n in the place of max_norm, so the
    same layer's answer for that set holds for it: tighter than for the set it was trained in, and
    true even without a projection. A set that cannot be changed must hold its present weight.
    """
    with located("", type(module)):
        copied: nn.Module = whole(module)
    for _, layer in members(copied):
        layer.training = False
        parameters, buffers, *_ = tables_of(layer)
        for name, parameter in parameters.items():
            if parameter is not None:
                parameters[name] = nn.Parameter(parameter.detach().double(), False)
        for name, buffer in buffers.items():
            if buffer is not None:
                own = buffer.detach().clone()
                buffers[name] = own.double() if own.is_floating_point() else own
        if isinstance(layer, ClipGradient):
            layer.max_norm = (
                math.inf
            )  # certificates need the forward pass, where it is the identity
        if isinstance(layer, Constrained):
            _fit(layer)
    return copied


def _fit(layer: Any) -> None:
    own = getattr(layer, "within", None)
    for constraint in layer.constraints():
        with torch.no_grad():
            norm = float(constraint.within.norm_upper(constraint.parameter.detach()[None]))
        if constraint.within is own and is_dataclass(own) and not isinstance(own, type):
            layer.within = replace(own, max_norm=norm / (1 + SLACK))
        elif not norm <= constraint.within.max_norm * (1 + SLACK):
            raise ValueError(
                f"a parameter of a {type(layer).__name__} has norm {norm:.6g} and its set ends at "
                f"{constraint.within.max_norm:g}; call tacit.lipschitz.project(model) first"
            )


@dataclass(frozen=True)
class Certificates:
    """The class of each record, and the L2 radius within which it cannot change."""

    decided_B: Tensor
    radii_B: Tensor
    one_output: bool

    def right(self, targets: Tensor) -> Tensor:
        """Which decisions are right. For one output the classes are 0 and 1, and −1 counts as 0."""
        classes_B = targets.reshape(-1)
        if len(classes_B) != len(self.decided_B):
            raise ValueError(
                "the records have several targets each, and a certificate is for one decision per "
                "record; certify a classification"
            )
        known_B = (classes_B == 1) | (classes_B == 0) | (classes_B == -1)
        if self.one_output and not known_B.all():
            raise ValueError(
                "the network has one output and the targets are not 0 and 1, or −1 and +1: a "
                "regression has no certified accuracy; certified_radius(model, inputs) without "
                "targets says when the output's sign is fixed"
            )
        return self.decided_B == (classes_B.clamp_min(0) if self.one_output else classes_B)


@dataclass(frozen=True)
class Certifier:
    """f = head ∘ body ∘ sphere ∘ front, where the sphere and the linear head are optional.

    Its parts are programs, so the margins are those of the bounded program and the model's Python
    code takes no part. `slopes_KK` bounds how far z_y − z_k moves when the input of `body` moves by
    1. The certificate is for float64 and exact arithmetic: a deployed float32 network rounds by
    some 10⁻⁶ of its outputs.
    """

    front: Program
    front_lipschitz: float
    sphere: Program | None
    sphere_norm: float
    body: Program
    head: nn.Linear | None
    slopes_KK: Tensor

    @torch.no_grad()
    def __call__(self, inputs: Tensor) -> Certificates:
        # Hooks and replaced code may be newer than the bounds.
        require_no_hooks_of_all_modules()
        for part in (self.front, self.sphere, self.body):
            if part is not None:
                part.require_originals()
        inputs = inputs.to(self.slopes_KK.device, torch.float64)
        u = self.front(inputs)
        outputs = self.body(u if self.sphere is None else self.sphere(u))
        if self.head is not None:
            outputs = linear(outputs, self.head.weight, self.head.bias)
        outputs_BK = outputs.unsqueeze(1) if outputs.dim() == 1 else outputs
        one_output = outputs_BK.shape[1] == 1
        scores_BK = outputs_BK
        if one_output:  # positive or not: 0 and NaN are not
            z_B1 = outputs_BK.nan_to_num(0.0)
            scores_BK = torch.cat([torch.zeros_like(z_B1), z_B1], dim=1)
        decided_B = scores_BK.argmax(dim=1)
        allowed_B = allowed_moves(scores_BK, decided_B, self.slopes_KK)
        if self.sphere is not None:
            norms_B = scaled_rows(u)[2].squeeze(1)
            norms_B = torch.where(norms_B.isfinite(), norms_B, 0.0)
            allowed_B = radius_before_sphere(allowed_B, norms_B, self.sphere_norm)
            allowed_B = allowed_B / self.front_lipschitz
        # A record that overflows has outputs that say nothing about it.
        finite_B = inputs.flatten(1).isfinite().all(dim=1) & outputs_BK.isfinite().all(dim=1)
        radii_B = torch.where(finite_B, allowed_B, 0.0)
        return Certificates(decided_B, radii_B, one_output)


def certifier_for(
    model: nn.Module, shape: Sequence[int], before: Scaler | Iterable[Scaler] = ()
) -> Certifier:
    """Split the network into its parts; `UnboundedLayer` if it has no Lipschitz constant."""
    try:
        require_no_hooks(model)  # before it is split: a sequence has hooks of its own
        # A copy for each use: a layer that is used twice must count twice.
        layers = [certified_copy(layer) for layer in [*as_layers(before), *_in_turn(model)]]
        return _certifier(layers, Bound(math.inf, tuple(shape)), _device_of(model))
    except UnboundedLayer as error:
        raise UnboundedLayer(f"no certificate: {error}") from error


def _certifier(layers: list[nn.Module], x: Bound, device: torch.device) -> Certifier:
    at = next((i for i, layer in enumerate(layers) if _on_sphere(layer)), None)
    sphere, norm, first = None, math.inf, 0
    if at is not None:
        layer = layers[at]
        assert isinstance(layer, BoundedInput)
        sphere, norm, first = compile_program(layer), layer.max_norm, at + 1
    front = compile_program(nn.Sequential(*layers[: at or 0]))
    u, front_lipschitz = output_and_lipschitz(front, x)
    u = Bound(norm, u.shape)
    body, head = _with_head(layers[first:], u)
    outputs, lipschitz = output_and_lipschitz(body, u)
    if head is None and len(outputs.shape) > 1:
        raise ValueError(
            f"the network gives one record outputs of shape {outputs.shape}; a certificate is for "
            "one row of class scores"
        )
    weight = None if head is None else head.weight
    slopes = slopes_of_scores(lipschitz, math.prod(outputs.shape), weight).to(device)
    if not (math.isfinite(front_lipschitz) and slopes.isfinite().all()):
        raise UnboundedLayer(
            "a layer has no finite Lipschitz constant. One sphere is supported, as a step of an "
            "nn.Sequential"
        )
    return Certifier(front, front_lipschitz, sphere, norm, body, head, slopes)


def _with_head(layers: list[nn.Module], x: Bound) -> tuple[Program, nn.Linear | None]:
    """The network as a program, without the linear layer at its end, and that layer."""
    body = list(layers)
    # In the forward pass these are the identity.
    while body and type(body[-1]) in (nn.Identity, ClipGradient):
        body.pop()
    head = body[-1] if body else None
    # By its forward, which a subclass may override.
    linear_head = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
    if (
        isinstance(head, nn.Linear)
        and linear_head
        and ours(type(head))
        and not tables_of(head).children
    ):
        inner = compile_program(nn.Sequential(*body[:-1]))
        if len(output_and_lipschitz(inner, x)[0].shape) == 1:
            return inner, head
    return compile_program(nn.Sequential(*body)), None


def _device_of(model: nn.Module) -> torch.device:
    tables = (tables_of(module).parameters for _, module in members(model))
    parameters = (p for table in tables for p in table.values() if p is not None)
    return next(parameters, torch.empty(0)).device


def _in_turn(module: nn.Module) -> list[nn.Module]:
    """The steps of nested sequences, in order."""
    if type(module) is nn.Sequential:
        with located("", nn.Sequential):
            require_no_hidden_code(module, nn.Sequential)
        return [step for child in module for step in _in_turn(child)]
    return [module]


def _on_sphere(layer: nn.Module) -> bool:
    return type(layer) is BoundedInput and layer.sphere
