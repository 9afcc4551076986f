"""What a model may not do: decided once, for every route, engine and piece size.

A bound on one record's share holds for models that keep records apart and carry nothing from one
pass to the next. An engine tracks both by a pass in which every number carries the label of its
record; `isolation` holds its report and the refusals. `side_effects` watches the model's buffers
and parameters around every step. A query checks its logical batch, before it is cut into pieces, so
no engine or piece size can switch a check off. This package imports no query and no engine.
"""

from tacit.checks.isolation import Event, IsolationReport, refuse_mixing, require_isolation
from tacit.checks.side_effects import function_kind, require_isolated_views, watched_step

__all__ = [
    "Event",
    "IsolationReport",
    "function_kind",
    "refuse_mixing",
    "require_isolated_views",
    "require_isolation",
    "watched_step",
]
