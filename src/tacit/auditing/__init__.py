"""Audits that try to break the guarantee: of Tacit, and of your own models, queries and layers.

*Exact ones* compare what is declared with what happens, and return a `Verdict` (`verdicts`):
neighbour replay (`neighbours`, with `replay`), the search for the worst record (`worst_record`),
the released step (`released_step`) and its noise (`noise_check`), prediction of random draws
(`random_draws`, with `mersenne_twister`), the sampler against its scheme (`sampling_check`), and
the sets of Lipschitz weights (`projection_check`). `audit_training` runs all of them.

*Statistical ones* prove a lower bound on ε with confidence: `audit_scores` from the scores of any
membership test (`lower_bounds`), `audit_step` from one step with a canary (`canaries`, in the
`scenes` that it builds), `audit_one_run` from a whole run with many (`one_run`). `attack_model`
measures membership inference, which bounds nothing (`membership`).

An audit that finds something settles the matter; one that finds nothing proves nothing.
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
from tacit.auditing.neighbours import (
    extreme_records,
    replay_among_identical,
    replay_neighbours,
)
from tacit.auditing.noise_check import check_noise
from tacit.auditing.one_run import (
    Canaries,
    OneRunAudit,
    audit_one_run,
    gradient_scores,
    loss_scores,
    plant_canaries,
)
from tacit.auditing.projection_check import check_projection
from tacit.auditing.random_draws import attack_draws, check_repeats, noise_of_releases
from tacit.auditing.released_step import replay_release
from tacit.auditing.sampling_check import check_sampler
from tacit.auditing.scenes import Scene, worst_case
from tacit.auditing.training_audit import audit_training
from tacit.auditing.verdicts import TrainingAudit, Verdict
from tacit.auditing.worst_record import WorstRecord, find_worst_record

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
    "TrainingAudit",
    "UniformBand",
    "Verdict",
    "WorstRecord",
    "attack_draws",
    "attack_model",
    "audit_one_run",
    "audit_scores",
    "audit_step",
    "audit_training",
    "check_noise",
    "check_projection",
    "check_repeats",
    "check_sampler",
    "confidence_of_label",
    "extreme_records",
    "find_worst_record",
    "gradient_scores",
    "lira_scores",
    "logistic_scores",
    "loss_scores",
    "measure_attack",
    "noise_of_releases",
    "plant_canaries",
    "released_scores",
    "replay_among_identical",
    "replay_neighbours",
    "replay_release",
    "threshold_scores",
    "worst_case",
]
