"""A query reads the model and leaves it as it was: only the ledger writes `.grad`."""

from __future__ import annotations

import torch
from contract_checks import everyone


def test_parameters_buffers_gradients_and_modes_stay(pair):
    model = pair.model
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    objects = {name: id(p) for name, p in model.named_parameters()}
    modes = [(m.training, name) for name, m in model.named_modules()]

    bounded = pair.query(model, pair.loss, everyone(pair.records()))

    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(torch.equal(grads[name], p.grad) for name, p in model.named_parameters())
    assert objects == {name: id(p) for name, p in model.named_parameters()}
    assert modes == [(m.training, name) for name, m in model.named_modules()]
    # The sums carry no graph that leads to the records, and hold each trainable parameter once.
    assert not any(s.requires_grad for block in bounded.blocks for s in block.sums)
    held = [id(p) for block in bounded.blocks for p in block.parameters]
    assert sorted(held) == sorted({id(p) for p in pair.model.parameters() if p.requires_grad})
