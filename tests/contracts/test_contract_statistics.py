"""A query that changes with what it releases keeps every bound, wherever it has come to."""

from __future__ import annotations

import pytest
import torch
from contract_checks import ROUNDING, everyone, limits, worst_alone, worst_share

import tacit
from tacit import Budget, Ledger, Mechanism
from tacit.errors import BudgetExceeded


def ask(pair, records):
    return pair.query(pair.model, pair.loss, everyone(records))


def move(pair, records, up: bool) -> None:
    """One update as far up or down as a count can take it."""
    for statistic in ask(pair, records).statistics:
        statistic.observe(-1e9 if up else 1e9)


def candidates_of(pair, records):
    turned = [(records.inputs[i], 1 - records.targets[i]) for i in range(2)]
    return turned + [(x, y) for x in pair.draw(2) for y in (0, 1)]


@pytest.mark.parametrize("steps", [-6, 14])
def test_after_some_steps_everything_is_still_bounded(adapting_pair, relation, steps):
    pair, records = adapting_pair, adapting_pair.records()
    before = [block.bound for block in ask(pair, records).blocks]
    for _ in range(abs(steps)):
        move(pair, records, up=steps > 0)
    after = [block.bound for block in ask(pair, records).blocks]
    assert all((a > b) == (steps > 0) and a != b for a, b in zip(after, before, strict=True))
    setting = (pair.query, pair.model, pair.loss, records, candidates_of(pair, records))
    assert max(worst_share(*setting, relation)) <= 1 + ROUNDING
    assert max(worst_alone(*setting)) <= 1 + ROUNDING


def test_the_bound_of_a_statistic_is_attained(adapting_pair, relation):
    """Somewhere on its way up, C has one record above it and one below."""
    pair, records = adapting_pair, adapting_pair.records()
    num_blocks = len(ask(pair, records).blocks)
    best = [0.0] * (len(limits(ask(pair, records), relation)) - num_blocks)
    for _ in range(30):
        setting = (pair.query, pair.model, pair.loss, records, candidates_of(pair, records))
        found = worst_share(*setting, relation)[num_blocks:]
        best = [max(both) for both in zip(best, found, strict=True)]
        if min(best) > 0.95:
            return
        move(pair, records, up=True)
    raise AssertionError(f"a bound that nothing comes near: {best}")


def statistics_settings(pair, budget):
    sampler = tacit.PoissonSampler(pair.records(), 1.0, steps=4)
    mechanism = Mechanism(pair.query, sampler, noise_multiplier=1.0)
    return sampler, mechanism, Ledger(budget=budget)


def test_a_release_moves_every_threshold_once(adapting_pair):
    pair = adapting_pair
    sampler, mechanism, ledger = statistics_settings(pair, Budget(100.0, 1e-5))
    for step, batch in enumerate(sampler, start=1):
        private = mechanism.privatise(pair.model, pair.loss, batch)
        assert {len(path) for path in mechanism.query.thresholds} == {step}
        ledger.release(private, into=pair.model)
        assert {len(path) for path in mechanism.query.thresholds} == {step + 1}
    assert pair.query.thresholds == ()  # the run's own are not the given query's


def test_a_refused_release_moves_none(adapting_pair):
    pair = adapting_pair
    sampler, mechanism, ledger = statistics_settings(pair, Budget(1e-3, 1e-9))
    private = mechanism.privatise(pair.model, pair.loss, sampler.next_batch())
    before = mechanism.query.thresholds
    with pytest.raises(BudgetExceeded):
        ledger.release(private, into=pair.model)
    assert mechanism.query.thresholds == before


def public_parts(thing) -> list[object]:
    """Everything that can be reached from outside without an underscore, some levels down."""
    found, todo = [], [(thing, 0)]
    while todo:
        part, depth = todo.pop()
        found.append(part)
        if depth < 3 and not isinstance(part, torch.Tensor | str | int | float):
            inside = [getattr(part, name, None) for name in dir(part) if name[0] != "_"]
            inside += list(part) if isinstance(part, tuple | list) else []
            todo += [(value, depth + 1) for value in inside if not callable(value)]
    return found


def test_no_exact_count_can_be_read_off_a_private_gradient(adapting_pair):
    pair = adapting_pair
    sampler, mechanism, ledger = statistics_settings(pair, Budget(100.0, 1e-5))
    batch = sampler.next_batch()
    exact = [float(s.value) for s in mechanism.query(pair.model, pair.loss, batch).statistics]
    private = mechanism.privatise(pair.model, pair.loss, batch)
    for when in ("before", "after"):
        parts = public_parts(private)
        assert not any(
            isinstance(part, torch.Tensor | tacit.queries.Statistic) for part in parts
        ), when
        assert not set(exact) & {part for part in parts if type(part) in (int, float)}, when
        if when == "before":
            ledger.release(private, into=pair.model)
    assert private._bounded is None
