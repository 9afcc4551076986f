"""A sum over private records, released once with Gaussian noise of a given multiplier."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tacit.budget import Relation

SEEDED = "; seeded: not private against whoever knows the seed, or sees another release of it"

if TYPE_CHECKING:
    from tacit.accounting.ledger import Ledger
    from tacit.accounting.release import Release


def check_release(noise_multiplier: float, public_size: int) -> None:
    """Raise ValueError for what no release can be made with; before any record is read."""
    if not (math.isfinite(noise_multiplier) and noise_multiplier > 0):
        raise ValueError(f"noise_multiplier is {noise_multiplier!r}; give a finite number above 0")
    if public_size < 1:
        raise ValueError(f"public_size is {public_size}; declare a positive number of records")


@dataclass(frozen=True)
class Claim:
    """One Gaussian for the value `what`: taken from a ledger, or to be paid by whoever trains."""

    noise_multiplier: float
    relation: Relation
    what: str
    ledger: Ledger | None = None
    name: str = ""

    @property
    def words(self) -> str:
        """What a seed's stream is named by: never the same for two releases on one ledger."""
        if self.ledger is None:
            return f"a noisy sum: {self.what}"
        run, beginning = self.ledger.life()
        return f"a noisy sum: {self.name}, run {run}, beginning {beginning}"

    def release(self, released: Tensor) -> Release:
        """What the value cost; to be charged under the relation that its noise was made for."""
        from tacit.accounting.release import Release, name_of

        named = name_of(self.what, released)
        if self.ledger is not None:
            self.ledger.name_claim(self.name, named)
        return Release(self.noise_multiplier, named, self.relation)


def claimed(noise_multiplier: float, relation: Relation, what: str, ledger: Ledger | None) -> Claim:
    """Take the Gaussian that the ledger's current run has paid for; before any record is read.

    Raises if the run did not plan for it, has used it, or is for another relation: the noise would
    be another share of the sensitivity than what was charged.
    """
    noise_multiplier = float(noise_multiplier)
    if ledger is None:
        return Claim(noise_multiplier, relation, what)
    if relation not in (ledger.budget.relation, Relation.REPLACE_ONE):
        raise ValueError(
            f"the release is for {relation}, the ledger for {ledger.budget.relation}; give "
            "relation= the ledger's"
        )
    import dp_accounting

    name = ledger.claim_next(dp_accounting.GaussianDpEvent(noise_multiplier), what)
    return Claim(noise_multiplier, relation, what, ledger, name)


def noisy_sum(total: Tensor, std: float, seed: int | None, words: str) -> Tensor:
    """T + N(0, std²·I), from the operating system unless a seed is given.

    With a seed, the noise is addressed by `words`, by a digest of T and by std. The same release of
    the same records comes out again; any other gets other noise, so that a combination of releases
    of one seed never cancels the noise.
    """
    from tacit.randomness import Randomness

    flat = total.detach().to("cpu", torch.float64).contiguous()
    digest = hashlib.blake2b(flat.numpy().tobytes()).hexdigest()
    stream = Randomness(seed).stream("noisy sum", words, digest, float(std).hex())
    (noise,) = stream.normals([flat.numel()], flat.device)
    return (flat + std * noise.view(flat.shape)).to(total.dtype)
