"""What has no sound analysis is refused, and the message says what to do instead."""

import attr
import dp_accounting as dpa
import pytest
from hockey_stick import gaussian_epsilon
from tiny_run import ADD, REPLACE

from tacit import epsilon
from tacit.accounting import Plan
from tacit.accounting.plan import epsilon_of_event
from tacit.accounting.rdp import renyi_curve
from tacit.errors import UnsupportedEvent
from tacit.sampling import Poisson, ShuffledEpochs, WithoutReplacement

ONE = dpa.GaussianDpEvent(1.0)


@attr.s(frozen=True, slots=True, auto_attribs=True)
class UnheardOf(dpa.DpEvent):
    noise: float = 1.0


@attr.s(frozen=True, slots=True, auto_attribs=True)
class Wrapping(dpa.DpEvent):
    event: dpa.DpEvent = ONE


def nothing(event):
    return event


def inside(event):
    return dpa.ComposedDpEvent([ONE, dpa.SelfComposedDpEvent(event, 3)])


REFUSED = {
    "poisson of a composition": dpa.PoissonSampledDpEvent(0.1, dpa.ComposedDpEvent([ONE, ONE])),
    "poisson of many": dpa.PoissonSampledDpEvent(0.1, dpa.SelfComposedDpEvent(ONE, 3)),
    "poisson of laplace": dpa.PoissonSampledDpEvent(0.1, dpa.LaplaceDpEvent(1.0)),
    "poisson of poisson": dpa.PoissonSampledDpEvent(0.1, dpa.PoissonSampledDpEvent(0.1, ONE)),
    "laplace": dpa.LaplaceDpEvent(1.0),
    "tree": dpa.SingleEpochTreeAggregationDpEvent(1.0, 8),
    "with replacement": dpa.SampledWithReplacementDpEvent(100, 10, ONE),
    "of a composition": dpa.SampledWithoutReplacementDpEvent(9, 3, dpa.ComposedDpEvent([ONE])),
    "unheard of": UnheardOf(),
    "unknown wrapper": Wrapping(),
    "unsupported": dpa.UnsupportedDpEvent(),
}


@pytest.mark.parametrize("event", REFUSED.values(), ids=list(REFUSED))
@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize("where", [nothing, inside])
def test_refused_by_both_accountants(event, relation, where):
    for account in (
        lambda e: epsilon_of_event(e, 1e-5, relation),
        lambda e: renyi_curve(e, relation),
    ):
        with pytest.raises(UnsupportedEvent, match=r"known are|joint noise multiplier"):
            account(where(event))


def test_a_refusal_of_many_blocks_names_the_joint_multiplier():
    event = REFUSED["poisson of a composition"]
    with pytest.raises(UnsupportedEvent, match="joint noise multiplier of all blocks"):
        epsilon_of_event(event, 1e-5, ADD)


@pytest.mark.parametrize("scheme", [WithoutReplacement(100, 10), ShuffledEpochs(10)])
def test_schemes_that_move_the_others_are_for_replace_one(scheme):
    with pytest.raises(UnsupportedEvent, match=r"REPLACE_ONE|PoissonSampler"):
        epsilon(1.0, scheme, 10, delta=1e-5, relation=ADD)
    with pytest.raises(UnsupportedEvent, match=r"REPLACE_ONE|PoissonSampler"):
        Plan(scheme, 1.0, ADD, 10)
    assert epsilon(1.0, scheme, 10, delta=1e-5, relation=REPLACE) > 0


def test_the_event_itself_is_refused_under_add_or_remove():
    event = dpa.SampledWithoutReplacementDpEvent(100, 10, ONE)
    with pytest.raises(UnsupportedEvent, match="replace-one only"):
        epsilon_of_event(event, 1e-5, ADD)
    with pytest.raises(UnsupportedEvent, match="replace-one only"):
        renyi_curve(event, ADD)


def test_a_shuffled_epoch_gets_no_poisson_epsilon():
    epochs, per_epoch = 5, 20
    shuffled = epsilon(
        2.0, ShuffledEpochs(per_epoch), epochs * per_epoch, delta=1e-5, relation=REPLACE
    )
    poisson = epsilon(2.0, Poisson(1 / 20), epochs * per_epoch, delta=1e-5, relation=REPLACE)
    assert shuffled == pytest.approx(gaussian_epsilon(1e-5, 5**0.5 / 2), rel=1e-4)
    assert shuffled > 2 * poisson


def test_a_bound_on_mini_sets_needs_mini_sets():
    """Sets cut from a Poisson sample by position shift when one record comes in."""
    from tacit.sampling.scheme import Unit

    for scheme in (Poisson(0.1), WithoutReplacement(100, 10), ShuffledEpochs(10)):
        with pytest.raises((UnsupportedEvent, ValueError)):
            Plan(scheme, 1.0, REPLACE, 10, unit=Unit.MINI_SET)
