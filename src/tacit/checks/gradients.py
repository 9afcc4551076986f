"""Does an engine give the gradients that autograd gives?

Book-keeping assumes that a layer's parameters act through its forward call and that rows of a batch
are records. A model can break both without an error: by using `layer.weight` elsewhere, by a hook
on the way back. So the engine's sums over two records, and over one, are compared with autograd's
gradients of each record alone, parameter by parameter and with dropout as the identity: unclipped,
and clipped so low that every record's own norm decides its share. A model that draws in another
way is compared in one pass of the same shape, from the same generator states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from tacit.checks.probe import NoDropout, Probe
from tacit.errors import UnsupportedModule

# One loss per record of some inputs and targets.
Losses = Callable[[Tensor, Tensor], Tensor]
# Sums over some records, all parameters clipped together to one norm.
Sums = Callable[[Tensor, Tensor, float], Mapping[str, Tensor]]

# Clipped to this share of the smallest norm, records of different norms count alike.
_LOW = 1e-2
# A gradient this much smaller than another's has a direction that roundings have touched.
_LEAST = 1e-4
_NOTHING = 1e-4
# Clipped to this many times the largest norm, nothing is clipped, although norms are upper bounds.
_HIGH = 1e9
# The square of a longer one is not finite in float32, and the engine leaves such a record out.
_LARGEST = 1e18
_MOST_PAIRS = 4


def require_gradients(probe: Probe, losses: Losses, sums: Sums) -> bool:
    """Raise UnsupportedModule unless `sums` are autograd's. Returns whether records could tell."""
    for start in range(0, min(len(probe), 2 * _MOST_PAIRS) - 1, 2):
        # An engine may hand a tensor on in another memory layout, which dropout's mask follows.
        with NoDropout():
            if _compare_rows(probe, losses, sums, slice(start, start + 2)):
                _compare_rows(probe, losses, sums, slice(start, start + 1))
                return True
    return False


def _compare_rows(probe: Probe, losses: Losses, sums: Sums, rows: slice) -> bool:
    x, y, parameters = probe.inputs[rows], probe.targets[rows], probe.parameters

    def found(max_norm: float, some: slice = slice(None)) -> Mapping[str, Tensor]:
        probe.state.restore_draws()
        return sums(x[some], y[some], max_norm)

    probe.state.restore_draws()
    alone = [(x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
    each = [g for one in alone for g in _each_gradient(parameters, losses, *one)]
    draws = probe.state.drawn()
    if draws:  # as stochastic depth does: the same draws need the same shape
        probe.state.restore_draws()
        each = _each_gradient(parameters, losses, x, y)
    norms = [_norm(gradient.values()) for gradient in each]
    if not all(norm < _LARGEST for norm in norms):  # NaN neither
        return False
    least, largest = min(norms), max(norms)
    if largest == 0:
        # Zero has no direction to compare, and the sums must be almost zero too.
        _require(probe, _norm(found(1.0).values()) <= _NOTHING, math.inf)
        return False
    tolerance = _tolerance(x, parameters)
    whole = {n: sum((g[n] for g in each), torch.zeros(())) for n in parameters}
    _compare(probe, found(max(1.0, _HIGH * largest)), whole, largest, tolerance)
    if len(each) == 1 or least < _LEAST * largest:
        return False
    low = _LOW * least
    if draws:
        scales = [low / norm for norm in norms]
    else:
        shares = [found(low, slice(i, i + 1)) for i in range(len(each))]
        pairs = zip(shares, each, strict=True)
        scales = [_scale(probe, share, g, low, tolerance) for share, g in pairs]
    scaled = {
        n: sum((g[n] * scale for g, scale in zip(each, scales, strict=True)), torch.zeros(()))
        for n in parameters
    }
    _compare(probe, found(low), scaled, low, tolerance)
    return True


def _scale(
    probe: Probe,
    share: Mapping[str, Tensor],
    gradient: Mapping[str, Tensor],
    max_norm: float,
    tolerance: float,
) -> float:
    """What an engine has multiplied a record's gradient by: at most C/‖g‖, and the same everywhere.

    It may be less. Norms are bounds from above, and where a record's terms cancel they may be far
    above; what is added is then shorter, which is sound.
    """
    got = {n: share[n].double() if n in share else torch.zeros_like(g) for n, g in gradient.items()}
    norm = _norm(gradient.values())
    product = sum(float((got[n] * g).sum()) for n, g in gradient.items())
    scale = product / norm**2
    _require(probe, 0 <= scale * norm <= max_norm * (1 + tolerance), scale * norm / max_norm)
    rest = _norm(got[n] - scale * g for n, g in gradient.items())
    _require(probe, rest <= tolerance * max_norm, rest / max_norm)
    return scale


def _each_gradient(
    parameters: dict[str, nn.Parameter], losses: Losses, x: Tensor, y: Tensor
) -> list[dict[str, Tensor]]:
    """Each record's gradient, in float64: half precision loses a thousandth of a small one."""
    each = []
    with torch.enable_grad():
        losses_B = losses(x, y)
        for loss in losses_B:
            grads: tuple[Tensor | None, ...] = (None,) * len(parameters)
            if loss.requires_grad:
                grads = torch.autograd.grad(
                    loss, list(parameters.values()), retain_graph=True, allow_unused=True
                )
            each.append(
                {
                    name: torch.zeros_like(p, requires_grad=False, dtype=torch.float64)
                    if g is None
                    else g.to_dense().double()
                    for (name, p), g in zip(parameters.items(), grads, strict=True)
                }
            )
    return each


def _compare(
    probe: Probe,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    size: float,
    tolerance: float,
) -> None:
    """Each parameter's sum, to a share of its own norm and a tenth of that of the largest."""
    for name, wanted in expected.items():
        got = found[name].double() if name in found else torch.zeros_like(wanted)
        error, norm = _norm([got - wanted]), _norm([wanted])
        _require(probe, error <= tolerance * (norm + 0.1 * size), error / max(norm, 1e-300))


def _require(probe: Probe, agrees: bool, error: float) -> None:
    if not agrees:
        raise UnsupportedModule(
            f"book-keeping does not give the gradients of {type(probe.model).__name__}: off by "
            f"{error:.1e} of the norm. Perhaps the batch is not the first dimension, a parameter "
            "is used outside its layer, a hook changes gradients, or random numbers do not come "
            "from torch's generator; name engine=PerRecord(), which runs each record alone"
        )


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


def _tolerance(x: Tensor, parameters: dict[str, nn.Parameter]) -> float:
    """How far roundings may take two ways to the same gradient apart, of its norm."""
    bits = min(torch.finfo(p.dtype).bits for p in parameters.values())
    if bits < 32 or torch.is_autocast_enabled(x.device.type):
        return 1e-1
    return 5e-3 if bits == 32 else 1e-6
