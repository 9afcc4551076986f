"""The whole released step, mechanism and ledger included: what moves, what is divided, what noise.

`replay_release` releases one step of two neighbours with equal noise. `check_noise` releases many
steps and tests the noise that is found in them. Both read the noise off `.grad`: the sums are known
to the audit, so noise = `.grad` · divisor − sum.

The tests of `check_noise` are exact or conservative under the null hypothesis that noise is
N(0, s_h²), independent, with the deviations that give the planned multiplier. Together they raise a
false alarm with probability at most `FALSE_ALARM`, by the union bound:

  scale        Σ x² of n standard normals is χ²_n, for each block and each kind of batch.
  shape        sup |F_n − F| ≤ √(ln(2/α)/2n)               [Dvoretzky, Kiefer, Wolfowitz; Massart].
  correlation  ⟨x, y⟩/‖y‖ is N(0, 1) for independent x and y, for each pair of steps and each pair
               of parameters.
  sums         Σ_j (Σ_t x_tj)²/T is χ²_P of T steps and P parameters, and the other way round.
  repeats      four numbers in a row that occur again, to 18 binary digits after the point.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import ndtr
from scipy.stats import chi2, norm
from torch import Tensor, nn

from tacit.auditing.neighbours import extreme_records, others_in
from tacit.auditing.replay import in_memory, neighbour_of
from tacit.auditing.verdicts import TOLERANCE, Factory, Verdict, largest_of, ratio_of
from tacit.budget import Budget, Relation
from tacit.ledger import Ledger
from tacit.mechanism import Mechanism
from tacit.noise import Allocation, joint_noise_multiplier
from tacit.queries.bounded_gradient import Adapting, BoundedGradient, GradientQuery, Loss
from tacit.records import as_records
from tacit.sampling.sampler import Batch

FALSE_ALARM = 1e-9
_PLENTY = 1e7  # the ε of a ledger that is thrown away
_MOST_COLUMNS, _MOST_PAIRED = 1 << 15, 256


class Watching:
    """A query that keeps what it returned, for an audit that compares it with what is released."""

    def __init__(self, query: GradientQuery) -> None:
        self.query: GradientQuery = query.fresh() if isinstance(query, Adapting) else query
        self.unit = self.query.unit
        self.observed: list[float] = []

    def __call__(self, model: nn.Module, loss: Loss, batch: Batch) -> BoundedGradient:
        bounded = self.query(model, loss, batch)
        self.observed = []

        def noting(observe: Callable[[float], None]) -> Callable[[float], None]:
            def both(value: float) -> None:
                self.observed.append(value)
                observe(value)

            return both

        statistics = tuple(replace(s, observe=noting(s.observe)) for s in bounded.statistics)
        self.seen = replace(bounded, statistics=statistics)
        self.sums = [[_flat(s) for s in block.sums] for block in bounded.blocks]
        return self.seen


@dataclass(frozen=True)
class Released:
    """One released step. Of each block: the released sum, its noise, and its deviation."""

    totals: tuple[Tensor, ...]
    noise: tuple[Tensor, ...]
    stds: tuple[float, ...]
    names: tuple[str, ...]
    sensitivities: tuple[float, ...]
    joint: float  # the noise multiplier that the mechanism says it has
    divisor: float
    rounding: tuple[float, ...]  # what rounding to the parameters' type may add to a total's norm


def release_once(
    ledger: Ledger, mechanism: Mechanism, query: Watching, model: nn.Module, loss: Loss, batch: Any
) -> Released:
    """Privatise and release one batch, and read totals and noise off the gradients."""
    relation = mechanism.plan.relation
    pending = mechanism.privatise(model, loss, batch)
    bounded = query.seen
    ledger.release(pending, into=model)
    totals, noise, rounding = [], [], []
    for block, sums in zip(bounded.blocks, query.sums, strict=True):
        of_block = []
        factors = block.factors or (1.0,) * len(sums)
        masks = block.active or (None,) * len(sums)
        error = 0.0
        for parameter, total, factor, mask in zip(
            block.parameters, sums, factors, masks, strict=True
        ):
            grad = parameter.grad
            assert grad is not None
            released = _flat(grad) * (bounded.divisor * factor)
            keep = slice(None) if mask is None else mask.cpu().reshape(-1)
            of_block.append((released[keep], (released - total)[keep]))
            error += float(released.norm()) * 2 * torch.finfo(grad.dtype).eps
        totals.append(torch.cat([pair[0] for pair in of_block]))
        noise.append(torch.cat([pair[1] for pair in of_block]))
        rounding.append(error)
    for value, statistic in zip(query.observed, bounded.statistics, strict=True):
        totals.append(torch.tensor([value], dtype=torch.float64))
        noise.append(totals[-1] - float(statistic.value))
        rounding.append(0.0)
    of_noise = [s.std for s in bounded.statistics]
    stds = (*pending.stds, *of_noise)
    names = [", ".join(block.names[:2]) for block in bounded.blocks]
    names += [f"statistic {s.name}" for s in bounded.statistics]
    sensitivities = bounded.sensitivities(relation)
    sensitivities += bounded.statistic_sensitivities(relation)
    joint = joint_noise_multiplier(sensitivities, stds)
    return Released(
        tuple(totals), tuple(noise), stds, tuple(names), tuple(sensitivities), joint,
        bounded.divisor, tuple(rounding),
    )  # fmt: skip


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().double().reshape(-1).cpu().clone()


def replay_release(
    query: GradientQuery,
    model: nn.Module,
    loss: Loss,
    records: object,
    sampler: Factory,
    *,
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
    noise_multiplier: float = 1.0,
    allocation: Allocation | None = None,
    mechanism: Factory = Mechanism,
    changes: int = 4,
    seed: int = 0,
) -> Verdict:
    """Release one step of neighbouring datasets with equal noise, and compare what comes out.

    Two copies of one ledger, and equal seeds, give both sides the same batch and the same noise.
    Then the released gradients' difference, times the divisor, is at most the sensitivity; noise
    and divisor are the same on both sides, and so is everybody else in the batch.

    Args:
        sampler: makes a sampler, as in `sampler(records, steps=1, seed=0)`.
        mechanism: makes the mechanism; a class with the arguments of `Mechanism`.
        changes: how many records are tried, of those that a step drew.

        replay_release(query, model, loss, records, partial(PoissonSampler, sampling_rate=0.1))
    """
    data = in_memory(as_records(records))
    extremes = extreme_records(data, seed)
    ratios: dict[str, float] = {}
    faults: list[str] = []
    with Restored(model), tempfile.TemporaryDirectory() as folder:
        for change in range(changes):
            place = change * len(extremes) // changes
            pair = neighbour_of(data, sampler, extremes, place, relation, seed + change)
            if pair is None:
                continue
            original = Path(folder, f"{change}.ledger")
            Ledger(original, Budget(_PLENTY, 1e-5, relation)).close()
            sides = []
            for side, of_side in enumerate(pair.sides):
                path = Path(folder, f"{change}-{side}.ledger")
                shutil.copy(original, path)
                drawn = sampler(of_side, steps=1, seed=seed + change)
                watched = Watching(query)
                own = mechanism(
                    watched, drawn, noise_multiplier, relation=relation, allocation=allocation,
                    seed=seed,
                )  # fmt: skip
                (batch,) = drawn
                with Ledger(path) as ledger, Restored(model):
                    released = release_once(ledger, own, watched, model, loss, batch)
                sides.append((released, others_in(batch, pair.changed)))
            (here, others), (there, other_others) = sides
            if others != other_others:
                faults.append("one record changes which others are drawn; draw by record id")
            found = _differences(here, there)
            faults += found[1]
            ratios = largest_of([*ratios.items(), *found[0]])
    compared = f"released gradients of {changes} pairs · divisor, distance / sensitivity"
    return Verdict("released step", compared, ratios, tuple(dict.fromkeys(faults)))


def _differences(here: Released, there: Released) -> tuple[list[tuple[str, float]], list[str]]:
    ratios, faults = [], []
    if here.divisor != there.divisor:
        faults.append(
            f"the divisor is {here.divisor:g} on one dataset and {there.divisor:g} on its "
            "neighbour; divide by the declared expected batch size, never by the actual one"
        )
    rows = zip(
        here.names, here.totals, there.totals, here.noise, there.noise, here.sensitivities,
        here.rounding, there.rounding, strict=True,
    )  # fmt: skip
    for name, a, b, noise_a, noise_b, limit, *errors in rows:
        error = 4 * sum(errors)
        if float((noise_a - noise_b).norm()) > error + 1e-6 * float(noise_a.norm()):
            faults.append(
                f"the noise of block [{name}], or the number that it is divided by, changes when "
                "one record does, although all randomness is the same"
            )
        moved = max(0.0, float((a - b).norm()) - error)
        ratios.append((name, ratio_of(moved, limit)))
        if not ratios[-1][1] <= 1 + TOLERANCE:
            faults.append(
                f"one record moves the released block [{name}] by {moved:.6g}, "
                f"{ratios[-1][1]:.4g} times its declared sensitivity {limit:.6g}"
            )
    return ratios, faults


class Restored:
    """Puts a model's weights, buffers and gradients back at the end."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> None:
        self.state = {n: t.detach().clone() for n, t in self._tensors()}
        self.grads = {n: p.grad for n, p in self.model.named_parameters()}

    def __exit__(self, *_: object) -> None:
        with torch.no_grad():
            for name, tensor in self._tensors():
                if not torch.equal(tensor, self.state[name]):
                    tensor.copy_(self.state[name])
        for name, parameter in self.model.named_parameters():
            parameter.grad = self.grads[name]

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()


