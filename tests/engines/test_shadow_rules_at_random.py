"""Random calls of PyTorch's own operators: what a record can change carries its label or -1.

The operators and their arguments are those of PyTorch's test-suite. Labels are drawn at random,
element by element or along a dimension, so that nothing speaks for the shapes that rules expect.

PyTorch's list of operators changes settings of the process that imports it, so this file is also a
program, and the test runs it.
"""

from __future__ import annotations

import random
import subprocess
import sys
import unittest
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from tacit.engines.shadow import Shadow

RECORDS = 3
CALLS = 200
#: They hand out memory that nobody has written to, or tensors whose elements have no labels.
LEFT_OUT = ("empty", "new_empty", "sparse", "to_sparse")


def random_labels(tensor: Tensor, rng: random.Random) -> Tensor:
    """Everything public, one record per slice of a dimension, or a record per element."""
    kind = rng.random()
    if kind < 0.2:
        return torch.zeros(tensor.shape, dtype=torch.int32)
    if kind < 0.4 or not tensor.dim():
        return torch.randint(0, RECORDS + 1, tensor.shape, dtype=torch.int32)
    dim = rng.randrange(tensor.dim())
    owners = torch.arange(tensor.shape[dim], dtype=torch.int32) % RECORDS + 1
    shape = [-1 if k == dim else 1 for k in range(tensor.dim())]
    return owners.view(shape).expand(tensor.shape).clone()


def changed(tensor: Tensor, mine: Tensor) -> Tensor:
    """Other values where `mine`. Integers become others of the tensor, so they stay in range."""
    if tensor.dtype == torch.bool:
        return torch.where(mine, ~tensor, tensor)
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.where(mine, tensor * (1 + 0.3 * torch.rand(tensor.shape)), tensor)
    return torch.where(
        mine, tensor.flatten()[torch.randperm(tensor.numel())].view_as(tensor), tensor
    )


class RandomCall:
    """One operator on one of the samples of PyTorch's test-suite, with its gradients."""

    def __init__(self, operator: Any, sample: Any, rng: random.Random) -> None:
        arguments = (sample.input, sample.args, sample.kwargs)
        leaves, self.structure = tree_flatten(arguments)
        self.tensors = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
        self.differentiated = [
            k for k, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad
        ]
        inplace = operator.get_inplace() if rng.random() < 0.2 else None
        self.function: Callable = operator.op if inplace is None else inplace
        self.owners = {
            k: random_labels(x, rng) for k, x in enumerate(self.tensors) if isinstance(x, Tensor)
        }

    def run(self, tensors: list[Any], shadow: Shadow | None = None) -> list[Tensor]:
        torch.manual_seed(0)
        values = [x.clone() if isinstance(x, Tensor) else x for x in tensors]
        for k, labels in self.owners.items():
            if shadow is not None:
                shadow.labels(values[k]).copy_(labels)
        for k in self.differentiated:
            values[k].requires_grad_()
        with shadow or warnings.catch_warnings():
            inputs = [x * 1 if k in self.differentiated else x for k, x in enumerate(values)]
            first, args, kwargs = tree_unflatten(inputs, self.structure)
            outputs = tree_flatten(self.function(first, *args, **kwargs))[0]
            found = [x for x in outputs if isinstance(x, Tensor)]
            roots = [x for x in found if x.requires_grad]
            if roots:
                torch.manual_seed(1)
                cotangents = [torch.rand(x.shape, dtype=x.dtype) for x in roots]
                wanted = [values[k] for k in self.differentiated]
                gradients = torch.autograd.grad(roots, wanted, cotangents, allow_unused=True)
                found += [x for x in gradients if x is not None]
        return found

    def attack(self) -> str:
        """Change one record at a time; whatever changes must have its label or -1."""
        shadow = Shadow(RECORDS)
        labels = [shadow.labels(x).clone() for x in self.run(self.tensors, shadow)]
        if shadow.unknown:
            return "unknown"
        if shadow.value_reads or shadow.selections:
            return "implicit"
        before = self.run(self.tensors)
        for record in range(1, RECORDS + 1):
            torch.manual_seed(record)
            others = [
                changed(x, self.owners[k] == record) if k in self.owners else x
                for k, x in enumerate(self.tensors)
            ]
            try:
                after = self.run(others)
            except Exception:  # the changed values are no legal arguments
                continue
            for old, new, label in zip(before, after, labels, strict=True):
                if old.shape != new.shape:
                    return f"record {record} changed a shape"
                moved = ~torch.isclose(old, new, 0.0, 0.0, equal_nan=True)
                wrong = moved & (label != record) & (label != -1)
                if bool(wrong.any()):
                    return f"record {record} moved labels {label[wrong].unique().tolist()}"
        return "sound"


def random_calls(seed: int) -> Iterator[tuple[str, RandomCall]]:
    # It imports a package that only PyTorch's own tests use.
    sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore
    from torch.testing._internal.common_methods_invocations import op_db

    rng = random.Random(seed)
    while True:
        operator = rng.choice(op_db)
        if operator.name.startswith(LEFT_OUT) or torch.float32 not in operator.dtypes:
            continue
        torch.manual_seed(rng.randrange(1 << 30))
        gradients = torch.float32 in operator.backward_dtypes and operator.supports_autograd
        samples = operator.sample_inputs("cpu", torch.float32, requires_grad=gradients)
        sample = next((s for k, s in enumerate(samples) if k == rng.randrange(1, 9)), None)
        if sample is not None:
            yield f"{operator.name} {operator.variant_test_name}", RandomCall(operator, sample, rng)


def main() -> None:
    warnings.simplefilter("ignore")
    verdicts: dict[str, list[str]] = {}
    for name, call in islice(random_calls(seed=0), CALLS):
        try:
            call.run(call.tensors)
        except Exception:  # an in-place variant that this sample does not allow
            continue
        verdicts.setdefault(call.attack(), []).append(name)
    proved = len(verdicts.pop("sound"))
    verdicts.pop("implicit", None)
    unknown = verdicts.pop("unknown", [])
    assert not verdicts, verdicts
    assert proved > 10 * len(unknown), unknown


def test_random_calls_are_sound() -> None:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    main()
