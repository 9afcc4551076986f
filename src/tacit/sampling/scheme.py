"""Sampling schemes: what a sampler tells the accountant, and how ledgers store it.

A scheme is a frozen dataclass that says which privacy event one step is. `register_scheme` gives
it the name under which a ledger stores its fields.
"""

from __future__ import annotations

import abc
import enum
import math
import numbers
import operator
from collections.abc import Callable
from dataclasses import asdict, fields, is_dataclass
from typing import Any, Protocol, SupportsIndex, TypeVar, overload

import dp_accounting as dpa

from tacit.budget import Relation
from tacit.errors import UnsupportedEvent, shown


def whole_number(name: str, value: SupportsIndex, least: int) -> int:
    """`value` as an int; ValueError by the argument's `name` where it is none, or below `least`."""
    try:
        count = operator.index(value)
    except TypeError:
        count = None
    if count is None or isinstance(value, bool) or count < least:
        raise ValueError(f"{name} is {shown(value)}; give a whole number, {least} or more")
    return count


def require_batch_size(value: object) -> None:
    """Raise ValueError unless the expected batch size is a finite number above 0."""
    if not isinstance(value, numbers.Real) or not 0 < float(value) < math.inf:
        raise ValueError(f"expected_batch_size is {value!r}; give a number above 0")


T = TypeVar("T")


class Unit(enum.Enum):
    """What a query bounds: the contribution of one record, or of one mini-set of records."""

    RECORD = "record"
    MINI_SET = "mini-set"

    def __repr__(self) -> str:
        return f"Unit.{self.name}"


class Scheme(Protocol):
    """A way to draw batches, and the event that it makes of a Gaussian mechanism.

    To add one, write a frozen dataclass that derives from `Scheme` or has all of its methods,
    decorate it with `@tacit.register_scheme`, and run `tacit.accounting.check_scheme(scheme)` on
    an instance. The contract:

    1. *Plain data.* The fields are numbers, strings, booleans or None. A ledger stores them under
       the registered name and makes the scheme again from them; the result must be equal.
    2. *A step is at most one event.* num_events(0) = 0 and 1 ≤ num_events(t) ≤ t for t ≥ 1.
       Both counts are integers that do not decrease, num_events(steps_within(e)) ≤ e and
       steps_within(num_events(t)) ≥ t. A ledger charges one event for each release. Only where
       steps_within(1) > 1 does it charge several releases once, if the sampler says that they
       belong to one epoch (see `Sampler.current_epoch`), in which a record takes part at most once.
    3. *The event is an upper bound.* For every relation that `require` admits, step_event(z)
       dominates the released sum plus noise of multiplier z, whatever was released before. Both
       accountants must understand it: GaussianDpEvent, PoissonSampledDpEvent,
       SampledWithoutReplacementDpEvent, RevealedSampleDpEvent of a Gaussian, or compositions.
       No test can check domination; prove it where the scheme is defined.
    4. *Amplification is declared.* `amplifies` is True wherever the event costs less than the
       Gaussian alone. Then two runs that draw the same batches are not two independent samples,
       and a ledger refuses a sampler's seed that it has seen before.

    Example:
        >>> @tacit.register_scheme
        ... @dataclass(frozen=True)
        ... class EveryRecord(tacit.sampling.Scheme):
        ...     def step_event(self, noise_multiplier, unit=Unit.RECORD):
        ...         return dp_accounting.GaussianDpEvent(noise_multiplier)
        ...     ...
    """

    @abc.abstractmethod
    def step_event(self, noise_multiplier: float, unit: Unit = Unit.RECORD) -> dpa.DpEvent:
        """The event of one application of the mechanism. Raises UnsupportedEvent for a unit
        (a record or a mini-set) that the scheme does not sample."""

    def num_events(self, steps: int) -> int:
        """The most such events that `steps` consecutive steps of one sampler can be."""
        return steps

    def steps_within(self, events: int) -> int:
        """The inverse: how many steps `events` events cover."""
        return events

    @abc.abstractmethod
    def epochs(self, steps: int) -> float:
        """How often each record is expected to have taken part after `steps` steps."""

    @abc.abstractmethod
    def amplifies(self) -> bool:
        """Whether sampling makes a step cheaper than the Gaussian alone."""

    def require(self, relation: Relation) -> None:
        """Raise UnsupportedEvent unless this scheme can be accounted for under `relation`.

        By default both relations are admitted.
        """
        _ = relation

    @abc.abstractmethod
    def describe(self) -> str:
        """The scheme in a few words, for reports."""


_METHODS = [name for name, value in vars(Scheme).items() if name[0] != "_" and callable(value)]
_registered: dict[str, type] = {}


