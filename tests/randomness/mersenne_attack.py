"""A stand-in for Tacit's randomness that draws as Tacit 0.1 did: from a Mersenne Twister."""

from __future__ import annotations

import torch


class MersenneStream:
    """Draws as Tacit 0.1 did: from PyTorch's generator, one after the other."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def normals(self, sizes, device, parameters=None, starts=None) -> list[torch.Tensor]:
        return list(self.flat_normals(sizes, device, parameters).split(list(sizes)))

    def flat_normals(self, sizes, device, parameters=None, starts=None) -> torch.Tensor:
        return torch.randn(sum(sizes), generator=self.generator, dtype=torch.float64)


class MersenneRandomness:
    """A stand-in for `tacit.randomness.Randomness` with a generator of that kind."""

    seed = None

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def stream(self, purpose: str, *step: str | int) -> MersenneStream:
        if purpose == "noise":
            return MersenneStream(self.generator)
        from tacit.randomness import Randomness

        return Randomness().stream(purpose, *step)  # type: ignore[return-value]
