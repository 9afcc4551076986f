"""Rules for operators that only a GPU runs, on the CPU: labels need shapes, and no kernel.

In the place of a kernel stands a function that returns zeros of the right shapes.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

from tacit.engines.shadow import Shadow
from tacit.engines.shadow_labels import SEVERAL

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


def run_labelled(packet, args, output):
    """Run an operator on rows of records, with a kernel that gives `output`."""
    library = torch.library.Library("aten", "IMPL")
    func = getattr(packet, "default", packet)
    library.impl(func, lambda *args, **kwargs: output, "CPU")
    shadow = Shadow(RECORDS)
    for value in args:
        if isinstance(value, Tensor) and value.dim() and len(value) == RECORDS:
            shadow.mark(value)
    with shadow:
        func(*args)
    return shadow


def outputs_of(packet, args):
    """Tensors of the shapes that the operator gives on a GPU."""

    def on_gpu(t):
        return torch.empty(t.shape, dtype=t.dtype, device="cuda")

    def on_cpu(t):
        return torch.zeros(t.shape, dtype=t.dtype)

    with FakeTensorMode():
        found = packet.default(*tree_map_only(Tensor, on_gpu, list(args)))
    return tree_map_only(Tensor, on_cpu, found)


@pytest.mark.parametrize(("packet", "make"), ATTENTION, ids=[str(p) for p, _ in ATTENTION])
def test_attention_keeps_records_apart(packet, make):
    args = make()
    outputs = outputs_of(packet, args)
    shadow = run_labelled(packet, args, outputs)
    assert not shadow.unknown
    assert not shadow.meetings
    own = torch.arange(1, RECORDS + 1)
    labels = shadow.labels(outputs[0]).reshape(RECORDS, -1)
    assert bool((labels == own[:, None]).all())


@pytest.mark.filterwarnings("ignore:Warning only once")
@pytest.mark.parametrize("rest", [(None, None), (torch.zeros(0), torch.zeros(0))])
def test_a_kernel_may_return_gradients_that_nobody_asked_for(rest):
    """That of BatchNorm on a GPU does, for a weight that is not there."""
    x, mean = torch.randn(RECORDS, 4), torch.zeros(4)
    args = (x, x.clone(), None, mean, mean, mean, mean, True, 1e-5, [True, False, False])
    output = (torch.zeros(RECORDS, 4), *rest)
    shadow = run_labelled(aten.native_batch_norm_backward, args, output)
    assert not shadow.unknown
    assert bool((shadow.labels(output[0]) == SEVERAL).all())


def test_an_operand_that_an_operator_gives_back_keeps_its_labels():
    """As the flat weights of cuDNN's recurrent layers, here made from records."""
    x, flat = torch.randn(8, RECORDS, 4), torch.randn(RECORDS, 4)
    args = (x, [flat[:1]], 1, flat, torch.zeros(1, RECORDS, 4), None)
    options = (2, 4, 0, 1, False, 0.0, True, False, (), None)
    output = (torch.zeros(8, RECORDS, 4), torch.zeros(1, RECORDS, 4), *torch.zeros(2, 0), flat)
    shadow = run_labelled(aten._cudnn_rnn, (*args, *options), output)
    assert not shadow.unknown
    assert shadow.labels(flat)[:, 0].tolist() == [1, 2, 3]


LENGTHS = torch.full((RECORDS,), 5)
ROWS, JOINED = torch.ones(RECORDS, 2, dtype=torch.long), torch.ones(2 * RECORDS, dtype=torch.long)


@pytest.mark.parametrize("name", ["_use_cudnn_ctc_loss", "_use_miopen_ctc_loss"])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("overload", ["default", "Tensor"])
def test_which_kernel_of_ctc_runs_is_no_look_unless_it_reads_lengths(name, overload, joined):
    packet = getattr(aten, name, None)
    if packet is None:
        pytest.skip("this version of PyTorch does not have it")
    lengths = LENGTHS.clone() if overload == "Tensor" else [5] * RECORDS
    args = (torch.randn(5, RECORDS, 4), JOINED if joined else ROWS.clone(), lengths, lengths, 0)
    shadow = run_labelled(getattr(packet, overload), args, False)
    assert bool(shadow.unknown) == (joined and overload == "Tensor")
    assert not shadow.value_reads
