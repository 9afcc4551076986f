"""Rules for operators that only a GPU runs, on the CPU: labels need shapes, and no kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

from tacit.engines.shadow import Shadow

aten = torch.ops.aten
RECORDS, HEADS, TIME, WIDTH = 3, 2, 8, 16


def heads(time: int = TIME) -> Tensor:
    return torch.randn(RECORDS, HEADS, time, WIDTH)


def per_head() -> Tensor:
    return torch.randn(RECORDS, HEADS, TIME)


STATE = torch.zeros((), dtype=torch.int64)
ATTENTION = [
    (aten._scaled_dot_product_flash_attention, lambda: (heads(), heads(), heads())),
    (
        aten._scaled_dot_product_efficient_attention,
        lambda: (heads(), heads(), heads(), None, True),
    ),
    (
        aten._scaled_dot_product_efficient_attention,
        lambda: (heads(), heads(), heads(), torch.randn(RECORDS, HEADS, TIME, TIME), True),
    ),
    (
        aten._scaled_dot_product_cudnn_attention,
        lambda: (heads(), heads(), heads(), None, True),
    ),
    (
        aten._scaled_dot_product_flash_attention_backward,
        lambda: (
            *(heads() for _ in range(5)),
            per_head(),
            *(None, None, TIME, TIME, 0.0, False, STATE, STATE),
        ),
    ),
    (
        aten._scaled_dot_product_efficient_attention_backward,
        lambda: (
            *(heads() for _ in range(4)),
            *(None, heads(), per_head(), STATE, STATE, 0.0, [True, True, True, False]),
        ),
    ),
    (
        aten._scaled_dot_product_cudnn_attention_backward,
        lambda: (
            *(heads() for _ in range(5)),
            per_head(),
            *(STATE, STATE, None, None, None, TIME, TIME, 0.0, False),
        ),
    ),
]


def outputs_of(func, args):
    """Tensors of the shapes that the operator gives on a GPU."""
    with FakeTensorMode():
        found = func(
            *tree_map_only(
                Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="cuda"), list(args)
            )
        )
        shapes = tree_map_only(Tensor, lambda t: (t.shape, t.dtype), found)
    return [
        torch.zeros(given[0], dtype=given[1]) if isinstance(given, tuple) else None
        for given in shapes
    ]


@pytest.mark.parametrize(("packet", "make"), ATTENTION, ids=[str(p) for p, _ in ATTENTION])
def test_attention_keeps_records_apart(packet, make):
    func, args = packet.default, make()
    outputs = outputs_of(func, args)
    shadow = Shadow(RECORDS)
    for value in args:
        if isinstance(value, Tensor) and value.dim():
            shadow.mark(value)
    shadow._label(func, args, {}, outputs, resized=False)
    assert not shadow.unknown
    assert not shadow.meetings
    own = torch.arange(1, RECORDS + 1)
    for output in outputs[:1]:
        labels = shadow.labels(output).reshape(RECORDS, -1)
        assert bool((labels == own[:, None]).all())
