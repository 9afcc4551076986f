"""Under the shadow, records of other people's models meet in weight gradients only.

No rule is missing for any operator, and nothing looks at a private value.
"""

from __future__ import annotations

import pytest
import torch
from models import CASES
from zoo_case import LENGTH

from tacit.engines.plain_programs import plain_program
from tacit.engines.shadow import Shadow
from tacit.engines.shadow_labels import layout
from tacit.pytrees import call_model, map_tensors

# Experts are given the tokens of whichever records chose them: rows are selected by their values.
SELECTING = {"transformers/mixtral", "torch/mixture_of_experts"}


@pytest.mark.parametrize("name", [name for name in CASES if name not in SELECTING])
def test_records_meet_in_weight_gradients_only(name):
    case = CASES[name]
    model, (inputs, targets) = case.model(), case.batch(LENGTH)
    shadow = Shadow(LENGTH)
    for tensors in (inputs, targets):
        map_tensors(shadow.mark, tensors)
    with shadow, plain_program():
        losses = case.loss(call_model(model, inputs), targets)
    assert not shadow.meetings + shadow.value_reads
    found = layout(shadow.labels(losses), LENGTH)
    assert (found.kind, found.dim, found.outer, found.inner) == ("blocks", 0, 1, 1)

    ones = torch.ones(LENGTH)
    shadow.mark(ones)
    shadow.phase = "backward"
    parameters = [p for p in model.parameters() if p.requires_grad]
    with shadow, plain_program():
        gradients = torch.autograd.grad(losses, parameters, ones, allow_unused=True)
    assert not shadow.unknown + shadow.selections + shadow.value_reads
    assert all(bool((shadow.labels(g) == -1).any()) for g in gradients if g is not None)