# ---- the noise -----------------------------------------------------------------------------------


def check_noise(
    query: GradientQuery,
    model: nn.Module,
    loss: Loss,
    records: object,
    sampler: Factory,
    *,
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
    noise_multiplier: float = 1.0,
    allocation: Allocation | None = None,
    mechanism: Factory = Mechanism,
    numbers: int = 12_000,
) -> Verdict:
    """Measure the noise of many released steps: its scale, its shape, and that none occurs twice.

    Steps are released as they are drawn, cut into physical batches, and empty. Two more runs on the
    same ledger have one and the same seed. All runs begin after `torch.manual_seed(0)`. False
    alarms: at most one in 10⁹ (`FALSE_ALARM`).

    Args:
        numbers: how many noisy numbers of each kind are drawn, at least. 12,000 tell a noise of
            0.95 of what was planned from the planned one nearly always.

        check_noise(query, model, loss, records, partial(PoissonSampler, sampling_rate=0.1))
    """
    data = in_memory(as_records(records))
    size = sum(p.numel() for p in model.parameters() if p.requires_grad)
    steps = min(600, max(6, math.ceil(numbers / max(size, 1))))
    kinds: dict[str, tuple[int, int | None, Callable[[Batch], Batch]]] = {
        "as drawn": (steps, None, lambda batch: batch),
        "in pieces": (steps, None, _in_pieces),
        "empty": (steps, None, _emptied),
        "seed 5": (2, 5, _emptied),
        "seed 5 again": (2, 5, _emptied),
    }
    found: dict[str, list[Released]] = {}
    ledger = Ledger(None, Budget(_PLENTY, 1e-5, relation))
    for kind, (count, seed, change) in kinds.items():
        drawn, watched = sampler(data, steps=count, seed=None), Watching(query)
        with torch.random.fork_rng(), Restored(model):
            torch.manual_seed(0)
            own = mechanism(
                watched, drawn, noise_multiplier, relation=relation, allocation=allocation,
                seed=seed,
            )  # fmt: skip
            ledger.begin(own.plan)
            found[kind] = [
                release_once(ledger, own, watched, model, loss, change(batch)) for batch in drawn
            ]
    ledger.end()
    return _Tests(found, noise_multiplier).verdict()


