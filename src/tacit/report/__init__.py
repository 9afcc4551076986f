"""What a finished run leaves behind, for people and for programs.

`save_run` writes a run into a folder: facts as JSON, weights, preprocessing, a picture of its
progress. `load_run` gives the model of a folder back, ready to predict and to export. `write_page`
makes a page of HTML from such a folder, and `compare` one of several. Nothing here computes a
guarantee: it writes down what the run and its ledger state.
"""

from tacit.report.comparison import compare
from tacit.report.page import write_page
from tacit.report.read_folder import load_run
from tacit.report.run_folder import save_run
from tacit.report.saved_facts import save_diagnostics
from tacit.report.saved_run import SavedRun

__all__ = ["SavedRun", "compare", "load_run", "save_diagnostics", "save_run", "write_page"]
