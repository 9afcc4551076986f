"""Does book-keeping give this model's gradients? Asked once a model, of two records.

Book-keeping believes that a layer's parameters act through its forward call, that rows of a
batch are records, and that records do not meet. A model can break each of these without an error:
by using `layer.weight` elsewhere, by putting the batch second, by subtracting the batch's mean. So
the first call compares the engine with plain autograd on single records, clipped so low that every
record's own norm decides its share.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from tacit.batch import Batch
from tacit.errors import UnsupportedModule
from tacit.losses.pre_activations import needs_pre_activations
from tacit.queries.bounded_gradient import Loss

_LOW_NORM = 1e-6
_LEAST_NORM = 1e-4
Sums = Callable[[Batch, float], dict[str, Tensor]]
_checked: weakref.WeakKeyDictionary[nn.Module, set[tuple[str, ...]]] = weakref.WeakKeyDictionary()


def check_once(
    model: nn.Module, loss: Loss, parameters: dict[str, nn.Parameter], piece: Batch, sums: Sums
) -> None:
    """Raise UnsupportedModule unless `sums` agrees with autograd on two records of `piece`."""
    done = _checked.setdefault(model, set())
    # A loss that looks inside the model asks for more than the outputs' gradients.
    key = (*parameters, *(("pre-activations",) if needs_pre_activations(loss) else ()))
    if key in done or len(piece) < 2:
        return
    pair = piece.first(2)
    with _without_dropout(model):
        each = []
        for i in range(2):
            one = pair.only(torch.arange(2, device=pair.indices.device) == i)
            each.append(_gradient(model, loss, parameters, one.inputs, one.targets))
        norms = [_norm(gradient.values()) for gradient in each]
        if not all(math.isfinite(norm) for norm in norms):
            return  # nothing to compare with; ask again at the next call
        # Almost nothing has no direction to compare, and yet must stay almost nothing.
        sure = min(norms) >= _LEAST_NORM
        max_norm = _LOW_NORM if sure else 1.0
        found = sums(pair, max_norm)
    scales = [max_norm / max(norm, max_norm) for norm in norms]
    expected = {n: each[0][n] * scales[0] + each[1][n] * scales[1] for n in parameters}
    error = _norm(found[n] - e if n in found else e for n, e in expected.items()) / max_norm
    if error > _tolerance(piece, parameters):
        raise UnsupportedModule(
            f"book-keeping does not give the gradients of {type(model).__name__}: off by "
            f"{error:.1e} of the norm. Perhaps records meet inside the model, the batch is not "
            "the first dimension, a parameter is used outside its layer, or the forward pass is "
            "random; name engine=PerRecord(), which runs each record alone"
        )
    if sure:
        done.add(key)


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


def _tolerance(piece: Batch, parameters: dict[str, nn.Parameter]) -> float:
    """How far roundings may take two ways to the same gradient apart, of its norm."""
    device = piece.indices.device.type
    bits = min(torch.finfo(p.dtype).bits for p in parameters.values())
    tensor_float = device == "cuda" and torch.backends.cudnn.allow_tf32
    if bits < 32 or torch.is_autocast_enabled(device) or (tensor_float and bits == 32):
        return 1e-1
    return 2e-2 if bits == 32 else 1e-6


def _gradient(
    model: nn.Module, loss: Loss, parameters: dict[str, nn.Parameter], x: Tensor, y: Tensor
) -> dict[str, Tensor]:
    with torch.enable_grad():
        value = loss(model(x), y).sum()
        grads = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p, requires_grad=False) if g is None else g
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
