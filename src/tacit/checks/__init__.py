"""What a model may not do, decided once for every route, engine and piece size.

A bound on one record's share holds for models that keep records apart and carry nothing from one
pass to the next. A query enters here with its *logical* batch, before it is cut into pieces:
`watched_step` runs the probes of `isolation` before steps 1, 8, 64 … and compares the model's
buffers and parameters around every step. Engines never check anything, so no choice of engine,
piece size or chunk size can switch a check off. Probes use real records of the dataset and repeat
the same random draws. This room imports no query and no engine: they hand in what they compute.
"""

from tacit.checks.isolation import require_isolated, require_sets_isolated
from tacit.checks.known_modules import mixes_records, refuse_mixing
from tacit.checks.side_effects import watched_step

__all__ = [
    "mixes_records",
    "refuse_mixing",
    "require_isolated",
    "require_sets_isolated",
    "watched_step",
]