def _in_pieces(batch: Batch) -> Batch:
    return replace(batch, max_physical=max(1, len(batch) // 3))


def _emptied(batch: Batch) -> Batch:
    return batch.only(slice(0, 0))


class _Tests:
    """The tests of the noise, each at its share of the probability of a false alarm."""

    def __init__(self, found: dict[str, list[Released]], planned: float) -> None:
        self.found, self.planned = found, planned
        self.first = next(iter(found.values()))[0]
        self.ratios: dict[str, float] = {}
        self.faults: list[str] = []
        blocks = len(self.first.names)
        # Scale: each block, each kind; shape: each kind; two correlations, two sums, repeats.
        self.share = FALSE_ALARM / (len(found) * (blocks + 1) + 5)

    def verdict(self) -> Verdict:
        everything = [one for steps in self.found.values() for one in steps]
        least = min(one.joint for one in everything)
        if not least >= self.planned * (1 - 1e-9):
            self._fail(
                "deviations",
                ratio_of(self.planned, least),
                f"the deviations of the noise give a joint noise multiplier of {least:.6g}, and "
                f"{self.planned:.6g} is accounted for",
            )
        divisors = {one.divisor for one in everything}
        if len(divisors) > 1:
            self.faults.append(
                f"steps are divided by {len(divisors)} different numbers, such as "
                f"{min(divisors):g} and {max(divisors):g}; divide by the declared batch size"
            )
        for kind, steps in self.found.items():
            self._scale(kind, steps)
        rows = [_standard(one) for steps in self.found.values() for one in steps]
        width = min(len(row) for row in rows)
        matrix = np.stack([row[:width] for row in rows])
        for kind, steps in self.found.items():
            self._shape(kind, np.concatenate([_standard(one) for one in steps]))
        self._correlation("two steps", matrix)
        some = np.linspace(0, width - 1, min(width, _MOST_PAIRED)).astype(int)
        if len(matrix) > 8:
            self._correlation("two parameters", matrix[:, some].T)
        self._sums("over steps", matrix)
        self._sums("over parameters", matrix.T)
        self._repeats(matrix)
        empty = self.found["empty"]
        multiplier = _measured_multiplier(empty)
        compared = (
            f"noise of {len(everything)} releases; multiplier {multiplier:.4g} measured, "
            f"{self.planned:.4g} planned"
        )
        return Verdict("noise", compared, self.ratios, tuple(self.faults))

    def _fail(self, name: str, ratio: float, sentence: str) -> None:
        self.ratios[name] = max(ratio, self.ratios.get(name, 0.0))
        self.faults.append(sentence)

    def _pass(self, name: str, ratio: float) -> None:
        self.ratios[name] = max(ratio, self.ratios.get(name, 0.0))

    def _scale(self, kind: str, steps: Sequence[Released]) -> None:
        for b, name in enumerate(self.first.names):
            std = np.array([one.stds[b] for one in steps])
            if not std.all():  # a block that no record can move needs no noise
                continue
            squares = [float((one.noise[b] / s).square().sum()) for one, s in zip(steps, std)]  # noqa: B905
            total, count = math.fsum(squares), sum(len(one.noise[b]) for one in steps)
            low, high = chi2.ppf(self.share / 2, count), chi2.isf(self.share / 2, count)
            tail = min(chi2.cdf(total, count), chi2.sf(total, count))
            ratio = float(norm.isf(tail) / norm.isf(self.share / 2))
            if low <= total <= high:
                self._pass("scale", ratio)
                continue
            measured = math.sqrt(total / count)
            self._fail(
                "scale",
                ratio,
                f"steps {kind}: the noise of block [{name}] has {measured:.4g} times the deviation "
                f"that it should have ({count} numbers; {math.sqrt(low / count):.4g} to "
                f"{math.sqrt(high / count):.4g} is chance)",
            )

    def _shape(self, kind: str, values: np.ndarray) -> None:
        ordered, n = ndtr(np.sort(values)), len(values)
        steps = np.arange(n + 1) / n
        distance = max(np.abs(ordered - steps[1:]).max(), np.abs(ordered - steps[:-1]).max())
        limit = math.sqrt(math.log(2 / self.share) / (2 * n))
        ratio = float(distance) / limit
        if ratio <= 1:
            self._pass("shape", ratio)
        else:
            self._fail(
                "shape", ratio, f"steps {kind}: the noise is not Gaussian (distance {distance:.3g})"
            )

    def _correlation(self, what: str, rows: np.ndarray) -> None:
        inner = rows @ rows.T
        np.fill_diagonal(inner, 0.0)
        lengths = np.maximum(np.linalg.norm(rows, axis=1), 1e-300)
        pairs = len(rows) * (len(rows) - 1) / 2
        limit = float(norm.isf(self.share / 2 / max(pairs, 1)))
        highest = float(np.abs(np.triu(inner / lengths[None])).max())
        if highest <= limit:
            self._pass(f"correlation of {what}", highest / limit)
        else:
            self._fail(
                f"correlation of {what}",
                highest / limit,
                f"the noise of {what} is correlated or the same: draw it anew for each, and never "
                "twice from one seed",
            )

    def _sums(self, what: str, rows: np.ndarray) -> None:
        """Noise that adds up, or cancels, faster than independent noise does."""
        total = float(np.square(rows.sum(axis=0)).sum() / len(rows))
        count = rows.shape[1]
        tail = min(chi2.cdf(total, count), chi2.sf(total, count))
        ratio = float(norm.isf(tail) / norm.isf(self.share / 2))
        if ratio <= 1:
            self._pass(f"sums {what}", ratio)
        else:
            how = "adds up" if total > count else "cancels"
            self._fail(
                f"sums {what}",
                ratio,
                f"the noise {how} {what}: its sums have {math.sqrt(total / count):.4g} times the "
                "deviation of sums of independent noise",
            )

    def _repeats(self, matrix: np.ndarray) -> None:
        rounded = np.round(matrix * 2.0**18).astype(np.int64)
        if rounded.shape[1] < 4:
            return
        windows = np.lib.stride_tricks.sliding_window_view(rounded, 4, axis=1).reshape(-1, 4)
        windows = windows[np.abs(windows).max(axis=1) > 0]
        again = len(windows) - len(np.unique(np.ascontiguousarray(windows).view("V32")))
        if again:
            self._fail(
                "repeats", math.inf, f"{again} runs of four noisy numbers occur a second time"
            )
        else:
            self._pass("repeats", 0.0)


def _standard(one: Released) -> np.ndarray:
    """The noise in units of its deviation, all blocks in a row; at most `_MOST_COLUMNS` numbers."""
    pieces = [n / s if s > 0 else n for n, s in zip(one.noise, one.stds, strict=True)]
    return torch.cat(pieces).numpy()[:_MOST_COLUMNS]


def _measured_multiplier(steps: Sequence[Released]) -> float:
    """The planned deviations of the first step, each times what was measured of it in all steps."""
    first, stds = steps[0], []
    for b, std in enumerate(first.stds):
        parts = [one.noise[b] / one.stds[b] for one in steps if one.stds[b] > 0]
        stds.append(std * float(torch.cat(parts).square().mean().sqrt()) if parts else std)
    return joint_noise_multiplier(first.sensitivities, stds)
