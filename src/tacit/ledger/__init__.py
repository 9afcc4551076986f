"""The ledger: charges are durable and come before noise; reports are recomputed from its log.

Enter by `Ledger`, which training and users release gradients through, and by `read_statement` and
`verify_file`, which read a ledger's file without changing it. Several ranks share one ledger by
`SharedLedger`.
"""

from tacit.ledger.charge import Ledger, Pending, RunPosition
from tacit.ledger.shared import SharedLedger
from tacit.ledger.statement import RunCharge, Statement, read_statement, verify_file

__all__ = [
    "Ledger",
    "Pending",
    "RunCharge",
    "RunPosition",
    "SharedLedger",
    "Statement",
    "read_statement",
    "verify_file",
]
