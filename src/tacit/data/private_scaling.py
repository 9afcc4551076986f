"""Scaling constants computed from private records, released with noise that is charged.

A sum over private records, released once with Gaussian noise of a given multiplier.

A mean and a variance per feature, released with noise that is charged.

Features on a sphere about their mean, which is released with noise that is charged.

Scattering features of all images have much in common: on the unit sphere the mean of MNIST's has a
norm of 0.7. What is common moves every class alike, and it takes up norm that clipping then cuts
from what tells classes apart. Tramèr & Boneh 2021 release a mean and a variance a channel; here it
is the mean of whole records, whose sensitivity is 1 whatever the number of features.

A mean and a std a channel, of channels of very different sizes, released with noise.

The channels of scattering features differ a hundredfold: local means of pixels are about 1,
second-order coefficients about 0.01. Noise that the large ones ask for would drown the small ones
[Tramèr & Boneh 2021 add one noise to all]. So sizes are released first, and moments then in their
units, where every channel is about 1.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tacit.budget import Relation
from tacit.data.scaling import Constants, PublicScaler, align, as_constants

if TYPE_CHECKING:
    from tacit.accounting.events import Release
    from tacit.ledger import Ledger

SEEDED = "; seeded: not private against whoever knows the seed, or sees another release of it"


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
        run, beginning = self.ledger.attempt()
        return f"a noisy sum: {self.name}, run {run}, beginning {beginning}"

    def release(self, released: Tensor) -> Release:
        """What the value cost; to be charged under the relation that its noise was made for."""
        from tacit.accounting.events import Release, name_of

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


_SCALING_CHUNK = 1 << 22  # values converted to float64 at once
_SCALING = "statistics"


def release_statistics(
    inputs: Tensor,
    lower: Constants,
    upper: Constants,
    *,
    noise_multiplier: float,
    public_size: int,
    relation: Relation | str = Relation.ADD_OR_REMOVE_ONE,
    seed: int | None = None,
    ledger: Ledger | None = None,
) -> tuple[PublicScaler, Release]:
    """A scaler with differentially private mean and std, and the event to charge for it.

    Each of the d features is clipped to its declared [lower, upper] and mapped to u in [-1, 1];
    a value that is not finite becomes u = 0. One record adds t(u) = (u_j, u_j² - 1)_j to a sum.

    Sensitivity, feature by feature. With s = u² in [0, 1],
        u² + (u² - 1)² = 1 - s + s² ≤ 1,                         so ||t(u)|| ≤ √d,
    with equality at u_j ∈ {-1, 0, 1}: add-or-remove-one has Δ = √d. (The square about 1 is what
    makes the second moment free: about 0 the bound would be √(2d).) For a replacement of u by
    v, with p = |u - v| and q = |u + v| ≤ 2 - p,
        (u - v)² + (u² - v²)² = p²(1 + q²) ≤ p²(1 + (2 - p)²),
    which grows with p (its derivative is 2p(2p² - 6p + 5) > 0), so it is at most 4, reached at
    u = 1, v = -1: replace-one has Δ = 2√d, and no smaller bound holds.

    Released: T = Σ t(u) + N(0, (z Δ)² I), one Gaussian mechanism of noise multiplier z. Then,
    by post-processing with the *declared* number of records N (`public_size`, never the count),
        mean = T_1 / N,   variance = max(1 + T_2 / N - mean², z Δ / N),
    clipped to what [-1, 1] allows and mapped back to the units of the inputs. The floor is the
    noise in the variance itself; below it the estimate says nothing.

    The noise multiplier of the event is that standard deviation over the sensitivity *under
    `relation`*; charge it under the same relation. With a `ledger`, whose current run planned for
    it, it is claimed there before a record is read. Noise comes from the operating system unless
    `seed` is given; then it is not private against whoever knows the seed.
    """
    relation = Relation(relation)
    check_release(noise_multiplier, public_size)
    middle, half = _range(inputs, lower, upper)
    claim = claimed(noise_multiplier, relation, _SCALING, ledger)
    total = sum_of_scaling_moments(inputs, middle, half)
    std = noise_multiplier * scaling_sensitivity(middle.numel(), relation)
    released = noisy_sum(total, std, seed, claim.words)
    first, second = released / public_size

    mean = first.clamp(-1, 1)
    variance = (1 + second - mean**2).clamp(max=1.0).clamp(min=min(1.0, std / public_size))
    shape = tuple(inputs.shape[1:])
    scaler = PublicScaler(
        (middle + half * mean).reshape(shape),
        (half * variance.sqrt()).reshape(shape),
        origin=(
            f"released with Gaussian noise of multiplier {noise_multiplier:g} ({relation}): "
            "its event must be charged to the budget" + (SEEDED if seed is not None else "")
        ),
    )
    return scaler, claim.release(released)


def scaling_sensitivity(num_features: int, relation: Relation) -> float:
    """The L2 sensitivity of `sum_of_moments`: √d, and 2√d under replace-one."""
    bound = math.sqrt(num_features)
    return bound if relation is Relation.ADD_OR_REMOVE_ONE else 2 * bound


def sum_of_scaling_moments(inputs: Tensor, middle: Tensor, half: Tensor) -> Tensor:
    """(Σ u, Σ (u² - 1)) as a (2, d) tensor, *without* noise: private, never to be shown."""
    total = torch.zeros(2, middle.numel(), dtype=torch.float64)
    rows = max(1, _SCALING_CHUNK // max(1, middle.numel()))
    for chunk in inputs.flatten(1).split(rows) if len(inputs) else ():
        # Clipped before it is centred: a huge finite value must not become infinite on the way.
        values = chunk.to("cpu", torch.float64)
        finite = values.isfinite()
        unit = ((values.clamp(middle - half, middle + half) - middle) / half).clamp_(-1, 1)
        unit = torch.where(finite, unit, 0.0)
        total += torch.stack((unit.sum(0), (unit**2 - 1).sum(0)))
    return total


def _range(inputs: Tensor, lower: Constants, upper: Constants) -> tuple[Tensor, Tensor]:
    """Middle and half width of each feature's declared range, as (d,) tensors."""
    shape = inputs.shape[1:]
    like = torch.empty((0, *shape), dtype=torch.float64)
    low = align(as_constants(lower, "lower"), like, "lower").expand(shape).flatten()
    high = align(as_constants(upper, "upper"), like, "upper").expand(shape).flatten()
    if not (low < high).all():
        raise ValueError(f"lower is {lower}, upper is {upper}; each lower must be below its upper")
    return (low + high) / 2, (high - low) / 2


