"""Labels are sound for each operator: what a record can change carries its label or -1."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from operator_cases import CASES, Case
from record_attack import attack, attack_backward


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_labels_are_sound(case: Case) -> None:
    check(case)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_labels_are_sound_on_cuda(case: Case) -> None:
    if case.name == "flash cpu" or case.name.startswith("fused lstm"):
        pytest.skip("an operator of the CPU")
    check(replace(case, inputs=[item.to("cuda") for item in case.inputs]))


def check(case: Case) -> None:
    _, labels, shadow = attack(case.function, case.inputs)
    assert not shadow.unknown, shadow.unknown
    if case.apart:
        assert not shadow.meetings, shadow.meetings
        assert all(bool((label >= 0).all()) for label in labels)
    if case.backward:
        gradients = attack_backward(case.function, case.inputs)
        wanted = [item for item in case.inputs if item.value.dtype.is_floating_point]
        for item, label in zip(wanted, gradients[: len(wanted)], strict=False):
            if case.apart and bool((item.labels > 0).all()):
                assert bool((label >= 0).all()), "the gradient of a record's own input is its own"
