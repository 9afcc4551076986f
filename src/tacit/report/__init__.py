"""A run as a table, as JSON, as a picture."""

from tacit.report.run_folder import save_run
from tacit.report.table import summary_text

__all__ = ["save_run", "summary_text"]
