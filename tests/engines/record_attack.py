"""An attack on labels: change one record, and see whose label the changed numbers carry."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.engines.shadow import Shadow

N = 3


@dataclass
class Input:
    """A tensor and its labels; integers are drawn below `high`."""

    value: Tensor
    labels: Tensor
    high: int = 0

    def to(self, device: str) -> Input:
        return Input(self.value.to(device), self.labels.to(device), self.high)

    def changed(self, record: int, seed: int) -> Tensor:
        mine = self.labels == record
        if self.value.dtype == torch.bool:
            return torch.where(mine, ~self.value, self.value)
        if not self.value.dtype.is_floating_point and not self.value.dtype.is_complex:
            other = (self.value + 1 + seed % max(1, self.high - 1)) % self.high
            return torch.where(mine, other, self.value)
        torch.manual_seed(seed)
        noise = torch.randn_like(self.value)
        return torch.where(mine, self.value.abs() + noise.abs(), self.value)


def by_record(value: Tensor, dim: int | None = 0, high: int = 0) -> Input:
    labels = torch.zeros(value.shape, dtype=torch.int32)
    if dim is not None:
        records = torch.arange(N).repeat_interleave(value.shape[dim] // N) + 1
        labels += records.view([-1 if k == dim % value.dim() else 1 for k in range(value.dim())])
    return Input(value, labels, high)


def draw(*shape: int) -> Tensor:
    return torch.rand(shape) + 0.1


def x(*shape: int, dim: int | None = 0) -> Input:
    return by_record(draw(*shape), dim)


def w(*shape: int) -> Input:
    return by_record(draw(*shape), None)


def ids(high: int, *shape: int, dim: int | None = 0) -> Input:
    return by_record(torch.randint(0, high, shape), dim, high)


def mask(*shape: int, dim: int | None = 0) -> Input:
    return by_record(torch.rand(shape) > 0.5, dim)


def tensors(result: object) -> list[Tensor]:
    found: list[Tensor] = []
    for leaf in torch.utils._pytree.tree_leaves(result):
        if isinstance(leaf, Tensor):
            found.append(leaf)
    return found


def run(function: Callable, values: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(7)
    with values[0].device:
        return tensors(function(*values))


def run_labelled(
    function: Callable, inputs: list[Input]
) -> tuple[list[Tensor], list[Tensor], Shadow]:
    shadow = Shadow(N)
    values = [item.value.clone() for item in inputs]
    for value, item in zip(values, inputs, strict=True):
        if bool((item.labels != 0).any()):
            shadow.labels(value).copy_(item.labels)
    with shadow:
        outputs = run(function, values)
    return outputs, [shadow.labels(output).clone() for output in outputs], shadow


def attack(
    function: Callable, inputs: list[Input], seeds: tuple[int, ...] = (1, 2)
) -> tuple[list[Tensor], list[Tensor], Shadow]:
    """Change one record at a time; whatever changes must have its label or -1."""
    _, labels, shadow = run_labelled(function, inputs)
    # PyTorch takes other paths under a mode for some operators, so compare runs without one.
    outputs = [t.detach().clone() for t in run(function, [item.value.clone() for item in inputs])]
    # linalg functions look at whether a matrix was singular; their results are explicit.
    reads = [event for event in shadow.value_reads if event.operator != "aten._linalg_check_errors"]
    implicit = bool(reads or shadow.selections)
    for record in range(1, N + 1):
        for seed in seeds:
            after = run(function, [item.changed(record, seed) for item in inputs])
            assert implicit or [t.shape for t in after] == [t.shape for t in outputs]
            for old, new, label in zip(outputs, after, labels, strict=False):
                if old.shape != new.shape:
                    continue
                # Sums on a GPU are not reproducible to the last bit.
                slack = 1e-5 if old.is_cuda else 0.0
                moved = ~torch.isclose(old, new.detach(), slack, slack, equal_nan=True)
                wrong = moved & (label != record) & (label != -1)
                assert implicit or not bool(wrong.any()), (
                    f"record {record} moved elements with labels {label[wrong].unique().tolist()}"
                )
    return outputs, labels, shadow


def attack_backward(function: Callable, inputs: list[Input]) -> list[Tensor]:
    """The same for gradients, with cotangents that belong to the record of their output."""
    outputs, labels, _ = run_labelled(function, inputs)
    floats = [k for k, output in enumerate(outputs) if output.dtype.is_floating_point]
    cotangents = [
        Input(torch.rand_like(outputs[k].detach()), labels[k].clamp(min=0)) for k in floats
    ]
    wanted = [k for k, item in enumerate(inputs) if item.value.dtype.is_floating_point]

    def gradients(*values: Tensor) -> list[Tensor]:
        given = [
            value.requires_grad_() if k in wanted else value
            for k, value in enumerate(values[: len(inputs)])
        ]
        results = run(function, given)
        pairs = [
            (results[k], cotangent)
            for k, cotangent in zip(floats, values[len(inputs) :], strict=True)
            if results[k].requires_grad and results[k].shape == cotangent.shape
        ]
        if not pairs:
            return []
        ends, cotangents = zip(*pairs, strict=True)
        starts = [given[k] for k in wanted]
        try:
            found = torch.autograd.grad(
                ends, starts, cotangents, allow_unused=True, materialize_grads=True
            )
        except RuntimeError as error:
            if re.match(r"derivative for .* is not implemented", str(error)):
                return []  # of this operator, in this version of PyTorch
            raise
        return list(found)

    _, labels, shadow = attack(gradients, [*inputs, *cotangents], seeds=(1,))
    assert not shadow.unknown, shadow.unknown
    return labels
