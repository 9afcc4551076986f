"""Searches for settings that are charged: what a search lets out is in the printed ε.

Three ways. `TrialSearch` runs many cheap noisy trials, chosen adaptively by Optuna, and one full
run: a plan made beforehand, composed exactly. `select_best` makes a secret random number of full
runs and lets out the best. `simulate` searches on public or synthetic records, which is free.
`audit_search` compares a study with a ledger and a printed ε. Needs the extra search (Optuna).
"""

from tacit.search.cheap_trials import TrialPlan, TrialSearch, plan_trials
from tacit.search.repeated import SelectionPlan, plan_selection, select_best
from tacit.search.scores import BoundedLoss, RightAnswers, Score
from tacit.search.search_audit import SearchAudit, audit_search
from tacit.search.simulation import simulate, synthetic_records
from tacit.search.stages import SearchResult, SearchStage, Transfer

__all__ = [
    "BoundedLoss",
    "RightAnswers",
    "Score",
    "SearchAudit",
    "SearchResult",
    "SearchStage",
    "SelectionPlan",
    "Transfer",
    "TrialPlan",
    "TrialSearch",
    "audit_search",
    "plan_selection",
    "plan_trials",
    "select_best",
    "simulate",
    "synthetic_records",
]
