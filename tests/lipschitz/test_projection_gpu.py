"""The projection on a GPU, recorded as branches of one graph: the same weights as on a CPU."""

from __future__ import annotations

import copy

import pytest
import torch

import tacit
from tacit.lipschitz.projection import constraints_of, enforce

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("keep", [tacit.project, enforce], ids=["project", "enforce"])
def test_every_step_gives_the_weights_of_a_cpu(keep) -> None:
    torch.manual_seed(0)
    here = tacit.lipschitz_twin(tacit.models.cifar_cnn(width=16)).model.double()
    there = copy.deepcopy(here).cuda()
    for _ in range(5):
        with torch.no_grad():
            for p, q in zip(here.parameters(), there.parameters(), strict=True):
                moved = p + 0.1 * torch.randn_like(p)
                p.copy_(moved)
                q.copy_(moved)
        keep(here)
        keep(there)
        for p, q in zip(here.parameters(), there.parameters(), strict=True):
            assert torch.allclose(p, q.cpu(), rtol=5e-4, atol=1e-6)
            q.data.copy_(p)
    for constraint in constraints_of(there):
        stack = constraint.parameter.detach()[None]
        assert float(constraint.within.norm_upper(stack)) <= constraint.within.max_norm * 1.001
