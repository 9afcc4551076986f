"""Gradient norms of single records: the right numbers, below their bounds, and marked."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import tacit
from tacit.diagnostics import gradient_histogram
from tacit.lipschitz import BoundedInput, ClipGradient, SpectralLinear
from tacit.losses import CrossEntropy, MeanSquaredError

torch.set_num_threads(1)


def lipschitz_network():
    torch.manual_seed(0)
    front = [BoundedInput(2.0, sphere=True), SpectralLinear(6, 8, bias=True), nn.ReLU()]
    return nn.Sequential(*front, SpectralLinear(8, 3)).double()


def some_records(count=40):
    torch.manual_seed(1)
    x = torch.randn(count, 6, dtype=torch.float64)
    return tacit.Records(x, torch.randint(3, (count,)))


@pytest.mark.parametrize("model", [lipschitz_network(), nn.Linear(6, 3).double()], ids=str)
def test_the_norms_are_those_of_torch_func(model):
    records, loss = some_records(), CrossEntropy(0.2)
    found = gradient_histogram(model, loss, records)

    def of_one(weights, x, y):
        return loss(functional_call(model, weights, (x.unsqueeze(0),)), y.unsqueeze(0))

    weights = {n: p.detach() for n, p in model.named_parameters()}
    rows = vmap(grad(of_one), (None, 0, 0))(weights, records.inputs, records.targets)
    assert set(found.norms) == set(rows)
    for name, row in rows.items():
        torch.testing.assert_close(found.norms[name], row.flatten(1).norm(dim=1))


def test_bounds_are_the_propagated_ones_and_hold():
    model, loss = lipschitz_network(), CrossEntropy(0.2)
    found = gradient_histogram(model, loss, some_records())
    assert found.bounds == tacit.lipschitz.propagate(model, loss, (6,)).by_parameter
    assert all((found.norms[n] <= b).all() for n, b in found.bounds.items())
    assert all(0.01 < share <= 1 for share in found.tightness().values())


def test_clipped_loss_gradients_are_seen_clipped():
    model = nn.Sequential(*lipschitz_network(), ClipGradient(0.01))
    found = gradient_histogram(model, CrossEntropy(0.2), some_records())
    assert all((found.norms[n] <= b).all() for n, b in found.bounds.items())
    assert found.norms["3.weight"].max() <= 0.02


def test_what_has_no_bound_has_none():
    for model, loss in [
        (nn.Linear(6, 3).double(), CrossEntropy()),
        (nn.Sequential(BoundedInput(1.0), SpectralLinear(6, 1)).double(), MeanSquaredError()),
    ]:
        found = gradient_histogram(model, loss, some_records())
        assert found.bounds == {}
        assert found.tightness() == {}
        assert "none" in found.text()


def test_it_says_that_it_is_not_private(tmp_path):
    found = gradient_histogram(lipschitz_network(), CrossEntropy(), some_records(), max_records=7)
    assert len(found.norms["1.weight"]) == 7
    assert found.text().startswith("gradient norms; not private: reads raw gradients")
    assert "ot private: reads raw gradients" in gradient_histogram.__doc__
    found.plot(tmp_path / "norms.png")
    assert (tmp_path / "norms.png").read_bytes().startswith(b"\x89PNG")


def test_a_dead_parameter_and_no_records(tmp_path):
    model = nn.Sequential(nn.Linear(6, 3), nn.ReLU()).double()
    with torch.no_grad():
        model[0].bias.fill_(-1e9)
    found = gradient_histogram(model, CrossEntropy(), some_records())
    assert found.norms["0.weight"].max() == 0
    found.plot(tmp_path / "dead.png")
    with pytest.raises(ValueError, match="give at least one"):
        gradient_histogram(model, CrossEntropy(), some_records(0))
