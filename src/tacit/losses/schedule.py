"""Losses that change as training goes on."""

from __future__ import annotations

from typing import Protocol, Self, TypeVar, runtime_checkable

Kind = TypeVar("Kind")


@runtime_checkable
class Scheduled(Protocol):
    """A loss that wants to know the epoch, and so belongs to one run.

    The epoch is a public number: how often each record is expected to have taken part by now. The
    trainer says it before each step. In a loop of one's own, say `loss.at(epoch)`.
    """

    def at(self, epoch: float) -> None:
        """From here on the loss is that of this epoch, 0 at the beginning."""
        ...

    def fresh(self) -> Self:
        """The same loss at its beginning, sharing nothing that changes."""
        ...


def at_epoch(loss: object, epoch: float) -> None:
    """Tell the loss where it is, if it wants to know."""
    if isinstance(loss, Scheduled):
        loss.at(epoch)


def fresh(loss: Kind) -> Kind:
    """The loss at its beginning; itself, if it has none."""
    return loss.fresh() if isinstance(loss, Scheduled) else loss
