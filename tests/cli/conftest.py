"""What tests of the command line share."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

# Their tests read pictures; drawing one takes half the time of a small run.
RENDERED = {"test_train_command", "test_certify_command", "test_trade_off_command"}


@pytest.fixture(autouse=True)
def pictures_are_not_rendered(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures are made from a run's facts as ever, and saved as empty files."""
    if request.module.__name__ not in RENDERED:
        monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: Path(path).touch())
