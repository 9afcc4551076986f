"""What a finished run leaves behind, for people and for programs.

`run_folder` writes a run into a folder: facts as JSON, weights, preprocessing, a picture of its
progress. Nothing here computes a guarantee: it writes down what the run and its ledger state.
"""

from tacit.report.run_folder import save_run

__all__ = ["save_run"]
