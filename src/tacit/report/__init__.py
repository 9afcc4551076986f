"""What a finished run leaves behind, for people and for programs.

`run_folder` writes a run into a folder: facts as JSON, weights, preprocessing, a picture of its
progress. `write_page` makes a page of HTML from such a folder, and `compare` one of several.
Nothing here computes a guarantee: it writes down what the run and its ledger state.
"""

from tacit.report.comparison import compare
from tacit.report.page import write_page
from tacit.report.run_folder import save_run
from tacit.report.saved_facts import save_diagnostics

__all__ = ["compare", "save_diagnostics", "save_run", "write_page"]
