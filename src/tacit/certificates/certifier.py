"""A network taken apart for certificates, once for all records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tacit.certificates.actual_norms import certified_copy
from tacit.certificates.margins import (
    allowed_moves,
    decisions,
    slopes_of_head,
    slopes_of_outputs,
)
from tacit.certificates.preprocessing import as_layers
from tacit.certificates.sphere import radius_before_sphere
from tacit.data.scaling import Scaler
from tacit.errors import UnboundedLayer
from tacit.lipschitz.integrity import (
    members,
    ours,
    require_no_hidden_code,
    require_no_hooks,
    require_no_hooks_of_all_modules,
)
from tacit.lipschitz.layers.clip_gradient import ClipGradient
from tacit.lipschitz.layers.inputs import BoundedInput
from tacit.lipschitz.program import Program, compile_program
from tacit.lipschitz.propagate import input_lipschitz
from tacit.lipschitz.steps import located


@dataclass(frozen=True)
class Certificates:
    """What is decided for each record, and within which L2 radius that cannot change."""

    decided_B: Tensor
    radii_B: Tensor
    one_output: bool

    def right(self, targets: Tensor) -> Tensor:
        """Of one output the classes are 0 and 1, and −1 is 0 as well."""
        classes_B = targets.reshape(-1)
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
    """f = head ∘ body ∘ sphere ∘ front; nothing need be put on a sphere, nor end in a linear head.

    Its parts are programs, so that the margins are those of what was bounded, and the model's
    Python code takes no part. `slopes_KK` bounds how far z_y − z_k moves when the input of `body`
    moves by 1. All in float64 and in exact arithmetic: a deployed float32 network rounds, by some
    10⁻⁶ of its outputs.
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
        # Both may have come since the bounds were found.
        require_no_hooks_of_all_modules()
        for part in (self.front, self.body):
            part.require_originals()
        inputs = inputs.to(self.slopes_KK.device, torch.float64)
        u = self.front(inputs)
        outputs = self.body(u if self.sphere is None else self.sphere(u))
        if self.head is not None:
            outputs = linear(outputs, self.head.weight, self.head.bias)
        outputs_BK = outputs.unsqueeze(1) if outputs.dim() == 1 else outputs
        decided_B = decisions(outputs_BK)
        allowed_B = allowed_moves(outputs_BK, decided_B, self.slopes_KK)
        if self.sphere is not None:
            norms_B = _norms(u)
            allowed_B = radius_before_sphere(allowed_B, norms_B, self.sphere_norm)
            allowed_B = allowed_B / self.front_lipschitz
        # What overflows on its way has outputs that say nothing about the record.
        finite_B = inputs.flatten(1).isfinite().all(dim=1) & outputs_BK.isfinite().all(dim=1)
        radii_B = torch.where(finite_B, allowed_B, 0.0)
        return Certificates(decided_B, radii_B, one_output=outputs_BK.shape[1] == 1)


def certifier_for(
    model: nn.Module, shape: Sequence[int], before: Scaler | Iterable[Scaler] = ()
) -> Certifier:
    """Take the network apart; `UnboundedLayer` if it has no Lipschitz constant."""
    try:
        require_no_hooks(model)  # while it is whole: a sequence has hooks of its own
        layers = [_copied(layer) for layer in [*as_layers(before), *_in_turn(model)]]
        return _certifier(layers, tuple(shape), _device_of(model))
    except UnboundedLayer as error:
        raise UnboundedLayer(f"no certificate: {error}") from error


def _certifier(layers: list[nn.Module], shape: tuple[int, ...], device: torch.device) -> Certifier:
    at = next((i for i, layer in enumerate(layers) if _on_sphere(layer)), None)
    sphere, norm, first = None, math.inf, 0
    if at is not None:
        found = layers[at]
        assert isinstance(found, BoundedInput)
        sphere, norm, first = compile_program(found), found.max_norm, at + 1
    front = compile_program(nn.Sequential(*layers[: at or 0]))
    entrance = _shape_through(front, shape, device)
    front_lipschitz = input_lipschitz(front, shape)
    body, head = _with_head(layers[first:], entrance, device)
    lipschitz = input_lipschitz(body, entrance, norm)
    if head is not None:
        slopes = slopes_of_head(head, lipschitz)
    else:
        outputs = _shape_through(body, entrance, device)
        _require_scores(outputs)
        slopes = slopes_of_outputs(math.prod(outputs), lipschitz).to(device)
    if not (math.isfinite(front_lipschitz) and slopes.isfinite().all()):
        raise UnboundedLayer(
            "a layer has no finite Lipschitz constant. A sphere is allowed for where it is one "
            "step of an nn.Sequential, once"
        )
    return Certifier(front, front_lipschitz, sphere, norm, body, head, slopes)


def _with_head(
    layers: list[nn.Module], entrance: tuple[int, ...], device: torch.device
) -> tuple[Program, nn.Linear | None]:
    """The network as a program, and the linear layer that ends it, if one does, apart from it."""
    body = list(layers)
    # Forwards these are the identity.
    while body and type(body[-1]) in (nn.Identity, ClipGradient):
        body.pop()
    head = body[-1] if body else None
    # By its forward, so that a layer with another one is not taken for a linear layer.
    linear_head = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
    if isinstance(head, nn.Linear) and linear_head and ours(type(head)) and not head._modules:
        inner = compile_program(nn.Sequential(*body[:-1]))
        if len(_shape_through(inner, entrance, device)) == 1:
            return inner, head
    return compile_program(nn.Sequential(*body)), None


def _copied(layer: nn.Module) -> nn.Module:
    """A copy of each: a layer that is used twice must count twice."""
    with located("", type(layer)):
        return certified_copy(layer)


def _device_of(model: nn.Module) -> torch.device:
    tensors = (p for _, m in members(model) for p in m._parameters.values() if p is not None)
    first = next(tensors, None)
    return torch.device("cpu") if first is None else first.device


def _require_scores(outputs: tuple[int, ...]) -> None:
    if len(outputs) > 1:
        raise ValueError(
            f"the network gives one record outputs of shape {outputs}; a certificate is for one "
            "row of class scores"
        )


def _norms(u: Tensor) -> Tensor:
    """‖u‖ of each record, and 0 where that is no finite number.

    Squares overflow long before norms do: the largest entry is divided out first.
    """
    largest_B = u.flatten(1).abs().amax(dim=1)
    safe_B = torch.where(largest_B > 0, largest_B, 1.0)
    norms_B = torch.linalg.vector_norm(u.flatten(1) / safe_B[:, None], dim=1) * safe_B
    return torch.where(norms_B.isfinite(), norms_B, 0.0)


def _shape_through(
    program: Program, shape: tuple[int, ...], device: torch.device
) -> tuple[int, ...]:
    with torch.no_grad():
        return tuple(program(torch.zeros(2, *shape, dtype=torch.float64, device=device)).shape[1:])


def _in_turn(module: nn.Module) -> list[nn.Module]:
    """The steps of nested sequences, in order."""
    if type(module) is nn.Sequential:
        with located("", nn.Sequential):
            require_no_hidden_code(module, nn.Sequential)
        return [step for child in module for step in _in_turn(child)]
    return [module]


def _on_sphere(layer: nn.Module) -> bool:
    return type(layer) is BoundedInput and layer.sphere
