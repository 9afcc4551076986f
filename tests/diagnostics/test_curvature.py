"""The ends of a Hessian's spectrum: against quadratics and against the dense matrix."""

from __future__ import annotations

import pytest
import torch
from small_run import network, some_records
from torch import nn
from torch.func import functional_call, hessian

import tacit
from tacit.diagnostics import Spectrum, hessian_spectrum, lanczos
from tacit.losses import CrossEntropy, SumSquaredError, TailoredLoss, watched

torch.set_num_threads(1)


def symmetric(eigenvalues):
    generator = torch.Generator().manual_seed(3)
    n = len(eigenvalues)
    Q, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    return Q @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ Q.T


@pytest.mark.parametrize(
    "eigenvalues",
    [
        [5.0, 4.9, 1.0, 0.0, -0.5, -3.0],
        [1.0] * 6,
        [0.0] * 5,
        [-7.0, -1.0, -0.1],
        [2.0],
        [1e-9, 1e6, 3.0, -1e6],
    ],
)
def test_a_quadratic_s_spectrum_is_found(eigenvalues):
    H = symmetric(eigenvalues)
    found = lanczos(lambda v: H @ v, len(eigenvalues), tolerance=1e-12)
    size = max(abs(e) for e in eigenvalues)
    assert found.largest == pytest.approx(max(eigenvalues), abs=1e-9 * size + 1e-12)
    assert found.smallest == pytest.approx(min(eigenvalues), abs=1e-9 * size + 1e-12)
    assert found.norm == pytest.approx(size, abs=1e-9 * size + 1e-12)
    assert found.residual <= 1e-8 * max(size, 1e-6)


def test_the_residual_says_how_far_it_is_from_done():
    eigenvalues = [float(i) for i in range(200)]
    H = symmetric(eigenvalues)
    for iterations in (3, 10, 60):
        found = lanczos(lambda v: H @ v, 200, iterations=iterations, tolerance=0.0)
        nearest = min(abs(found.largest - e) for e in eigenvalues)
        assert nearest <= found.residual + 1e-9
        assert found.largest <= 199 + 1e-9
    assert found.largest == pytest.approx(199, abs=1e-3)
    quick = lanczos(lambda v: H @ v, 200, iterations=3)
    assert quick.largest < 198
    assert quick.residual > 0.1


def test_the_ends_are_not_confused():
    H = symmetric([3.0, 1.0, -5.0])
    found = lanczos(lambda v: H @ v, 3)
    assert (found.largest, found.smallest) == pytest.approx((3.0, -5.0))
    turned = lanczos(lambda v: -(H @ v), 3)
    assert (turned.largest, turned.smallest) == pytest.approx((5.0, -3.0))
    assert found.norm == pytest.approx(5.0)


def dense(model, loss, records):
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    shapes = [dict(model.named_parameters())[n].shape for n in names]
    flat = torch.cat([dict(model.named_parameters())[n].detach().flatten() for n in names])

    def value(vector):
        pieces = vector.split([s.numel() for s in shapes])
        weights = {n: v.view(s) for n, v, s in zip(names, pieces, shapes, strict=True)}
        return loss(functional_call(model, weights, (records.inputs,)), records.targets)

    with watched(model, loss):
        return hessian(value)(flat)


@pytest.mark.parametrize(
    "loss", [CrossEntropy(), SumSquaredError(), TailoredLoss(1.0, beta=0.3, gamma=2.0)], ids=str
)
@pytest.mark.parametrize("batch_size", [7, 100])
def test_a_network_s_spectrum_is_that_of_its_dense_hessian(loss, batch_size):
    model, records = network().double(), some_records(20)
    records = tacit.Records(records.inputs.double(), records.targets)
    model[0].bias.requires_grad_(False)
    values = torch.linalg.eigvalsh(dense(model, loss, records))
    found = hessian_spectrum(
        model, loss, records, iterations=60, tolerance=1e-9, batch_size=batch_size
    )
    assert found.largest == pytest.approx(float(values[-1]), rel=1e-7)
    assert found.smallest == pytest.approx(float(values[0]), rel=1e-5, abs=1e-8)


def test_a_linear_model_s_curvature_is_known():
    """½‖Wx − y‖² has the Hessian I ⊗ (1/n)·Σ x xᵀ."""
    torch.manual_seed(0)
    model, records = nn.Linear(4, 3, bias=False), some_records(30)
    found = hessian_spectrum(model, SumSquaredError(), records)
    values = torch.linalg.eigvalsh(records.inputs.T @ records.inputs / 30)
    assert found.largest == pytest.approx(float(values[-1]), rel=1e-4)


def test_a_loss_without_curvature_and_a_model_that_diverged():
    model = nn.Linear(4, 3)
    flat = hessian_spectrum(model, lambda h, y: h.sum(dim=1), some_records(4))
    assert flat == Spectrum(0.0, 0.0, 0.0)
    with torch.no_grad():
        model.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        hessian_spectrum(model, CrossEntropy(), some_records(4))
    with pytest.raises(ValueError, match="iterations is 0"):
        lanczos(lambda v: v, 3, iterations=0)
