"""What can go wrong, by name. Each message says what was given, the rule, and the way out.

A message names what its reader can type. `argument` writes a name as a Python argument, and inside
of `naming_options` as the option of the command line that gives it. So the code that finds a
mistake says it once, for both:

    raise ValueError(f"{argument('public_size')} is {size}; declare a positive number")
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_options: ContextVar[bool] = ContextVar("options", default=False)


def argument(name: str, option: str | None = None) -> str:
    """The argument `name` as the reader types it: `name`, or `--name` on the command line.

    `option` is for options of another name.
    """
    return (option or "--" + name.replace("_", "-")) if _options.get() else name


def in_words(python: str, command_line: str) -> str:
    """A remedy that is not the same in Python and on the command line."""
    return command_line if _options.get() else python


def shown(value: object) -> str:
    """What was given, for a message: its repr on one line, at most 100 characters of it."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:97]}..."


@contextmanager
def naming_options() -> Iterator[None]:
    """Inside of it, messages name options: the command line runs in it."""
    token = _options.set(True)
    try:
        yield
    finally:
        _options.reset(token)


class TacitError(Exception):
    """The base of all errors that Tacit raises on purpose."""


class BudgetExceeded(TacitError, RuntimeError):
    """The next step would spend more privacy than the budget allows. Nothing was released."""


class PlanChanged(TacitError, ValueError):
    """A run released something other than what it had planned before it began."""


class LedgerDamaged(TacitError, ValueError):
    """A ledger's file is not one, was changed or cut short, or is not the newest copy."""


class StatementRefused(TacitError, ValueError):
    """A privacy statement does not follow from its events, its ledger or its model."""


class CheckpointRefused(TacitError, ValueError):
    """A checkpoint is damaged, belongs to another ledger, plan, model, optimizer or data, or is in
    use by another process."""


class UnsupportedEvent(TacitError, ValueError):
    """The accountant has no sound analysis of this event under this neighbouring relation."""


class UndeclaredConstant(TacitError, ValueError):
    """A public constant would have to be read off private data. It must be declared."""


class MixesRecords(TacitError, ValueError):
    """A module lets one record change another's output, so no per-record bound holds."""


class NotPublic(TacitError, ValueError):
    """What is used as if it were public holds private records, or was made from them."""


class UnsupportedModule(TacitError, ValueError):
    """An engine cannot take this module; another engine may."""


class PrivateStatistics(TacitError, ValueError):
    """A model holds running statistics of private records, which must not be let out."""


class MissingStatistics(TacitError, ValueError):
    """A network that trained without running statistics has none to be evaluated with."""


class UnboundedLayer(TacitError, ValueError):
    """A layer has no gradient bound, so the clipless route cannot train it."""


class AuditFailed(TacitError, ValueError):
    """An audit found that what is declared is not what happens; the message says what."""


class DataError(TacitError, ValueError):
    """A dataset is missing, truncated, not what its checksum says, or cannot be read."""


class Refused(ValueError):
    """Why a module has no bound; the walk through the network adds which module it is."""
