"""Does a sampler draw what its scheme says? The draws are tested against the declared distribution.

ε is accounted for the declared scheme. A sampler that shuffles and is accounted as Poisson passes
every test of averages: each record takes part as often as it should. What gives it away is
dependence. A record that has just been drawn is not drawn again in the same epoch, and all batches
have one size. So the tests here are of rates, of the same record in two steps, of two records in
one step, and of batch sizes.

All counts are compared with the exact binomial distribution, or by Chernoff's bound
P(K ≥ k) ≤ exp(−n·KL(k/n ‖ p)), which holds for subsets of fixed size too, as their indicators are
negatively associated [Joag-Dev and Proschan 1983]. Together the tests raise a false alarm with
probability at most `FALSE_ALARM`, by the union bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from scipy.stats import binom

from tacit.auditing.noise_check import FALSE_ALARM
from tacit.auditing.verdicts import Factory, Verdict
from tacit.records import as_records
from tacit.sampling.fixed_size import ShuffledEpochs, WithoutReplacement
from tacit.sampling.mini_sets import MiniSets
from tacit.sampling.poisson import Poisson, TruncatedPoisson
from tacit.sampling.sampler import Batch
from tacit.sampling.scheme import Scheme

_LAGS = 32
_MOST_UNITS = 8192  # whose every draw is remembered


def check_sampler(sampler: Factory, records: object, *, steps: int = 2048) -> Verdict:
    """Draw many steps, and test them against the distribution that the scheme declares.

    Args:
        sampler: makes a sampler, as in `sampler(records, steps=2048, seed=None)`.
        records: only their number and their declared constants matter.

    Poisson, truncated Poisson, fixed-size, mini-set and shuffled sampling are tested in full. Of a
    scheme of your own only what holds for all is tested: no record twice in a step, one divisor,
    two passes that differ. A fault names the count that is wrong and what it should be.

        check_sampler(partial(PoissonSampler, expected_batch_size=256), train).require()
    """
    data = as_records(records)
    drawn = sampler(data, steps=steps, seed=None)
    tests = _Tests(drawn.scheme, len(data), steps)
    tests.look_at(drawn)
    again = [_rows(batch) for batch in _first(drawn, 8)]
    tests.compare_passes(again)
    return tests.verdict()


def _first(sampler: Factory, count: int) -> Iterator[Batch]:
    for batch, _ in zip(sampler, range(count), strict=False):
        yield batch


def _rows(batch: Batch) -> np.ndarray:
    rows = batch.indices if batch.mask is None else batch.indices[batch.mask]
    return np.asarray(rows.cpu().numpy())


@dataclass
class _Tests:
    scheme: Scheme
    population: int
    steps: int
    ratios: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    worst: dict[str, tuple[float, str]] = field(default_factory=dict)
    head: list[np.ndarray] = field(default_factory=list)
    num_tests: int = 4 * _LAGS + 64

    def verdict(self) -> Verdict:
        compared = f"{self.steps} draws / {self.scheme.describe()}"
        faults = (*dict.fromkeys(self.faults), *(words for _, words in self.worst.values()))
        return Verdict("sampling", compared, self.ratios, faults, tuple(self.notes))

    def look_at(self, batches: Sequence[Batch]) -> None:
        """Read all draws once, and test them by the rules of the scheme."""
        scheme = self.scheme
        self.units = scheme.num_sets if isinstance(scheme, MiniSets) else self.population
        taken = np.zeros((self.steps, min(self.units, _MOST_UNITS)), dtype=bool)
        self.sizes = np.zeros(self.steps, dtype=int)
        divisors, epochs = set(), []
        set_of: dict[int, int] = {}
        for step, batch in enumerate(batches):
            rows = _rows(batch)
            divisors.add(batch.divisor)
            epochs.append(batch.epoch)
            if len(self.head) < 8:
                self.head.append(rows)
            if len(np.unique(rows)) < len(rows):
                self.faults.append("a step draws one record twice, so that it counts twice")
            if batch.scheme != scheme:
                self.faults.append(f"a batch says that it was drawn by {batch.scheme}")
            if isinstance(scheme, MiniSets):
                rows = self._sets(batch, rows, set_of)
            self.sizes[step] = len(rows)
            taken[step, rows[rows < taken.shape[1]]] = True
        if len(divisors) > 1:
            self.faults.append(
                f"the divisor is not one number: {sorted(divisors)[:3]}; divide by the declared "
                "expected batch size"
            )
        self.taken = taken
        self._by_scheme(epochs)

    def compare_passes(self, again: Sequence[np.ndarray]) -> None:
        """Two passes of a sampler without a seed draw different batches."""
        pairs = zip(self.head, again, strict=False)
        sizes = [len(rows) for rows in self.head]
        informative = min(sizes, default=0) > 0 and max(sizes) < self.population
        if informative and all(np.array_equal(np.sort(a), np.sort(b)) for a, b in pairs):
            self.faults.append(
                "a second pass draws the batches of the first again, so its steps are no new sample"
            )

    def _sets(self, batch: Batch, rows: np.ndarray, set_of: dict[int, int]) -> np.ndarray:
        scheme = self.scheme
        assert isinstance(scheme, MiniSets)
        if batch.groups is None:
            self.faults.append("the scheme draws mini-sets, and a batch does not say its sets")
            return np.empty(0, dtype=int)
        groups = batch.groups if batch.mask is None else batch.groups[batch.mask]
        sets = np.asarray(groups.cpu().numpy())
        if len(sets) and np.unique(sets, return_counts=True)[1].max() > scheme.set_size:
            self.faults.append(f"a mini-set has more than its {scheme.set_size} records")
        for row, one in zip(rows.tolist(), sets.tolist(), strict=True):
            if set_of.setdefault(row, one) != one:
                self.faults.append(
                    "a record changes its mini-set between steps; partition the ids once"
                )
        return np.unique(sets)

    # ---- by scheme -------------------------------------------------------------------------------

    def _by_scheme(self, epochs: Sequence[object]) -> None:
        scheme = self.scheme
        if isinstance(scheme, Poisson):
            self._independent(scheme.rate)
        elif isinstance(scheme, TruncatedPoisson):
            self._at_most(scheme)
        elif isinstance(scheme, WithoutReplacement):
            self._fixed(scheme.population, scheme.sample_size)
        elif isinstance(scheme, MiniSets) and scheme.rate is not None:
            self._independent(scheme.rate)
        elif isinstance(scheme, MiniSets):
            self._fixed(scheme.num_sets, scheme.chosen or 0)
        elif isinstance(scheme, ShuffledEpochs):
            self._shuffled(epochs, scheme.steps_per_epoch)
        else:
            self.notes.append(
                f"the distribution of {type(scheme).__name__} is not known here, so only that its "
                "batches are no repetitions was tested"
            )

    def _independent(self, rate: float) -> None:
        """Each unit in each step with this probability, independently of all others."""
        taken, (steps, columns), units = self.taken, self.taken.shape, self.units
        self._count("rate", taken.sum(), taken.size, rate, "records take part")
        if rate >= 1:
            return
        for name, counts, trials in (
            ("rate of a record", taken.sum(axis=0), steps),
            ("size of a batch", self.sizes, units),
        ):
            extremes = {int(counts.min()), int(counts.max())}
            for count in extremes:  # the union over all of them
                what = "the batch has" if "batch" in name else "a record takes part in"
                self._count(name, count, trials, rate, what, times=len(counts))
        for lag in self._lags(rate):
            both = self._in_two_steps(lag)
            what = f"a record takes part in two steps that are {lag} apart"
            self._count("two steps", both.sum(), both.size, rate**2, what)
        half = columns // 2
        if half:
            together = taken[:, :half] & taken[:, half : 2 * half]
            what = "two records take part in one step"
            self._count("two records", together.sum(), together.size, rate**2, what)
        middle = round(units * rate)
        sd = math.sqrt(units * rate * (1 - rate))
        for width in (0, max(1, round(0.5 * sd)), max(2, round(1.5 * sd))):
            inside = np.abs(self.sizes - middle) <= width
            p = binom.cdf(middle + width, units, rate) - binom.cdf(middle - width - 1, units, rate)
            what = f"a batch has {middle} ± {width} records"
            self._count("sizes of batches", inside.sum(), steps, float(p), what)

    def _fixed(self, population: int, size: int) -> None:
        """So many of so many units in each step, all subsets equally likely."""
        taken = self.taken
        wrong = int((self.sizes != size).sum())
        if wrong:
            self.faults.append(
                f"{wrong} of {self.steps} batches do not have {size} records or sets"
            )
        if size == population:
            return
        counts = taken.sum(axis=0)
        rate = size / population
        for count in (int(counts.min()), int(counts.max())):
            what = "a record takes part in"
            self._count("rate of a record", count, self.steps, rate, what, times=len(counts))
        for lag in self._lags(rate):
            both = self._in_two_steps(lag)
            what = f"a record takes part in two steps that are {lag} apart"
            self._count("two steps", both.sum(), both.size, rate**2, what, exact=False)

    def _at_most(self, scheme: TruncatedPoisson) -> None:
        if self.sizes.max() > scheme.max_batch_size:
            self.faults.append(f"a batch has more than {scheme.max_batch_size} records")
        if (
            binom.sf(scheme.max_batch_size, self.population, scheme.rate) * self.steps
            < FALSE_ALARM / 10
        ):
            self._independent(scheme.rate)
            return
        count = int(self.taken.sum())
        if count > self.taken.size * scheme.rate:
            self._count("rate", count, self.taken.size, scheme.rate, "records take part")
        self.notes.append("the cap is often reached: only rates and sizes were tested")

    def _shuffled(self, epochs: Sequence[object], steps_per_epoch: int) -> None:
        """Each record once per epoch, in an order of its own."""
        keys = np.array([hash(key) for key in epochs])
        orders = []
        for key in dict.fromkeys(keys.tolist()):
            steps = np.flatnonzero(keys == key)
            times = self.taken[steps].sum(axis=0)
            if times.max() > 1:
                self.faults.append("a record takes part twice in a shuffled epoch")
            if len(steps) > steps_per_epoch:
                self.faults.append(
                    f"an epoch has {len(steps)} steps and is charged as {steps_per_epoch}"
                )
            if len(steps) == steps_per_epoch:
                orders.append(self.taken[steps].argmax(axis=0))
        for one, other in pairwise(orders):
            same = int((one == other).sum())
            share = float(self.sizes.max()) / self.population
            if same > 0 and share < 1:
                what = "a record is in the same place in two epochs"
                self._count("order of epochs", same, len(one), share, what, exact=False, upper=True)

    # ---- counts ----------------------------------------------------------------------------------

    def _lags(self, rate: float) -> list[int]:
        """Distances of steps: every small one, so that an epoch of any length is met."""
        return list(range(1, min(_LAGS, self.steps // 2) + 1))

    def _in_two_steps(self, lag: int) -> np.ndarray:
        """Who takes part in both of two steps, over pairs of steps that have no step in common."""
        starts = np.arange(self.steps - lag)
        starts = starts[(starts // lag) % 2 == 0]
        found: np.ndarray = self.taken[starts] & self.taken[starts + lag]
        return found

    def _count(
        self,
        name: str,
        count: float,
        trials: int,
        p: float,
        what: str,
        times: int = 1,
        exact: bool = True,
        upper: bool = False,
    ) -> None:
        """Test one count of `trials` with probability p each; `times` counts were looked at."""
        share = FALSE_ALARM / self.num_tests / times
        count, expected = int(count), trials * p
        if exact:
            tail = (
                binom.sf(count - 1, trials, p) if count > expected else binom.cdf(count, trials, p)
            )
            log_tail = math.log(max(float(tail), 1e-300))
        else:
            log_tail = -trials * _divergence(count / trials, p) if trials else 0.0
        if upper and count <= expected:
            log_tail = 0.0
        ratio = math.sqrt(max(0.0, -log_tail) / -math.log(share / 2))
        self.ratios[name] = max(ratio, self.ratios.get(name, 0.0))
        if ratio > max(1.0, self.worst.get(name, (0.0, ""))[0]):
            self.worst[name] = (
                ratio,
                f"{what} {count} times of {trials}, where {self.scheme.describe()} means about "
                f"{expected:.4g}: the draws are not those that are accounted for",
            )


def _divergence(q: float, p: float) -> float:
    """KL(q ‖ p) of two coins."""
    if p in (0.0, 1.0):
        return 0.0 if q == p else math.inf
    terms = [(q, p), (1 - q, 1 - p)]
    return sum(a * math.log(a / b) for a, b in terms if a > 0)
