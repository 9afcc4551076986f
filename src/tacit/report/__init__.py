"""A run as a table, as JSON, as a picture."""

from tacit.data.preprocessing import Preprocessing, load_preprocessing
from tacit.report.run_folder import save_run
from tacit.report.table import summary_text

__all__ = ["Preprocessing", "load_preprocessing", "save_run", "summary_text"]
