"""Audits that try to break the guarantee: of Tacit, and of your own models, queries and layers.

Each audit compares what is declared with what happens, and returns a `Verdict` (`verdicts`):
neighbour replay (`neighbours`, with `replay`), the search for the worst record (`worst_record`),
the released step (`released_step`) and its noise (`noise_check`), prediction of random draws
(`random_draws`, with `mersenne_twister`), the sampler against its scheme (`sampling_check`), and
the sets of Lipschitz weights (`projection_check`). `audit_training` runs all of them. An audit that
finds something settles the matter; one that finds nothing proves nothing.
"""

from tacit.auditing.neighbours import (
    extreme_records,
    replay_among_identical,
    replay_neighbours,
)
from tacit.auditing.noise_check import check_noise
from tacit.auditing.projection_check import check_projection
from tacit.auditing.random_draws import attack_draws, check_repeats, noise_of_releases
from tacit.auditing.released_step import replay_release
from tacit.auditing.sampling_check import check_sampler
from tacit.auditing.training_audit import audit_training
from tacit.auditing.verdicts import TrainingAudit, Verdict
from tacit.auditing.worst_record import WorstRecord, find_worst_record

__all__ = [
    "TrainingAudit",
    "Verdict",
    "WorstRecord",
    "attack_draws",
    "audit_training",
    "check_noise",
    "check_projection",
    "check_repeats",
    "check_sampler",
    "extreme_records",
    "find_worst_record",
    "noise_of_releases",
    "replay_among_identical",
    "replay_neighbours",
    "replay_release",
]
