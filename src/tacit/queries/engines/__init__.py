"""How per-sample clipping gets its sums: record by record, or by book-keeping."""

from tacit.queries.engines.automatic import Automatic
from tacit.queries.engines.book_keeping import BookKeeping
from tacit.queries.engines.per_record import PerRecord
from tacit.queries.engines.replay import Replay
from tacit.queries.engines.rule_check import GradientRuleCheck, check_gradient_rule
from tacit.queries.engines.rules import register_gradient_rule
from tacit.queries.engines.task import Clipped, Engine, Task

__all__ = [
    "Automatic",
    "BookKeeping",
    "Clipped",
    "Engine",
    "GradientRuleCheck",
    "PerRecord",
    "Replay",
    "Task",
    "check_gradient_rule",
    "register_gradient_rule",
]
