"""Scaling constants computed from private records, released with noise that is charged.

Each function here sums a bounded vector per record, adds Gaussian noise to the sum, divides by the
*declared* number of records and post-processes the result. They differ in the vector alone:

- `release_statistics`: the first two moments of each feature, within a declared range.
- `release_centre`: the direction x/‖x‖, whose sensitivity is 1 whatever the number of features.
- `release_channel_scaler`: the size of each channel, then its moments in units of that size.

`GaussianRelease` is what they share: the claim on a ledger, the noise and the event to charge.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Required, TypedDict, Unpack

import torch
from torch import Tensor

from tacit.budget import Relation
from tacit.data.scaling import Constants, PublicScaler, align, as_constants, in_chunks, unit_rows
from tacit.randomness import Randomness

if TYPE_CHECKING:
    from tacit.accounting.events import Release
    from tacit.ledger import Ledger

_CHUNK = 1 << 22  # values converted to float64 at once
_BELOW_ONE = 1 - 1e-12  # makes up for rounding of a norm in float64


class ReleaseOptions(TypedDict, total=False):
    """The keyword arguments of every release.

    Args:
        noise_multiplier: z, the noise's standard deviation over the sensitivity.
        public_size: the declared number of records N, never their count.
        relation: the neighbouring relation; charge the event under the same one, before training:
            `LedgerRun(prelude=(event,))`.
        seed: makes the noise reproducible, and not private against whoever knows the seed. By
            default noise comes from the operating system.
        key: 32 secret random bytes from which the noise is derived instead, so that the same
            release of the same records can be repeated. Whoever knows the key can remove the noise:
            delete it before anybody else sees the value. Not with `seed`.
        ledger: claims the event there, before a record is read. Its current run must plan for it.
    """

    noise_multiplier: Required[float]
    public_size: Required[int]
    relation: Relation | str
    seed: int | None
    key: bytes | None
    ledger: Ledger | None


@dataclass
class GaussianRelease:
    """One Gaussian mechanism of noise multiplier z, for one sum or for `num_sums` of them.

    Each of k sums gets noise of multiplier √k·z. They compose, each chosen in view of those
    before, to one mechanism of multiplier z  [Dong et al. 2019, Cor. 3.3: Σ_k (1/√k·z)² = 1/z²].
    Noise is scaled to the sensitivity *under `relation`*: charge `event` under the same relation.

    Construction claims the Gaussian that the ledger's current run planned for, before any record
    is read. It raises if the run did not plan for it, has used it, or is for another relation: then
    the noise would not be what was charged. Without a ledger, whoever trains charges the event.
    """

    what: str
    num_sums: int = 1
    _: KW_ONLY
    noise_multiplier: float
    public_size: int
    relation: Relation | str = Relation.ADD_OR_REMOVE_ONE
    seed: int | None = None
    key: bytes | None = field(default=None, repr=False)
    ledger: Ledger | None = None

    def __post_init__(self) -> None:
        z, self.relation = self.noise_multiplier, Relation(self.relation)
        if not (math.isfinite(z) and z > 0):
            raise ValueError(f"noise_multiplier is {z!r}; give a finite number above 0")
        if self.public_size < 1:
            raise ValueError(
                f"public_size is {self.public_size}; declare a positive number of records"
            )
        if self.key is not None and (self.seed is not None or len(self.key) < 32):
            raise ValueError("give a key of 32 secret random bytes, or a seed, or neither")
        self.origin = (
            f"released with Gaussian noise of multiplier {z:g} ({self.relation}): "
            "its event must be charged to the budget"
        )
        if self.seed is not None:
            self.origin += (
                "; seeded: not private against whoever knows the seed, or another release of it"
            )
        # The address of the noise: never the same for two releases on one ledger.
        self.address = f"a noisy sum: {self.what}"
        if self.ledger is None:
            return
        planned = self.ledger.budget.relation
        if self.relation not in (planned, Relation.REPLACE_ONE):
            raise ValueError(
                f"the release is for {self.relation}, the ledger for {planned}; give relation= "
                "the ledger's"
            )
        from dp_accounting import GaussianDpEvent

        self.claim = self.ledger.claim_next(GaussianDpEvent(float(z)), self.what)
        run, beginning = self.ledger.attempt()
        self.address = f"a noisy sum: {self.claim}, run {run}, beginning {beginning}"

    def noisy(
        self, total: Tensor, bound: float, name: str = "", replaced: float | None = None
    ) -> tuple[Tensor, float]:
        """T + N(0, σ²·I) and σ = √k·z·Δ, where one record adds a vector of norm at most `bound`.

        Δ is `bound` for a record that is added or removed. For a replacement it is twice that, or
        `replaced`, where two such vectors are known to be no further apart.
        """
        sensitivity = Relation(self.relation).sensitivity(bound)
        if replaced is not None and self.relation is Relation.REPLACE_ONE:
            sensitivity = min(sensitivity, replaced)
        std = math.sqrt(self.num_sums) * self.noise_multiplier * sensitivity
        # A secret key, unlike a seed, is no less private than noise of the operating system.
        seed = self.seed if self.key is None else int.from_bytes(self.key, "big")
        return noisy_sum(total, std, seed, self.address + name), std

    def event(self, released: Tensor) -> Release:
        """What the value cost, under the relation that its noise was made for."""
        from tacit.accounting.events import Release, name_of

        named = name_of(self.what, released)
        if self.ledger is not None:
            self.ledger.name_claim(self.claim, named)
        return Release(self.noise_multiplier, named, Relation(self.relation))


def noisy_sum(total: Tensor, std: float, seed: int | None, address: str) -> Tensor:
    """T + N(0, std²·I), from the operating system unless a seed is given.

    With a seed, the noise depends on `address`, a digest of T and std. The same release of the
    same records comes out again; any other gets other noise, so that a combination of releases of
    one seed never cancels the noise.
    """
    flat = total.detach().to("cpu", torch.float64).contiguous()
    digest = hashlib.blake2b(flat.numpy().tobytes()).hexdigest()
    stream = Randomness(seed).stream("noisy sum", address, digest, float(std).hex())
    (noise,) = stream.normals([flat.numel()], flat.device)
    return (flat + std * noise.view(flat.shape)).to(total.dtype)


def clean_sum(inputs: Tensor, vectors: Callable[[Tensor], Tensor]) -> Tensor:
    """Σ_i t(x_i) in float64, some records at a time, *without* noise: private, never to be shown.

    `vectors` takes records and returns a bounded vector for each of them.
    """
    size = max(1, _CHUNK // max(1, math.prod(inputs.shape[1:])))
    total = vectors(inputs[:0].double()).sum(0).cpu()
    for start in range(0, len(inputs), size):
        total += vectors(inputs[start : start + size].double()).sum(0).cpu()
    return total


def release_statistics(
    inputs: Tensor,
    lower: Constants,
    upper: Constants,
    **options: Unpack[ReleaseOptions],
) -> tuple[PublicScaler, Release]:
    """A scaler with a differentially private mean and std per feature, and the event to charge.

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

    The options are those of `ReleaseOptions`; `noise_multiplier` and `public_size` are required.

        scaler, event = tacit.release_statistics(x, 0, 1, noise_multiplier=10, public_size=60_000)
        trainer = tacit.Trainer(..., ledger=tacit.LedgerRun(prelude=(event,)))
    """
    shape = inputs.shape[1:]
    like = torch.empty((0, *shape), dtype=torch.float64)
    low, high = (
        align(as_constants(value, name), like, name).expand(shape).flatten()
        for name, value in (("lower", lower), ("upper", upper))
    )
    if not (low < high).all():
        raise ValueError(f"lower is {lower}, upper is {upper}; each lower must be below its upper")
    middle, half = (low + high) / 2, (high - low) / 2
    release = GaussianRelease("statistics", **options)
    noisy, std = release.noisy(sum_of_moments(inputs, middle, half), math.sqrt(middle.numel()))
    first, second = noisy / release.public_size
    mean = first.clamp(-1, 1)
    floor = min(1.0, std / release.public_size)
    variance = (1 + second - mean**2).clamp(max=1.0).clamp(min=floor)
    centre, std_of_feature = middle + half * mean, half * variance.sqrt()
    scaler = PublicScaler(centre.reshape(shape), std_of_feature.reshape(shape), release.origin)
    return scaler, release.event(noisy)


def sum_of_moments(inputs: Tensor, middle: Tensor, half: Tensor) -> Tensor:
    """(Σ u, Σ (u² - 1)) as a (2, d) tensor, *without* noise."""

    def vectors(records: Tensor) -> Tensor:
        values = records.flatten(1).cpu()
        # Clipped before it is centred: a huge finite value must not become infinite on the way.
        unit = ((values.clamp(middle - half, middle + half) - middle) / half).clamp_(-1, 1)
        unit = torch.where(values.isfinite(), unit, 0.0)
        return torch.stack((unit, unit**2 - 1), dim=1)

    return clean_sum(inputs, vectors)


@dataclass(frozen=True)
class Centre:
    """x ↦ (u − c)/‖u − c‖ with u = x/‖x‖. Each record is mapped by itself, once c is released."""

    centre: Tensor
    origin: str

    def __call__(self, inputs: Tensor) -> Tensor:
        centre = self.centre.to(inputs).flatten()

        def centred(rows: Tensor) -> Tensor:
            return unit_rows(unit_rows(rows.flatten(1)) - centre).view_as(rows)

        return in_chunks(centred, inputs)

    def describe(self) -> str:
        return f"centred, {self.origin}"


def release_centre(inputs: Tensor, **options: Unpack[ReleaseOptions]) -> tuple[Centre, Release]:
    """c = (Σ_i x_i/‖x_i‖ + N(0, (z·Δ)²·I)) / N, and the event to charge.

    Scattering features of all images have much in common: on the unit sphere the mean of MNIST's
    has norm 0.7. What is common moves every class alike, and takes up norm that clipping then cuts
    from what tells classes apart. Tramèr & Boneh 2021 release a mean and a variance per channel;
    here it is the mean of whole records, whose sensitivity does not grow with their features.

    A record adds a vector of norm 1, or 0 where it is zero or not finite. So one that is added or
    removed moves the sum by at most Δ = 1, and one that is replaced by at most Δ = 2, reached by
    opposite vectors. It is one Gaussian mechanism of multiplier z. The options are those of
    `ReleaseOptions`.
    """
    release = GaussianRelease("centre", **options)
    noisy, _ = release.noisy(sum_of_directions(inputs), bound=1.0)
    centre = noisy.div_(release.public_size)
    return Centre(centre.reshape(inputs.shape[1:]).float(), release.origin), release.event(centre)


def sum_of_directions(inputs: Tensor) -> Tensor:
    """Σ_i x_i/‖x_i‖, *without* noise."""
    return clean_sum(inputs, lambda records: unit_rows(records.flatten(1)))


def release_channel_scaler(
    inputs: Tensor, *, size_bound: float, **options: Unpack[ReleaseOptions]
) -> tuple[PublicScaler, Release]:
    """A scaler that standardises each of C channels, and the event to charge.

    The channels of scattering features differ a hundredfold: local means of pixels are about 1,
    second-order coefficients about 0.01. Noise that the large ones need would drown the small ones
    [Tramèr & Boneh 2021 add one noise to all]. So sizes are released first, and moments then in
    their units, where every channel is about 1.

    Record x has channels x_c with P positions. With z' = √2·z, the two sums are
        sizes    a_c = (Σ_i [(1/P)·Σ_p |x_icp|]_R + N(0, (z'·kR)²)) / N,  at least z'·kR/N,
        moments  (Σ_i [((1/P)·Σ_p v_icp, (1/P)·Σ_p v_icp²)_c]_T + N(0, (z'·kT)²)) / N,  v = x/a,
    where [·]_R scales a vector of C (2C) numbers down to norm R = `size_bound` (T = 3·√C); a record
    that is not finite adds 0. So one that is added or removed moves them by at most R and T, k = 1,
    and one that is replaced by twice that, k = 2. Together they are one Gaussian mechanism of
    multiplier z (`GaussianRelease`).

    R and T are no assumptions: what is longer is cut, which biases the scaler and not the
    guarantee. Scattering features of images whose pixels have variance 1 have sizes of norm about
    √3 for three colours, 1 for one. The options are those of `ReleaseOptions`.
    """
    if not (math.isfinite(size_bound) and size_bound > 0):
        raise ValueError(f"size_bound is {size_bound!r}; give a finite number above 0")
    if inputs.ndim < 2:
        raise ValueError(f"inputs of shape {tuple(inputs.shape)}; give records with channels")
    release = GaussianRelease("channel statistics", num_sums=2, **options)
    size, bound = release.public_size, moments_bound(inputs.shape[1])
    sums_C, std = release.noisy(sum_of_sizes(inputs, size_bound), size_bound, ", sizes")
    sizes_C = (sums_C / size).clamp_(min=std / size)
    moments = sum_of_channel_moments(inputs, sizes_C, bound)
    moments, std = release.noisy(moments, bound, ", moments")
    first_C, second_C = moments / size
    std_C = (second_C - first_C**2).clamp_(min=std / size).sqrt()
    origin = f"of each channel {release.origin}"
    scaler = PublicScaler((sizes_C * first_C).float(), (sizes_C * std_C).float(), origin)
    return scaler, release.event(torch.cat([sums_C, moments.flatten()]))


def moments_bound(channels: int) -> float:
    """T: channels in units of their sizes have means about 1 and squares about 2."""
    return 3 * math.sqrt(channels)


def sum_of_sizes(inputs: Tensor, bound: float) -> Tensor:
    """Σ_i [(1/P)·Σ_p |x_icp|]_R, *without* noise."""
    return clean_sum(inputs, lambda records: _cut(_channels(records).abs().mean(dim=2), bound))


def sum_of_channel_moments(inputs: Tensor, sizes_C: Tensor, bound: float) -> Tensor:
    """Σ_i [(mean, mean square)_c of x_i/a]_T as (2, C), *without* noise."""

    def vectors(records: Tensor) -> Tensor:
        units_BCP = _channels(records) / sizes_C.to(records.device)[:, None]
        both = torch.cat([units_BCP.mean(dim=2), units_BCP.square().mean(dim=2)], dim=1)
        return _cut(both, bound)

    return clean_sum(inputs, vectors).view(2, -1)


def _channels(records: Tensor) -> Tensor:
    """Records as (B, C, P)."""
    return records.unsqueeze(2).flatten(2)


def _cut(rows: Tensor, bound: float) -> Tensor:
    """Each row scaled down to norm `bound`; one that is not finite, or whose norm is not, is 0."""
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    cut = rows * (_BELOW_ONE * bound / norms.clamp_min(1e-300)).clamp(max=1.0)
    return torch.where(norms.isfinite(), cut, 0.0)
