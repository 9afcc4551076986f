"""A run as a table, as JSON, as a picture."""

from tacit.report.run_folder import save_run

__all__ = [
    "save_run",
]
