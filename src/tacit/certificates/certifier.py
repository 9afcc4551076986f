"""A network taken apart for certificates, once for all records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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
from tacit.lipschitz.as_written import require_as_written
from tacit.lipschitz.layers.clip_gradient import ClipGradient
from tacit.lipschitz.layers.inputs import BoundedInput
from tacit.lipschitz.propagate import input_lipschitz


@dataclass(frozen=True)
class Certificates:
    """What is decided for each record, and within which L2 radius that cannot change."""

    decided_B: Tensor
    radii_B: Tensor
    one_output: bool

    def right(self, targets: Tensor) -> Tensor:
        """Of one output the classes are 0 and 1, and −1 is 0 as well."""
        classes_B = targets.reshape(-1)
        return self.decided_B == (classes_B.clamp_min(0) if self.one_output else classes_B)


@dataclass(frozen=True)
class Certifier:
    """f = rest ∘ sphere ∘ front, or rest alone where nothing is put on a sphere.

    `slopes_KK` bounds how far z_y − z_k moves when the input of `rest` moves by 1. All in float64
    and in exact arithmetic: a deployed float32 network rounds, by some 10⁻⁶ of its outputs.
    """

    front: nn.Module
    front_lipschitz: float
    sphere: BoundedInput | None
    rest: nn.Module
    slopes_KK: Tensor

    @torch.no_grad()
    def __call__(self, inputs: Tensor) -> Certificates:
        for part in (self.front, self.rest):
            require_as_written(part)  # hooks may have come since the bounds were found
        inputs = inputs.to(self.slopes_KK.device, torch.float64)
        u = self.front(inputs)
        outputs = self.rest(u if self.sphere is None else self.sphere(u))
        outputs_BK = outputs.unsqueeze(1) if outputs.dim() == 1 else outputs
        decided_B = decisions(outputs_BK)
        allowed_B = allowed_moves(outputs_BK, decided_B, self.slopes_KK)
        if self.sphere is not None:
            norms_B = _norms(u)
            allowed_B = radius_before_sphere(allowed_B, norms_B, self.sphere.max_norm)
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
        require_as_written(model)  # while it is whole: a sequence has hooks of its own
    except UnboundedLayer as error:
        raise UnboundedLayer(f"no certificate: {error}") from error
    # A copy of each: a layer that is used twice must count twice.
    layers = [certified_copy(layer) for layer in [*as_layers(before), *_in_turn(model)]]
    first = next(model.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    at = next((i for i, layer in enumerate(layers) if _on_sphere(layer)), None)
    sphere, front, rest = None, layers[:0], layers
    if at is not None:
        found = layers[at]
        assert isinstance(found, BoundedInput)
        sphere, front, rest = found, layers[:at], layers[at + 1 :]
    front_module = nn.Sequential(*front)
    entrance = _shape_through(front_module, tuple(shape), device)
    norm = math.inf if sphere is None else sphere.max_norm
    try:
        front_lipschitz = input_lipschitz(front_module, shape)
        slopes = _slopes(rest, entrance, norm, device)
    except UnboundedLayer as error:
        raise UnboundedLayer(
            f"no certificate, since the network's Lipschitz constant is not known: {error}"
        ) from error
    if not (math.isfinite(front_lipschitz) and slopes.isfinite().all()):
        raise UnboundedLayer(
            "no certificate: a layer has no finite Lipschitz constant. A sphere is allowed for "
            "where it is one step of an nn.Sequential, once"
        )
    return Certifier(front_module, front_lipschitz, sphere, nn.Sequential(*rest), slopes)


def _norms(u: Tensor) -> Tensor:
    """‖u‖ of each record, and 0 where that is no finite number.

    Squares overflow long before norms do: the largest entry is divided out first.
    """
    largest_B = u.flatten(1).abs().amax(dim=1)
    safe_B = torch.where(largest_B > 0, largest_B, 1.0)
    norms_B = torch.linalg.vector_norm(u.flatten(1) / safe_B[:, None], dim=1) * safe_B
    return torch.where(norms_B.isfinite(), norms_B, 0.0)


def _slopes(
    rest: list[nn.Module], shape: tuple[int, ...], norm: float, device: torch.device
) -> Tensor:
    body = list(rest)
    while body and type(body[-1]) in (nn.Identity, ClipGradient):
        body.pop()
    head = body[-1] if body else None
    # By its forward, so that a subclass with another one is not taken for a linear layer.
    if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward:
        inner = nn.Sequential(*body[:-1])
        if len(_shape_through(inner, shape, device)) == 1:
            return slopes_of_head(head, input_lipschitz(inner, shape, norm))
    whole = nn.Sequential(*body)
    outputs = _shape_through(whole, shape, device)
    if len(outputs) > 1:
        raise ValueError(
            f"the network gives one record outputs of shape {outputs}; a certificate is for one "
            "row of class scores"
        )
    return slopes_of_outputs(math.prod(outputs), input_lipschitz(whole, shape, norm)).to(device)


def _shape_through(
    module: nn.Module, shape: tuple[int, ...], device: torch.device
) -> tuple[int, ...]:
    with torch.no_grad():
        return tuple(module(torch.zeros(2, *shape, dtype=torch.float64, device=device)).shape[1:])


def _in_turn(module: nn.Module) -> list[nn.Module]:
    """The steps of nested sequences, in order."""
    if type(module) is nn.Sequential:
        return [step for child in module for step in _in_turn(child)]
    return [module]


def _on_sphere(layer: nn.Module) -> bool:
    return type(layer) is BoundedInput and layer.sphere
