"""What can go wrong, by name. Each message says what was given, the rule, and the way out."""

from __future__ import annotations


class TacitError(Exception):
    """The base of all errors that Tacit raises on purpose."""


class BudgetExceeded(TacitError, RuntimeError):
    """The next step would spend more privacy than the budget allows. Nothing was released."""


class PlanChanged(TacitError, ValueError):
    """A run released something other than what it had planned before it began."""


class LedgerDamaged(TacitError, ValueError):
    """A ledger's file is not one, was changed or cut short, or is not the newest copy."""


class CheckpointRefused(TacitError, ValueError):
    """A checkpoint is damaged, or belongs to another ledger, plan, model, optimizer or data."""


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


class DataError(TacitError, ValueError):
    """A dataset is missing, truncated, not what its checksum says, or cannot be read."""


class Refused(ValueError):
    """Why a module has no bound; the walk through the network adds which module it is."""
