"""A budget promises something, for one neighbouring relation."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tacit import Budget, Relation


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.inf, math.nan])
def test_an_epsilon_that_promises_nothing_is_refused(epsilon):
    with pytest.raises(ValueError, match="epsilon"):
        Budget(epsilon, 1e-5)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
def test_a_delta_that_promises_nothing_is_refused(delta):
    with pytest.raises(ValueError, match="delta"):
        Budget(1.0, delta)


def test_a_budget_is_for_add_or_remove_unless_it_says_otherwise_and_cannot_be_raised():
    budget = Budget(1.0, 1e-5)
    assert budget.relation is Relation.ADD_OR_REMOVE_ONE
    assert Budget(1.0, 1e-5, "replace-one").relation is Relation.REPLACE_ONE
    with pytest.raises(dataclasses.FrozenInstanceError):
        budget.epsilon = 2.0
