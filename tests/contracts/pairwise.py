"""All-pairs selection: a few rows of a large product in which every admissible pair still occurs.

Most faults of a configurable program need one or two settings to appear [Kuhn 2004], so rows that
cover every pair of values find nearly what the whole product finds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

Row = dict[str, str]
Factors = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Constraint:
    """A condition on the values of some factors, for instance on engine and model."""

    factors: tuple[str, ...]
    holds: Callable[..., bool]

    def allows(self, row: Row) -> bool:
        """Whether a row, which may still be incomplete, does not break it."""
        if any(name not in row for name in self.factors):
            return True
        return self.holds(*(row[name] for name in self.factors))


def pairs_of(row: Row) -> Iterator[frozenset[tuple[str, str]]]:
    return map(frozenset, itertools.combinations(row.items(), 2))


def pairwise(
    factors: Factors,
    constraints: Sequence[Constraint],
    weights: Mapping[tuple[str, str], float] | None = None,
) -> list[Row]:
    """Rows that together hold every pair of values that any admissible row holds.

    Greedy and deterministic: each row starts from the first pair that is still missing and gives
    every other factor the value with the most missing pairs, going back where a constraint forbids
    it. Among equals the value is taken that was used least for its weight, so that a value of
    weight 3 fills three times as many free places. A pair that cannot be completed to a row is not
    admissible.
    """
    missing = dict.fromkeys(
        frozenset([(f, a), (g, b)])
        for f, g in itertools.combinations(factors, 2)
        for a, b in itertools.product(factors[f], factors[g])
    )
    used = {(f, a): 0.0 for f in factors for a in factors[f]}

    def completed(row: Row) -> Row | None:
        if not all(constraint.allows(row) for constraint in constraints):
            return None
        if len(row) == len(factors):
            return row
        name = next(name for name in factors if name not in row)

        def rank(value: str) -> tuple[int, float]:
            gain = sum(frozenset([(name, value), held]) in missing for held in row.items())
            return -gain, used[name, value]

        tried = (completed({**row, name: value}) for value in sorted(factors[name], key=rank))
        return next((found for found in tried if found is not None), None)

    rows: list[Row] = []
    while missing:
        first = next(iter(missing))
        row = completed(dict(first))
        del missing[first]
        if row is None:
            continue
        rows.append({name: row[name] for name in factors})
        for pair in pairs_of(row):
            missing.pop(pair, None)
        for held in row.items():
            used[held] += 1 / (weights or {}).get(held, 1.0)
    return rows
