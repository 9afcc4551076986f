"""What a model may not do, decided once for every route, engine and piece size.

A bound on one record's share holds for models that keep records apart and carry nothing from one
pass to the next. An engine proves both by a pass under shadow memory and writes a `certificate`;
this room says what it means. `side_effects` watches the model's buffers and parameters around every
step. A query enters here with its logical batch, before it is cut into pieces, so no engine or
piece size can switch a check off. This room imports no query and no engine.
"""

from tacit.checks.certificate import Certificate, Event, refuse_mixing, require_isolation
from tacit.checks.side_effects import function_kind, require_isolated_views, watched_step

__all__ = [
    "Certificate",
    "Event",
    "function_kind",
    "refuse_mixing",
    "require_isolated_views",
    "require_isolation",
    "watched_step",
]