class UnregisteredScheme(UnsupportedEvent):
    """A stored plan names a scheme that no class in this process was registered for."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the sampling scheme {name!r} is not registered in this process; import the module "
            "that defines it, with @tacit.register_scheme on the class"
        )
        self.name = name


@overload
def register_scheme(cls: type[T], /, *, name: str | None = None) -> type[T]: ...


@overload
def register_scheme(*, name: str | None) -> Callable[[type[T]], type[T]]: ...


def register_scheme(
    cls: type[T] | None = None, /, *, name: str | None = None
) -> type[T] | Callable[[type[T]], type[T]]:
    """Class decorator: let ledgers and reports store this sampling scheme, under a fixed name.

    The name (by default the class name) is written into every ledger that holds such a run, so it
    must not change afterwards. The class is a frozen dataclass that meets the contract of
    `Scheme`; `check_scheme` tests an instance. Defining the same class again (a notebook cell,
    a reload) replaces it; another class of the same name is refused.

    Example:
        >>> @tacit.register_scheme
        ... @dataclass(frozen=True)
        ... class Ordered(tacit.sampling.Scheme): ...
    """

    if cls is None:
        return lambda cls: register_scheme(cls, name=name)
    name = cls.__name__ if name is None else name
    if not (is_dataclass(cls) and cls.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        raise ValueError(
            f"{cls.__name__} is not a frozen dataclass; put @dataclass(frozen=True) below "
            "@register_scheme"
        )
    abstract = getattr(cls, "__abstractmethods__", ())
    missing = [m for m in _METHODS if m in abstract or not callable(getattr(cls, m, None))]
    if missing:
        raise ValueError(
            f"scheme {cls.__name__} lacks {', '.join(missing)}; tacit.sampling.Scheme says what "
            "they return"
        )
    if any(field.name == "kind" for field in fields(cls)):
        raise ValueError(f"scheme {cls.__name__} has a field 'kind', which is reserved; rename it")
    owner = _registered.get(name, cls)
    if _path(owner) != _path(cls):
        raise ValueError(
            f"the scheme name {name!r} belongs to {_path(owner)}; register {_path(cls)} with "
            "@register_scheme(name=...) of its own"
        )
    _registered[name] = cls
    return cls


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def scheme_to_fields(scheme: Scheme) -> dict[str, Any]:
    """The registered name and the fields, for JSON. Raises UnsupportedEvent if not registered."""
    for name, cls in _registered.items():
        if type(scheme) is cls:
            return {"kind": name, **asdict(scheme)}  # type: ignore[call-overload]
    raise UnsupportedEvent(
        f"the sampling scheme {type(scheme).__name__} is not registered, so a ledger could not "
        "read it back; decorate its class with @tacit.register_scheme"
    )


def scheme_from_fields(stored: dict[str, Any]) -> Scheme:
    """The scheme with these fields. Raises UnregisteredScheme if nothing here has its name."""
    values = dict(stored)
    name = values.pop("kind")
    if not isinstance(name, str):
        raise TypeError(f"the name of a scheme is {name!r}, which is no text")
    if name not in _registered:
        raise UnregisteredScheme(name)
    scheme: Scheme = _registered[name](**values)
    return scheme


def accounted_relation(relation: Relation, unit: Unit) -> Relation:
    """The relation between sampled units that one record's change amounts to.

    A record added to a mini-set turns one clipped contribution into another, so to the
    accountant a mini-set has been replaced, whatever happened to the record.
    """
    return Relation.REPLACE_ONE if unit is Unit.MINI_SET else relation


def require_records(scheme: Scheme, unit: Unit) -> None:
    """Refuse mini-sets cut from a sample of records: they were not sampled as sets."""
    if unit is not Unit.RECORD:
        raise UnsupportedEvent(
            f"{type(scheme).__name__} samples records, and the query bounds a {unit.value}; "
            "draw mini-sets with MiniSetSampler"
        )


def require_replace_one(relation: Relation, what: str, why: str) -> None:
    if relation is not Relation.REPLACE_ONE:
        raise UnsupportedEvent(
            f"{what} are analysed for replace-one, not {relation}: {why}; use "
            "Budget(relation=Relation.REPLACE_ONE), or PoissonSampler"
        )


def set_probability(scheme: Scheme, name: str, description: str) -> None:
    """Check a field of a frozen scheme and make it a Python float, which JSON can store."""
    value = getattr(scheme, name)
    if not isinstance(value, numbers.Real) or not 0 < float(value) <= 1:
        raise ValueError(f"{description} is {value!r}; give a probability above 0 and at most 1")
    object.__setattr__(scheme, name, float(value))


def set_whole_numbers(scheme: Scheme, *names: str) -> None:
    """Check fields of a frozen scheme and make them Python integers, which JSON can store."""
    for name in names:
        object.__setattr__(scheme, name, whole_number(name, getattr(scheme, name), least=1))