_CENTRE_CHUNK = 4096  # records at once
_CENTRE = "centre"


@dataclass(frozen=True)
class Centre:
    """x ↦ (u − c)/‖u − c‖ with u = x/‖x‖: of each record alone, once c is released."""

    centre: Tensor
    origin: str

    def __call__(self, inputs: Tensor) -> Tensor:
        found = torch.empty_like(inputs)
        centre = self.centre.to(inputs).flatten()
        for start in range(0, len(inputs), _CENTRE_CHUNK):
            rows = slice(start, start + _CENTRE_CHUNK)
            moved = on_sphere(inputs[rows].flatten(1)) - centre
            found[rows] = on_sphere(moved).view_as(inputs[rows])
        return found

    def describe(self) -> str:
        return f"centred, {self.origin}"


def on_sphere(rows_BD: Tensor) -> Tensor:
    """Each row scaled to norm 1; a row that is zero or not finite becomes 0."""
    # By its largest entry first: the squares of huge or tiny numbers are not finite, or 0.
    largest_B1 = rows_BD.abs().amax(dim=1, keepdim=True)
    usable_B1 = largest_B1.isfinite() & (largest_B1 > 0)
    scaled = torch.where(usable_B1, rows_BD / largest_B1, 0.0)
    norms_B1 = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    return scaled / norms_B1.clamp_min(1.0)


