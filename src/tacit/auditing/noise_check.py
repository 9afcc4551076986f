"""The noise of many releases: its scale, its shape, and that none of it occurs twice.

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
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from scipy.special import ndtr
from scipy.stats import chi2, norm
from torch import nn

from tacit.auditing.released_step import (
    PLENTY,
    Released,
    Restored,
    Watching,
    release_once,
)
from tacit.auditing.replay import in_memory
from tacit.auditing.verdicts import Factory, Verdict, ratio_of
from tacit.budget import Budget, Relation
from tacit.ledger import Ledger
from tacit.mechanism import Mechanism
from tacit.noise import Allocation, joint_noise_multiplier
from tacit.queries.bounded_gradient import GradientQuery, Loss
from tacit.records import as_records
from tacit.sampling.sampler import Batch

FALSE_ALARM = 1e-9
_MOST_COLUMNS, _MOST_PAIRED = 1 << 15, 256


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
    ledger = Ledger(None, Budget(PLENTY, 1e-5, relation))
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
    narrow = any(p.element_size() < 4 for p in model.parameters() if p.requires_grad)
    return _Tests(found, noise_multiplier, narrow).verdict()


def _in_pieces(batch: Batch) -> Batch:
    return replace(batch, max_physical=max(1, len(batch) // 3))


def _emptied(batch: Batch) -> Batch:
    return batch.only(slice(0, 0))


class _Tests:
    """The tests of the noise, each at its share of the probability of a false alarm."""

    def __init__(self, found: dict[str, list[Released]], planned: float, narrow: bool) -> None:
        self.found, self.planned, self.narrow = found, planned, narrow
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
        notes = ["gradients of 16 bits have few values, so repeats were not looked for"]
        if not self.narrow:
            notes = []
            self._repeats(matrix)
        empty = self.found["empty"]
        multiplier = _measured_multiplier(empty)
        compared = (
            f"noise of {len(everything)} releases; multiplier {multiplier:.4g} measured, "
            f"{self.planned:.4g} planned"
        )
        return Verdict("noise", compared, self.ratios, tuple(self.faults), tuple(notes))

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
