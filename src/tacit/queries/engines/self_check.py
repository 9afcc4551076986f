"""Does book-keeping give this model's gradients? Asked once a model and mode, before the first sum.

Book-keeping believes that a layer's parameters act through its forward call, that rows of a
batch are records, and that records do not meet. A model can break each of these without an error:
by using `layer.weight` elsewhere, by putting the batch second, by subtracting the batch's mean. So
the first call compares the engine with plain autograd on two single records, parameter by
parameter: unclipped, and clipped so low that every record's own norm decides its share. Then it
asks whether records meet (`records_apart`). What only later records or weights bring about, such as
a gate that opens in the tenth epoch, is not seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from tacit.batch import Batch
from tacit.errors import UnsupportedModule
from tacit.losses.pre_activations import needs_pre_activations
from tacit.queries.asked_once import AskedOnce
from tacit.queries.bounded_gradient import Loss
from tacit.queries.engines.records_apart import records_meet, remembers_records
from tacit.queries.remembers import remembering
from tacit.tensor_float import all_digits

# Clipped to so little of the smaller norm, records of different norms count alike.
_LOW = 1e-2
# A gradient so much smaller than the other's has no direction that roundings have not touched.
_LEAST = 1e-4
_NOTHING = 1e-4
# The square of a longer one is not finite in float32, and the engine leaves such a record out.
_LARGEST = 1e18
Sums = Callable[[Batch, float], dict[str, Tensor]]
_checked = AskedOnce()


def check_once(
    model: nn.Module, loss: Loss, parameters: dict[str, nn.Parameter], piece: Batch, sums: Sums
) -> None:
    """Raise UnsupportedModule unless `sums` agrees with autograd on two records of `piece`, and
    the records of `piece` stay apart."""
    # A loss that looks inside the model asks for more than the outputs' gradients.
    key = _checked.key(model, (tuple(parameters), needs_pre_activations(loss)))
    if _checked.answered(model, key) or len(piece) < 2:
        return
    # TensorFloat-32 keeps three digits: in it a mixture could not be told from a rounding.
    with _without_dropout(model), all_digits():
        sure = _check_pair(model, loss, parameters, piece.first(2), sums)
        if remembers_records(model, loss, piece):
            raise UnsupportedModule(remembering(model))
        if records_meet(model, loss, piece):
            raise UnsupportedModule(
                f"records meet inside {type(model).__name__}: what one of them gives changes with "
                "the others, so clipping bounds nobody's share. Normalise each record alone, or "
                "name engine=PerRecord(), which runs each record alone (of BatchClip: SetBySet())"
            )
    if sure:
        _checked.remember(model, key)


def _check_pair(
    model: nn.Module, loss: Loss, parameters: dict[str, nn.Parameter], pair: Batch, sums: Sums
) -> bool:
    """Whether these two records could tell; UnsupportedModule if they tell of a difference."""
    each = []
    for i in range(2):
        one = pair.only(torch.arange(2, device=pair.indices.device) == i)
        each.append(_gradient(model, loss, parameters, one.inputs, one.targets))
    norms = [_norm(gradient.values()) for gradient in each]
    if not all(norm < _LARGEST for norm in norms):  # NaN neither
        return False  # nothing to compare with; ask again at the next call
    least, largest = min(norms), max(norms)
    if largest == 0:
        # Nothing has no direction to compare, and yet must stay almost nothing.
        _require(model, _norm(sums(pair, 1.0).values()) <= _NOTHING, math.inf)
        return False
    whole = {n: each[0][n] + each[1][n] for n in parameters}
    _compare(model, sums(pair, 2 * largest), whole, largest, _tolerance(pair, parameters))
    if least < _LEAST * largest:
        return False
    low = _LOW * least
    scaled = {n: (each[0][n] / norms[0] + each[1][n] / norms[1]) * low for n in parameters}
    _compare(model, sums(pair, low), scaled, low, _tolerance(pair, parameters))
    return True


def _compare(
    model: nn.Module,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    size: float,
    tolerance: float,
) -> None:
    """Each parameter's sum, to a share of its own norm and a tenth of that of the largest."""
    for name, wanted in expected.items():
        got = found[name].double() if name in found else torch.zeros_like(wanted)
        error, norm = _norm([got - wanted]), _norm([wanted])
        _require(model, error <= tolerance * (norm + 0.1 * size), error / max(norm, 1e-300))


def _require(model: nn.Module, agrees: bool, error: float) -> None:
    if not agrees:
        raise UnsupportedModule(
            f"book-keeping does not give the gradients of {type(model).__name__}: off by "
            f"{error:.1e} of the norm. Perhaps records meet inside the model, the batch is not "
            "the first dimension, a parameter is used outside its layer, a hook changes gradients, "
            "or the forward pass is random; name engine=PerRecord(), which runs each record alone"
        )


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


def _tolerance(piece: Batch, parameters: dict[str, nn.Parameter]) -> float:
    """How far roundings may take two ways to the same gradient apart, of its norm."""
    bits = min(torch.finfo(p.dtype).bits for p in parameters.values())
    if bits < 32 or torch.is_autocast_enabled(piece.indices.device.type):
        return 1e-1
    return 5e-3 if bits == 32 else 1e-6


def _gradient(
    model: nn.Module, loss: Loss, parameters: dict[str, nn.Parameter], x: Tensor, y: Tensor
) -> dict[str, Tensor]:
    """In float64: half precision has no room for a thousandth of a small gradient."""
    with torch.enable_grad():
        value = loss(model(x), y).sum()
        grads = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p, requires_grad=False, dtype=torch.float64)
        if g is None
        else g.double()
        for (name, p), g in zip(parameters.items(), grads, strict=True)
    }


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, _DropoutNd) and module.training:
                stack.callback(setattr, module, "training", True)
                module.training = False
            elif isinstance(module, nn.RNNBase | nn.MultiheadAttention):
                stack.callback(setattr, module, "dropout", module.dropout)
                module.dropout = 0.0
                if type(module) in (nn.RNN, nn.GRU, nn.LSTM):
                    # cuDNN has no backward pass in evaluation mode, which without dropout is the
                    # same as training.
                    stack.callback(setattr, module, "training", module.training)
                    module.training = True
        yield