def release_centre(
    inputs: Tensor,
    *,
    noise_multiplier: float,
    public_size: int,
    relation: Relation | str = Relation.ADD_OR_REMOVE_ONE,
    seed: int | None = None,
    ledger: Ledger | None = None,
) -> tuple[Centre, Release]:
    """c = (Σ_i x_i/‖x_i‖ + N(0, (z·Δ)²·I)) / N, and the event to charge for it.

    A record adds a vector of norm 1, or 0 where it is zero or not finite. So one that is added or
    removed moves the sum by at most Δ = 1, and one that is replaced by at most Δ = 2, reached by
    opposite vectors. N is the *declared* number of records, never their count. It is one Gaussian
    mechanism of multiplier z under `relation`; charge it under the same one, before training:
    `LedgerRun(prelude=(event,))`. With a `ledger`, whose current run planned for it, it is claimed
    there before a record is read. Noise comes from the operating system unless `seed`
    is given; then it is not private against whoever knows the seed.
    """
    relation = Relation(relation)
    check_release(noise_multiplier, public_size)
    claim = claimed(noise_multiplier, relation, _CENTRE, ledger)
    total = sum_on_sphere(inputs)
    std = noise_multiplier * centre_sensitivity(relation)
    centre = noisy_sum(total, std, seed, claim.words).div_(public_size)
    origin = f"released with Gaussian noise of multiplier {noise_multiplier:g} ({relation})"
    if seed is not None:
        origin += SEEDED
    return (
        Centre(centre.reshape(inputs.shape[1:]).float(), origin),
        claim.release(centre),
    )


def centre_sensitivity(relation: Relation) -> float:
    """The L2 sensitivity of `sum_on_sphere`."""
    return 1.0 if relation is Relation.ADD_OR_REMOVE_ONE else 2.0


def sum_on_sphere(inputs: Tensor) -> Tensor:
    """Σ_i x_i/‖x_i‖ in float64, *without* noise: private, never to be shown."""
    total = torch.zeros(math.prod(inputs.shape[1:]), dtype=torch.float64)
    for chunk in inputs.flatten(1).split(_CENTRE_CHUNK) if len(inputs) else ():
        total += on_sphere(chunk.double()).sum(dim=0).cpu()
    return total


_CHANNEL_CHUNK = 2048  # records at once
_CHANNELS = "channel statistics"
_SLACK = 1 - 1e-12  # for roundings of a norm in float64


