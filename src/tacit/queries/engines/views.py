"""K views of a record as positions of one record.

A batch with rows iK … iK + K − 1 for the views of record i goes through the model as B·K rows. A
layer's gradient of record i is the sum over all that it saw of the record: with T positions a
view, Σ over K·T positions. So a layer that takes positions is handed (B, K·T) of them and its rule
does the rest, ghost norms included; nothing is made row by row. What cannot be handed over so
(attention, recurrences, embedding bags, transposed convolutions, modules without a rule) has the
gradients of its B·K rows made and added up: exact, for the memory of these rows.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from tacit.batch import Batch
from tacit.queries.engines.convolution import convolution_gradients
from tacit.queries.engines.embedding import embedding_gradients
from tacit.queries.engines.fallback import func_gradients, say_once
from tacit.queries.engines.linear import linear_gradients
from tacit.queries.engines.normalisation import layer_norm_gradients, rms_norm_gradients
from tacit.queries.engines.rows import RecordGradients, Stacked
from tacit.queries.engines.rules import RULES, record_gradients
from tacit.queries.engines.tape import Call

# To these rules, every dimension between the records and the features is one of positions.
_TAKE_POSITIONS = (
    linear_gradients,
    layer_norm_gradients,
    rms_norm_gradients,
    embedding_gradients,
)


def gradients_of_records(
    call: Call, wanted: set[str], rows: int, views: int
) -> dict[str, RecordGradients]:
    """By the module's rule, or else by `torch.func`; of all views of a record together."""
    folded = _folded(call, rows, views) if views > 1 else None
    if folded is not None:
        together = record_gradients(folded, wanted, rows // views)
        if together is not None:
            return together
    found = record_gradients(call, wanted, rows)
    if found is None:
        say_once(call.module)
        found = func_gradients(call, wanted, rows)
    if views == 1:
        return found
    return {name: Stacked(_added_up(value.rows(), views)) for name, value in found.items()}


def mask_of_records(piece: Batch, views: int) -> Tensor | None:
    """Which records take part, of a batch with several rows a record."""
    return None if piece.mask is None else piece.mask[::views]


def _added_up(rows: Tensor, views: int) -> Tensor:
    return rows.unflatten(0, (-1, views)).sum(dim=1)


def _folded(call: Call, rows: int, views: int) -> Call | None:
    """The same call with one row a record, or None where that has no such form."""
    values = [*call.args, *call.kwargs.values()]
    rule = RULES.get(type(call.module))
    if call.products is not None or len(values) != 1:
        return None
    inputs, (cotangent,) = values[0], call.gradients
    assert cotangent is not None
    if rule in _TAKE_POSITIONS:
        for tensor in (inputs, cotangent):
            call.check_rows(tensor, rows)
        x, b = (t.unflatten(0, (-1, views)) for t in (inputs, cotangent))
        return replace(call, args=(x,), kwargs={}, gradients=[b])
    if rule is convolution_gradients and not isinstance(call.module, _ConvTransposeNd):
        call.check_rows(cotangent, rows)
        layer, x, b = _end_to_end(call.module, inputs, cotangent, views)
        return Call(layer, (x,), {}, [b])
    return None


def _end_to_end(
    layer: Any, inputs: Tensor, cotangent: Tensor, views: int
) -> tuple[_ConvNd, Tensor, Tensor]:
    """The views of a record, each with its padding, laid end to end along the first axis of space.

    Windows that begin in one view and end in the next are nobody's: b is zero there. A view's
    length is rounded up to a multiple of the stride, so that each begins where a window does.
    """
    dims, stride = len(layer.kernel_size), layer.stride[0]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = F.pad(inputs, layer._reversed_padding_repeated_twice, mode=mode)
    windows = -(-padded.shape[2] // stride)
    x = _joined(_lengthened(padded, stride * windows), views)
    b = _joined(_lengthened(cotangent, windows), views)
    reach = (layer.kernel_size[0] - 1) * layer.dilation[0] + 1
    b = b.narrow(2, 0, (x.shape[2] - reach) // stride + 1)
    bare = copy.copy(layer)
    bare.padding, bare.padding_mode = (0,) * dims, "zeros"
    bare._reversed_padding_repeated_twice = [0] * (2 * dims)
    return bare, x, b


def _lengthened(x: Tensor, length: int) -> Tensor:
    """Zeros behind the first axis of space, up to `length`."""
    return F.pad(x, (0, 0) * (x.dim() - 3) + (0, length - x.shape[2]))


def _joined(x: Tensor, views: int) -> Tensor:
    """(B·K, C, L, …) to (B, C, K·L, …)."""
    return x.unflatten(0, (-1, views)).movedim(1, 2).flatten(2, 3)
