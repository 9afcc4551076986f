"""The pairwise selection holds every pair that can be combined, and little more."""

from __future__ import annotations

import itertools

import pytest
from matrix_cases import FACTORS, PAIRWISE, QUICK, RUNS
from pairwise import Constraint, pairs_of, pairwise

SMALL = {"a": ("1", "2", "3"), "b": ("x", "y"), "c": ("p", "q", "r", "s"), "d": ("u", "v")}
CONSTRAINTS = {
    "none": [],
    "two-factors": [Constraint(("a", "b"), lambda a, b: (a, b) != ("1", "x"))],
    "chained": [
        Constraint(("a", "c"), lambda a, c: c != "p" or a == "2"),
        Constraint(("a", "d"), lambda a, d: a != "2" or d == "v"),  # so p never meets u
    ],
}


def product(factors, constraints):
    """Every admissible row, cut early where a constraint already forbids it."""
    rows = [{}]
    for name, values in factors.items():
        rows = [{**row, name: value} for row in rows for value in values]
        rows = [row for row in rows if all(c.allows(row) for c in constraints)]
    return rows


def pairs_in(rows):
    return set(itertools.chain.from_iterable(map(pairs_of, rows)))


@pytest.mark.parametrize("constraints", CONSTRAINTS.values(), ids=CONSTRAINTS)
def test_every_pair_that_the_whole_product_holds(constraints):
    rows, everything = pairwise(SMALL, constraints), product(SMALL, constraints)
    assert pairs_in(rows) == pairs_in(everything)
    assert all(row in everything for row in rows)
    assert len(rows) < len(everything) / 2
    assert rows == pairwise(SMALL, constraints)


def test_weights_fill_the_free_places():
    rows = pairwise(SMALL, [], {("d", "v"): 4.0})
    assert sum(row["d"] == "v" for row in rows) > len(rows) / 2


def test_every_pair_of_the_contract_matrix_that_can_be_run():
    """Also the pairs that are dear: what is left out for its cost is left out in threes or more."""
    assert pairs_in(PAIRWISE) == pairs_in(product(FACTORS, RUNS))
    assert all(c.allows(row) for row in PAIRWISE for c in [*RUNS, QUICK])