def release_channel_scaler(
    inputs: Tensor,
    *,
    size_bound: float,
    noise_multiplier: float,
    public_size: int,
    relation: Relation | str = Relation.ADD_OR_REMOVE_ONE,
    seed: int | None = None,
    ledger: Ledger | None = None,
) -> tuple[PublicScaler, Release]:
    """A scaler that standardises each of C channels, and the event to charge for it.

    Record x has channels x_c with P positions. Two sums over records, the second once the first is
    out, z' = √2·z:
        sizes    a_c = (Σ_i [(1/P)·Σ_p |x_icp|]_R + N(0, (z'·kR)²)) / N,  at least z'·kR/N,
        moments  (Σ_i [((1/P)·Σ_p v_icp, (1/P)·Σ_p v_icp²)_c]_T + N(0, (z'·kT)²)) / N,  v = x/a,
    where [·]_R scales a vector of C (2C) numbers down to norm R = `size_bound` (T = 3·√C); a record
    that is not finite adds 0. So one that is added or removed moves them by at most R and T, k = 1,
    and one that is replaced by twice that, k = 2: two Gaussian mechanisms of multiplier √2·z each,
    which compose, the second chosen in view of the first, to one of multiplier z
    [Dong et al. 2019, Cor. 3.3: √(2·(1/√2z)²) = 1/z]. Charge it under `relation`, before training:
    `LedgerRun(prelude=(event,))`.

    R and T are no assumptions: what is longer is cut, which biases the scaler and not the
    guarantee. Scattering features of images whose pixels have variance 1 have sizes of norm about
    √3 for three colours, 1 for one. N is the *declared* number of records, never their count.
    With a `ledger`, whose current run planned for it, it is claimed there before a record is read.
    Noise comes from the operating system unless `seed` is given; then it is not private against
    whoever knows the seed.
    """
    relation = Relation(relation)
    check_release(noise_multiplier, public_size)
    if not (math.isfinite(size_bound) and size_bound > 0):
        raise ValueError(f"size_bound is {size_bound!r}; give a finite number above 0")
    if inputs.ndim < 2:
        raise ValueError(f"inputs of shape {tuple(inputs.shape)}; give records with channels")
    claim = claimed(noise_multiplier, relation, _CHANNELS, ledger)
    channels = inputs.shape[1]
    times = math.sqrt(2) * noise_multiplier * (1 if relation is Relation.ADD_OR_REMOVE_ONE else 2)
    std = times * size_bound
    found = noisy_sum(sum_of_sizes(inputs, size_bound), std, seed, f"{claim.words}, sizes")
    sizes_C = (found / public_size).clamp_(min=std / public_size)

    bound = moments_bound(channels)
    std = times * bound
    moments = sum_of_channel_moments(inputs, sizes_C, bound)
    total = noisy_sum(moments, std, seed, f"{claim.words}, moments")
    first_C, second_C = total / public_size
    variance_C = (second_C - first_C**2).clamp_(min=std / public_size)
    origin = f"of each channel released with Gaussian noise of multiplier {noise_multiplier:g}"
    origin += f" ({relation}): its event must be charged to the budget"
    if seed is not None:
        origin += SEEDED
    scaler = PublicScaler(
        (sizes_C * first_C).float(), (sizes_C * variance_C.sqrt()).float(), origin
    )
    released = torch.cat([found, total.flatten()])
    return scaler, claim.release(released)


def moments_bound(channels: int) -> float:
    """T: channels in units of their sizes have means about 1 and squares about 2."""
    return 3 * math.sqrt(channels)


def sum_of_sizes(inputs: Tensor, bound: float) -> Tensor:
    """Σ_i [(1/P)·Σ_p |x_icp|]_R in float64, *without* noise: private, never to be shown."""
    total = torch.zeros(inputs.shape[1], dtype=torch.float64)
    for chunk_BCP in _chunks(inputs):
        total += _cut(chunk_BCP.abs().mean(dim=2), bound).sum(dim=0).cpu()
    return total


def sum_of_channel_moments(inputs: Tensor, sizes_C: Tensor, bound: float) -> Tensor:
    """Σ_i [(mean, mean square)_c of x_i/a]_T as (2, C), *without* noise: never to be shown."""
    total = torch.zeros(2, inputs.shape[1], dtype=torch.float64)
    for chunk_BCP in _chunks(inputs):
        units = chunk_BCP / sizes_C.to(chunk_BCP.device)[:, None]
        both = torch.cat([units.mean(dim=2), units.square().mean(dim=2)], dim=1)
        total += _cut(both, bound).sum(dim=0).view(2, -1).cpu()
    return total


def _chunks(inputs: Tensor) -> Iterator[Tensor]:
    """Records as (B, C, P) in float64, some at a time."""
    shaped = inputs.unsqueeze(2) if inputs.ndim == 2 else inputs
    for start in range(0, len(inputs), _CHANNEL_CHUNK):
        yield shaped[start : start + _CHANNEL_CHUNK].double().flatten(2)


def _cut(rows: Tensor, bound: float) -> Tensor:
    """Each row scaled down to norm `bound`; one that is not finite, or whose norm is not, is 0."""
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    cut = rows * (_SLACK * bound / norms.clamp_min(1e-300)).clamp(max=1.0)
    return torch.where(norms.isfinite(), cut, 0.0)
