"""Set-up for the zoo: no warnings of the libraries."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Silence what the libraries warn about here; what Tacit warns about is tested elsewhere."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))
