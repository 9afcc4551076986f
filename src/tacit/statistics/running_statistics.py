"""BatchNorm's running statistics, set after training: from public records, or released with noise.

`PublicStatistics` recomputes them on public records, free of charge. `ReleasedStatistics` takes
private ones, as a Gaussian mechanism that the ledger charges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tacit.budget import Relation
from tacit.checks.isolation import refuse_mixing
from tacit.checks.side_effects import watched_step
from tacit.engines.clipping import clip_scale, sum_dtype
from tacit.errors import UnsupportedModule
from tacit.pytrees import Tree, call_model, map_tensors, num_rows, take_rows
from tacit.randomness import Randomness
from tacit.records import Records, as_records
from tacit.statistics.tracking import (
    evaluating,
    set_origin,
    unfrozen_norms,
    without_running_statistics,
)
from tacit.torch_internals import BatchNorm, InstanceNorm, unbatched_rank

if TYPE_CHECKING:
    import dp_accounting as dpa

    from tacit.ledger import Ledger

_WHAT = "BatchNorm's running statistics"
_PROBES = 8


@dataclass(eq=False)
class PublicStatistics:
    """Running statistics that are recomputed on public records: free, and exact.

    With mini-sets S_1, …, S_k of `set_size` public records, in their order, each norm gets

        running_mean = (1/k) Σ_j mean(x; S_j),   running_var = (1/k) Σ_j var(x; S_j),

    x its inputs, var the unbiased variance: PyTorch's cumulative average (momentum=None)
    [Ioffe 2015, Alg. 2]. All norms normalise by the mini-set's own statistics meanwhile, as in
    training, so take the mini-sets as large as in training. All other modules are in evaluation
    mode: the statistics are for a network without dropout, which is the one that is evaluated.
    For InstanceNorm mean and var are of each record alone, averaged over the records. Norms that
    are frozen stay as they are. Records that do not fill a mini-set are left out.

    No private record is read, so there is nothing to charge. The user declares that `public` is
    public; the Trainer refuses the training records themselves.
    """

    public: Any  # Records, or what they are made from
    set_size: int

    def __post_init__(self) -> None:
        self.public = as_records(self.public)
        if self.set_size < 1:
            raise ValueError(f"sets of {self.set_size} records; give set_size at least 1")
        if len(self.public) < self.set_size:
            raise ValueError(
                f"{len(self.public)} public records do not fill one mini-set of {self.set_size}; "
                "give more records, or a smaller set_size"
            )

    @property
    def note(self) -> str:
        return f"BatchNorm's statistics are those of the public records {self.public.name!r}"

    @torch.no_grad()
    def apply(self, model: nn.Module) -> None:
        """Set the running statistics of all norms that are not frozen; weights stay as they are."""
        by_norm: dict[nn.Module, list[Tensor]] = {n: [] for n in unfrozen_norms(model).values()}

        def add(norm: nn.Module, x: Tensor) -> None:
            by_norm[norm].append(_mean_and_variance(norm, x.double()))

        with evaluating(model), without_running_statistics(model), _inputs_watched(by_norm, add):
            for norm in by_norm:
                norm.train()
            for start in range(0, len(self.public) - self.set_size + 1, self.set_size):
                rows = slice(start, start + self.set_size)
                _run(model, take_rows(self.public.inputs, rows))
        for norm, statistics in by_norm.items():
            if not statistics:  # a norm that the forward pass does not use has no inputs
                continue
            mean_C, variance_C = torch.stack(statistics).mean(0)
            if not (mean_C.isfinite() & variance_C.isfinite()).all():
                raise ValueError(
                    f"the inputs of a {type(norm).__name__} are not finite on the public records "
                    f"{self.public.name!r}; the network has diverged, or a record holds NaN: leave "
                    "such records out"
                )
            origin = f"from the public records {self.public.name!r}"
            _set_statistics(norm, mean_C, variance_C, len(statistics), origin)


@dataclass(eq=False)
class ReleasedStatistics:
    """Running statistics of private records, as one Gaussian mechanism of multiplier z.

    The L norms are handled in the order in which they run. When it is the turn of norm l the ones
    before it are fixed, in evaluation mode, so records stay apart: each adds a vector t_i of 2C
    numbers with ‖t_i‖ ≤ R_l = `max_norm`·√C, its moments at that norm (see `clipped_moments`).
    The sum over *all* records moves by Δ_l = R_l when one is added or removed and by 2R_l when
    one is replaced. Released is

        T_l = Σ_i t_i + N(0, (z √L Δ_l)² I),

    a Gaussian mechanism of multiplier z√L, chosen with the earlier T in view. L of them composed
    adaptively are one of multiplier (Σ_l 1/(z√L)²)^(-1/2) = z  [Dong 2022, Cor. 3.3]: `event`.
    There is no sampling, so nothing amplifies. With the declared number N of records, never the
    count, T_l = (T_m, T_q), and s = `scale`,

        mean = s·T_m/N,   variance = s²·max(1 + T_q/N − (T_m/N)², z √L Δ_l / N),

    by post-processing. The floor is the noise in the variance itself, a public constant.

    `scale` is the typical root mean square of the norms' inputs and must be chosen without
    looking at the records. `apply` takes a ledger, and computes nothing before that ledger
    has on disk that this release was planned, charged, and not made before.
    """

    records: Any  # Records, or what they are made from
    noise_multiplier: float
    max_norm: float = 1.0
    _: KW_ONLY
    scale: float = 1.0
    max_physical_batch: int = 256
    seed: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.records = as_records(self.records)
        for name in ("noise_multiplier", "max_norm", "scale"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value!r}; give a finite number above 0")
        if self.max_physical_batch < 1:
            raise ValueError(f"max_physical_batch is {self.max_physical_batch}; give at least 1")
        self.divisor = self.records.require_public_size("the mean of BatchNorm's inputs")

    @property
    def event(self) -> dpa.GaussianDpEvent:
        """What the release costs, to be planned and charged before it: all norms together."""
        import dp_accounting as dpa

        return dpa.GaussianDpEvent(self.noise_multiplier)

    @property
    def note(self) -> str:
        return (
            "BatchNorm's statistics were released with Gaussian noise of multiplier "
            f"{self.noise_multiplier:g} in all, which is charged; until the end of the run there "
            "were none, so nothing was evaluated before it"
        )

    @torch.no_grad()
    def apply(self, model: nn.Module, ledger: Ledger) -> None:
        """Claim the charge, and then compute, noise and set the statistics of all unfrozen norms.

        The ledger's current run must have `event` in its plan's prelude. A run releases its
        statistics once: a second time raises BudgetExceeded, also after a crash.
        """
        origin = f"released with noise of multiplier {self.noise_multiplier:g}"
        with self._norms_in_order(model) as norms:
            ledger.claim(self.event, _WHAT)
            stream = Randomness(self.seed).stream(_WHAT, ledger.identity, *ledger.attempt())
            for place, norm in enumerate(norms):
                with watched_step(model):
                    total = self.sum_of_moments(model, norm)
                (noise,) = stream.normals([len(total)], total.device, [place])
                std = self.noise_std(len(total) // 2, len(norms), ledger.budget.relation)
                mean_C, second_C = ((total + std * noise.to(total)) / self.divisor).chunk(2)
                variance_C = (1 + second_C - mean_C.square()).clamp(min=std / self.divisor)
                _set_statistics(norm, self.scale * mean_C, self.scale**2 * variance_C, 1, origin)

    @torch.no_grad()
    def check(self, model: nn.Module, ledger: Ledger | None = None) -> None:
        """Raise what `apply` would raise of the model and the ledger, and read no record."""
        with self._norms_in_order(model):
            pass
        if ledger is not None:
            ledger.require_unclaimed(self.event, _WHAT)

    def noise_std(self, channels: int, num_norms: int, relation: Relation) -> float:
        """z·√L·Δ_l, the standard deviation of the noise in each number of T_l."""
        sensitivity = relation.sensitivity(moments_bound(channels, self.max_norm))
        return self.noise_multiplier * math.sqrt(num_norms) * sensitivity

    def sum_of_moments(self, model: nn.Module, norm: nn.Module) -> Tensor:
        """Σ_i t_i *without* noise: private, never to be shown."""
        mean_C = norm.get_buffer("running_mean")
        total = mean_C.new_zeros(2 * mean_C.numel(), dtype=sum_dtype(mean_C.device))
        for start in range(0, len(self.records), self.max_physical_batch):
            rows = take_rows(self.records.inputs, slice(start, start + self.max_physical_batch))
            x = _input_at(norm, model, rows)
            _require_one_row_per_record(norm, x, rows)
            x_BCP = x.flatten(2) if x.dim() > 2 else x[:, :, None]
            total += clipped_moments(x_BCP, self.scale, self.max_norm).sum(0)
        return total

    @contextmanager
    def _norms_in_order(self, model: nn.Module) -> Iterator[list[nn.Module]]:
        """The unfrozen norms as a pass of zeros, which are nobody's data, meets them.

        Inside, the model is in evaluation mode. Raises UnsupportedModule for a norm whose moments
        have no bound.
        """
        unfrozen = unfrozen_norms(model)  # asked before evaluation mode freezes all
        zeros = map_tensors(lambda t: t.new_zeros((2, *t.shape[1:])), self.records.inputs)
        met: list[nn.Module] = []

        def meet(norm: nn.Module, x: Tensor) -> None:
            _require_one_row_per_record(norm, x, zeros)
            met.append(norm)

        with evaluating(model), without_running_statistics(model):
            refuse_mixing(model)
            with _inputs_watched(unfrozen.values(), meet):
                _run(model, zeros)
            for name, norm in unfrozen.items():
                _require_batch_norm_once(name, norm, met.count(norm))
            for norm in met:
                _require_records_apart(norm, model, self.records)
            yield met


def moments_bound(channels: int, max_norm: float) -> float:
    """R = κ·√C: the most that one record adds to the sum, κ = `max_norm`, C = `channels`."""
    return max_norm * math.sqrt(channels)


def clipped_moments(x_BCP: Tensor, scale: float, max_norm: float) -> Tensor:
    """t_i = clip_R(u_i), u_i = (m_i, q_i − 1) in 2C numbers, for each of B records.

    With x/s in units of the public `scale` s, m_i is the mean over P positions of x_i/s and q_i
    that of (x_i/s)², channel by channel. clip_R(u) = u·min(1, R/‖u‖), R = κ√C, so ‖t_i‖ ≤ R.

    Where s is near the inputs' root mean square, q is near 1 and m² ≤ q: both halves are of one
    order, and typical records are within κ = 1. The square about 1, and not about 0, makes 2R
    the least bound for a replacement when κ ≤ 1: all inputs 0 give −R·1/√C in the second half,
    and inputs of alternating sign and any large size give +R·1/√C.

    A record whose moments are not finite adds exactly nothing.
    """
    u_BCP = x_BCP.to(sum_dtype(x_BCP.device)) / scale
    moments_BK = torch.cat((u_BCP.mean(2), u_BCP.square().mean(2) - 1), dim=1)
    norms_B = torch.linalg.vector_norm(moments_BK, dim=1)
    finite_B = norms_B.isfinite()
    # NaN · 0 is NaN, so what is not finite becomes zero before it is scaled.
    moments_BK = torch.where(finite_B[:, None], moments_BK, 0.0)
    bound = moments_bound(x_BCP.shape[1], max_norm)
    scale_B = clip_scale(torch.where(finite_B, norms_B, 0.0), bound, [moments_BK.dtype])
    return moments_BK * scale_B[:, None]


def _require_batch_norm_once(name: str, norm: nn.Module, times: int) -> None:
    kind = type(norm).__name__
    if not isinstance(norm, BatchNorm):
        raise UnsupportedModule(
            f"module {name!r} ({kind}) has running statistics that are not of the batch; build it "
            "with track_running_stats=False"
        )
    if times > 1:
        raise UnsupportedModule(
            f"module {name!r} ({kind}) runs {times} times in a forward pass, so its statistics "
            "would have to be known before they are; use PublicStatistics, or a module of its own "
            "at each place"
        )


def _require_one_row_per_record(norm: nn.Module, x: Tensor, rows: Tree) -> None:
    if len(x) != num_rows(rows):
        raise UnsupportedModule(
            f"{type(norm).__name__} was given {len(x)} rows for {num_rows(rows)} records, so one "
            "record may have several and its share has no bound; use PublicStatistics, or "
            "make_trainable(model)"
        )


def _require_records_apart(norm: nn.Module, model: nn.Module, records: Records) -> None:
    """Every other one of some random rows, which are nobody's data, changes: the rest must not."""
    generator = torch.Generator().manual_seed(0x7AC17)

    def random(column: Tensor) -> Tensor:
        shape = (_PROBES, *column.shape[1:])
        if column.is_floating_point():
            return torch.randn(shape, generator=generator).to(column)
        return torch.randint(0, 2, shape, generator=generator).to(column)

    def changed(rows: Tensor) -> Tensor:
        rows = rows.clone()
        rows[::2] = 1e3 * rows[::2] if rows.is_floating_point() else 1 - rows[::2].long()
        return rows

    rows = map_tensors(random, records.inputs)
    before = _input_at(norm, model, rows)[1::2]
    after = _input_at(norm, model, map_tensors(changed, rows))[1::2]
    if not torch.allclose(before, after, rtol=1e-3, atol=1e-3 * float(before.abs().max())):
        raise UnsupportedModule(
            f"records meet before {type(norm).__name__}: its input for one record changes with the "
            "others, so that a record's share of the statistics has no bound; use "
            "PublicStatistics, or make_trainable(model)"
        )


