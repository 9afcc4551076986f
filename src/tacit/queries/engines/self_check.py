"""Does book-keeping give this model's gradients? Asked once a model, of two records.

Book-keeping believes that a layer's parameters act through its forward call, that rows of a
batch are records, and that records do not meet. A model can break each of these without an error:
by using `layer.weight` elsewhere, by putting the batch second, by subtracting the batch's mean. So
the first call compares the engine with plain autograd on single records, clipped so low that every
record's own norm decides its share.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from tacit.batch import Batch
from tacit.errors import UnsupportedModule
from tacit.queries.bounded_gradient import Loss

_LOW_NORM = 1e-6
Sums = Callable[[Batch, float], dict[str, Tensor]]
_checked: weakref.WeakKeyDictionary[nn.Module, set[tuple[str, ...]]] = weakref.WeakKeyDictionary()


def check_once(
    model: nn.Module, loss: Loss, parameters: dict[str, nn.Parameter], piece: Batch, sums: Sums
) -> None:
    """Raise UnsupportedModule unless `sums` agrees with autograd on two records of `piece`."""
    done = _checked.setdefault(model, set())
    key = tuple(parameters)
    if key in done or len(piece) < 2:
        return
    pair = piece.first(2)
    with _without_dropout(model):
        expected = {n: torch.zeros_like(p, requires_grad=False) for n, p in parameters.items()}
        for i in range(2):
            one = pair.only(torch.arange(2, device=pair.indices.device) == i)
            alone = _gradient(model, loss, parameters, one.inputs, one.targets)
            norm = torch.stack([g.square().sum() for g in alone.values()]).sum().sqrt()
            if not bool(norm.isfinite()) or float(norm) < 1e-4:
                return  # nothing to compare with; ask again at the next call
            for name, gradient in alone.items():
                expected[name] += gradient * (_LOW_NORM / norm)
        found = sums(pair, _LOW_NORM)
    difference = [found[n] - e if n in found else e for n, e in expected.items()]
    error = torch.stack([d.float().square().sum() for d in difference]).sum().sqrt()
    tolerance = 1e-6 if next(iter(parameters.values())).dtype == torch.float64 else 2e-2
    if float(error) > tolerance * _LOW_NORM:
        raise UnsupportedModule(
            f"book-keeping does not give the gradients of {type(model).__name__}: off by "
            f"{float(error) / _LOW_NORM:.1e} of the norm. Perhaps records meet inside the model, "
            "the batch is not the first dimension, a parameter is used outside its layer, or the "
            "forward pass is random; name engine=PerRecord(), which runs each record alone"
        )
    done.add(key)


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
    dropping = [m for m in model.modules() if isinstance(m, _DropoutNd) and m.training]
    for module in dropping:
        module.training = False
    try:
        yield
    finally:
        for module in dropping:
            module.training = True
