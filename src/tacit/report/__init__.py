"""What a finished run leaves behind, for people and for programs.

`save_run` writes a run into a folder: facts as JSON, weights, preprocessing, a picture of its
progress. `load_run` gives the model of a folder back, ready to predict and to export. `write_page`
makes a page of HTML from such a folder, and `compare` one of several. Nothing here computes a
guarantee: it writes down what the run and its ledger state.
"""

from typing import TYPE_CHECKING

from tacit import imported_when_used

if TYPE_CHECKING:
    from tacit.report.comparison import compare
    from tacit.report.page import write_page
    from tacit.report.read_folder import load_run
    from tacit.report.run_folder import save_run
    from tacit.report.saved_facts import save_diagnostics
    from tacit.report.saved_run import SavedRun

__all__ = ["SavedRun", "compare", "load_run", "save_diagnostics", "save_run", "write_page"]

_HOMES = {
    "SavedRun": "saved_run",
    "compare": "comparison",
    "load_run": "read_folder",
    "save_diagnostics": "saved_facts",
    "save_run": "run_folder",
    "write_page": "page",
}
# Whoever predicts need not wait for what draws pages.
__getattr__ = imported_when_used(
    __name__, {name: f"{__name__}.{home}" for name, home in _HOMES.items()}
)
