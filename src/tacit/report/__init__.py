"""A finished run as a folder of files: facts, weights, preprocessing and a picture."""

from tacit.report.run_folder import save_run

__all__ = [
    "save_run",
]
