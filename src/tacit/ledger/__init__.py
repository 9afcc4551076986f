"""The ledger: charges are durable and come first; what it states is recomputed from its log."""

from tacit.ledger.charge import Ledger
from tacit.ledger.statement import Statement

__all__ = [
    "Ledger",
    "Statement",
]
