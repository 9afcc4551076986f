"""What a finished run leaves behind, for people and for programs.

`save_run` writes a run into a folder: facts as JSON, weights, preprocessing, a picture of its
progress. `load_run` gives the model of a folder back, ready to predict and to export. `write_page`
makes a page of HTML from such a folder, and `compare` one of several. `statement` gives the privacy
statement of a folder, `check_statement` computes it again, and `model_card_block` and
`deployments_registry_entry` put it into other forms. Nothing here decides what is guaranteed: it
writes down what the run and its ledger state.
"""

from typing import TYPE_CHECKING

from tacit import imported_when_used

if TYPE_CHECKING:
    from tacit.report.comparison import compare
    from tacit.report.deployments import deployments_registry_entry
    from tacit.report.model_card import model_card_block
    from tacit.report.page import write_page
    from tacit.report.privacy_statement import PrivacyStatement
    from tacit.report.read_folder import load_run
    from tacit.report.run_folder import save_run
    from tacit.report.saved_facts import save_diagnostics, statement
    from tacit.report.saved_run import SavedRun
    from tacit.report.statement_check import StatementCheck, check_statement

__all__ = [
    "PrivacyStatement",
    "SavedRun",
    "StatementCheck",
    "check_statement",
    "compare",
    "deployments_registry_entry",
    "load_run",
    "model_card_block",
    "save_diagnostics",
    "save_run",
    "statement",
    "write_page",
]

_HOMES = {
    "PrivacyStatement": "privacy_statement",
    "SavedRun": "saved_run",
    "StatementCheck": "statement_check",
    "check_statement": "statement_check",
    "compare": "comparison",
    "deployments_registry_entry": "deployments",
    "load_run": "read_folder",
    "model_card_block": "model_card",
    "save_diagnostics": "saved_facts",
    "save_run": "run_folder",
    "statement": "saved_facts",
    "write_page": "page",
}
# Whoever predicts need not wait for what draws pages.
__getattr__ = imported_when_used(
    __name__, {name: f"{__name__}.{home}" for name, home in _HOMES.items()}
)
