"""One call runs all audits, prints a table, and names what is wrong."""

from __future__ import annotations

import pytest
from setups import LOSS, POISSON, PlainClip, lipschitz_mlp, mlp, records

import tacit
from tacit import Clipless, auditing

CHECKS = [
    "neighbour replay",
    "one among identical records",
    "search for the worst record",
    "released step",
    "noise",
    "prediction of draws",
    "sampling",
]


class ForgetsToClip(PlainClip):
    def clipped(self, rows):
        return rows.nan_to_num(0.0, 0.0, 0.0)


def test_a_set_up_that_holds():
    audit = auditing.audit_training(
        lipschitz_mlp(40), LOSS, Clipless(), POISSON, records(), num_seeds=64
    )
    assert audit.require().holds
    assert [verdict.check for verdict in audit.verdicts] == [*CHECKS, "projection"]
    shown = repr(audit)
    assert "largest ratio" in shown
    assert shown.count("holds") == 8
    assert audit["search for the worst record"].largest > 0.5


def test_a_set_up_that_does_not():
    audit = auditing.audit_training(mlp(), LOSS, ForgetsToClip(), POISSON, records(), num_seeds=64)
    failed = [verdict.check for verdict in audit.verdicts if not verdict.holds]
    assert failed == [CHECKS[0], CHECKS[1], CHECKS[2], CHECKS[3]]
    assert "FAILED" in repr(audit)
    with pytest.raises(tacit.errors.AuditFailed, match="times its declared sensitivity"):
        audit.require()
