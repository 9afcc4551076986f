"""The ends of the Hessian's spectrum, by Lanczos.  [Losing Less, Lemma 1 and Fig. 2]

Lanczos makes an orthonormal basis Q of span(v, Hv, …, H^{k−1}v), in which H is tridiagonal:
T = QᵀHQ, with α_j = q_jᵀHq_j on its diagonal and β_j = ‖r_j‖ beside it,
r_j = Hq_j − α_j·q_j − β_{j−1}·q_{j−1}. The largest eigenvalue θ of T, with eigenvector s, comes
near H's largest from below, and ‖H(Qs) − θ·Qs‖ = β_k·|s_k|: H has an eigenvalue that near to θ.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from scipy.linalg import eigh_tridiagonal
from torch import Tensor, nn

from tacit.canvas import blank
from tacit.diagnostics.diagnostic import (
    Diagnostic,
    flattened,
    gradients_of,
    losses_on,
    save_runs,
)
from tacit.queries.bounded_gradient import Loss, trainable
from tacit.records import Records
from tacit.training.evaluation import pieces_of

if TYPE_CHECKING:
    from tacit.training.trainer import Trainer


@dataclass(frozen=True)
class Spectrum:
    """The largest and the smallest eigenvalue, as far as Lanczos came.

    Within `residual` of each there is an eigenvalue of the matrix.
    """

    largest: float
    smallest: float
    residual: float

    @property
    def norm(self) -> float:
        """max |λ|: the largest singular value, a local smoothness constant."""
        return max(abs(self.largest), abs(self.smallest))


@torch.enable_grad()
def hessian_spectrum(
    model: nn.Module,
    loss: Loss,
    records: Records,
    *,
    iterations: int = 40,
    tolerance: float = 1e-4,
    batch_size: int = 256,
) -> Spectrum:
    """The ends of the spectrum of ∇²_θ (1/n)·Σ_i ℓ_i over the trainable parameters.

    **Not private: reads raw gradients.** `loss` must give a mean over records, as Tacit's do, or
    one number per record. Ends when both residuals are below `tolerance` times the norm, or after
    `iterations` Hessian-vector products.
    """
    parameters = trainable(model)

    def product(vector: Tensor) -> Tensor:
        """∇(∇L·v), L the mean loss, batch by batch."""
        total = torch.zeros_like(vector)
        for piece in pieces_of(records, batch_size, model):
            mean = losses_on(model, loss, piece).mean()
            first = gradients_of(mean, parameters, create_graph=True)
            along = flattened(first, parameters) @ vector
            if along.requires_grad:
                second = gradients_of(along, parameters)
                total += flattened(second, parameters) * (len(piece) / len(records))
        return total

    size = sum(p.numel() for p in parameters.values())
    device = next(iter(parameters.values())).device
    return lanczos(product, size, device, iterations=iterations, tolerance=tolerance)


def lanczos(
    product: Callable[[Tensor], Tensor],
    size: int,
    device: torch.device | str = "cpu",
    *,
    iterations: int = 40,
    tolerance: float = 1e-4,
) -> Spectrum:
    """The ends of a symmetric matrix's spectrum, from v ↦ Hv alone.

    Every r is made orthogonal to the whole basis. The start is from a fixed seed: an eigenvector
    that is orthogonal to it is missed, which has probability 0.
    """
    if iterations < 1:
        raise ValueError(f"iterations is {iterations}; give at least 1")
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(size, generator=generator, dtype=torch.float64).to(device)
    basis = [q / q.norm()]
    alphas: list[float] = []
    betas: list[float] = []
    while True:
        r = product(basis[-1]).double()
        alphas.append(float(basis[-1] @ r))
        stacked = torch.stack(basis)
        for _ in range(2):  # once leaves rounding behind, by which copies of eigenvalues appear
            r = r - stacked.T @ (stacked @ r)
        beta = float(r.norm())
        if not math.isfinite(beta):
            raise ValueError("the Hessian is not finite here; the model has diverged")
        values, vectors = eigh_tridiagonal(alphas, betas)
        residual = beta * float(abs(vectors[-1, [0, -1]]).max())
        spectrum = Spectrum(float(values[-1]), float(values[0]), residual)
        norm = spectrum.norm
        # Below the second limit the space is exhausted: eigenvalues are exact, up to rounding.
        done = residual <= tolerance * norm or beta <= 1e-12 * max(norm, 1e-300)
        if done or len(alphas) >= min(iterations, size):
            return spectrum
        betas.append(beta)
        basis.append(r / beta)


def plot_curvature(runs: Mapping[str, Diagnostic[Spectrum]], path: str | os.PathLike[str]) -> None:
    """A line per run for the largest eigenvalue, and a dashed one for the smallest."""
    figure, axes = blank()
    panel = axes[0, 0]
    for label, run in runs.items():
        epochs = [p.epoch for p in run.points]
        name = f"{label}, " if label else ""
        ends = [(p.value.largest, p.value.smallest) for p in run.points]
        (line,) = panel.plot(epochs, [e[0] for e in ends], marker=".", label=f"{name}largest")
        lower = {"color": line.get_color(), "label": f"{name}smallest"}
        panel.plot(epochs, [e[1] for e in ends], "--", **lower)
    panel.axhline(0, color="black", linewidth=0.6)
    panel.set(xlabel="epoch", ylabel="eigenvalue of the Hessian")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
    save_runs(figure, path, runs)


@dataclass(eq=False, repr=False, kw_only=True)
class Curvature(Diagnostic[Spectrum]):
    """`hessian_spectrum` by epoch. **Not private: reads raw gradients.**"""

    reads = "raw gradients"
    draw = staticmethod(plot_curvature)
    iterations: int = 40

    def measure(self, trainer: Trainer, records: Records) -> Spectrum:
        return hessian_spectrum(trainer.model, trainer.loss, records, iterations=self.iterations)