def _mean_and_variance(norm: nn.Module, x: Tensor) -> Tensor:
    """(2, C): the mean and the unbiased variance that the norm itself would take from x."""
    if isinstance(norm, InstanceNorm):
        x_BCP = (x if x.dim() > unbatched_rank(norm) else x[None]).flatten(2)
        return torch.stack((x_BCP.mean(2).mean(0), x_BCP.var(2).mean(0)))
    x_CR = x.transpose(0, 1).flatten(1)
    return torch.stack((x_CR.mean(1), x_CR.var(1)))


def _set_statistics(
    norm: nn.Module, mean_C: Tensor, variance_C: Tensor, count: int, origin: str
) -> None:
    """Write the buffers of a norm in place, and where they come from."""
    norm.get_buffer("running_mean").copy_(mean_C)
    norm.get_buffer("running_var").copy_(variance_C)
    if getattr(norm, "num_batches_tracked", None) is not None:
        norm.get_buffer("num_batches_tracked").fill_(count)
    set_origin(norm, origin)


class _Reached(Exception):
    """Ends a forward pass at a norm; its argument is the norm's input."""


def _input_at(norm: nn.Module, model: nn.Module, rows: Tree) -> Tensor:
    def stop(_: nn.Module, x: Tensor) -> None:
        raise _Reached(x)

    try:
        with _inputs_watched([norm], stop):
            _run(model, rows)
    except _Reached as reached:
        x: Tensor = reached.args[0]
        return x
    raise UnsupportedModule(
        f"{type(norm).__name__} was met by a pass of zeros and not by these records; which "
        "modules run must not depend on the records: use PublicStatistics"
    )


@contextmanager
def _inputs_watched(
    norms: Iterable[nn.Module], watch: Callable[[nn.Module, Tensor], None]
) -> Iterator[None]:
    """Call `watch(norm, x)` before each of these norms runs on an input x."""

    def hook(norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        watch(norm, args[0] if args else kwargs["input"])

    hooks = [norm.register_forward_pre_hook(hook, with_kwargs=True) for norm in norms]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


def _run(model: nn.Module, rows: Tree) -> None:
    device = next(iter(model.parameters())).device
    call_model(model, map_tensors(lambda t: t.to(device), rows))
