"""Audits: lower bounds on ε that hold with confidence, and attacks on finished models.

`audit_scores` turns the scores of any membership test into a lower bound on ε. `audit_step` attacks
one step of the library's own training with a canary, `audit_one_run` a whole run with many, and
`attack_model` measures membership inference, which bounds nothing. An audit above the claimed ε
refutes the claim; one below it proves no upper bound: that is what accounting is for.
"""

from tacit.auditing.canaries import StepAudit, audit_step, released_scores
from tacit.auditing.lower_bounds import (
    CurveFamily,
    ErrorLimits,
    FixedRanks,
    FixedThreshold,
    GaussianFamily,
    LowerBound,
    PlanFamily,
    ScoreAudit,
    SplitSample,
    ThresholdRule,
    UniformBand,
    audit_scores,
)
from tacit.auditing.membership import (
    Measured,
    MembershipAttack,
    attack_model,
    confidence_of_label,
    lira_scores,
    logistic_scores,
    measure_attack,
    threshold_scores,
)
from tacit.auditing.one_run import (
    Canaries,
    OneRunAudit,
    audit_one_run,
    gradient_scores,
    loss_scores,
    plant_canaries,
)
from tacit.auditing.scenes import Scene, worst_case

__all__ = [
    "Canaries",
    "CurveFamily",
    "ErrorLimits",
    "FixedRanks",
    "FixedThreshold",
    "GaussianFamily",
    "LowerBound",
    "Measured",
    "MembershipAttack",
    "OneRunAudit",
    "PlanFamily",
    "Scene",
    "ScoreAudit",
    "SplitSample",
    "StepAudit",
    "ThresholdRule",
    "UniformBand",
    "attack_model",
    "audit_one_run",
    "audit_scores",
    "audit_step",
    "confidence_of_label",
    "gradient_scores",
    "lira_scores",
    "logistic_scores",
    "loss_scores",
    "measure_attack",
    "plant_canaries",
    "released_scores",
    "threshold_scores",
    "worst_case",
]
