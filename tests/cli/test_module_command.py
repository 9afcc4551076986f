"""`python -m tacit` is `tacit`."""

from __future__ import annotations

import json
import subprocess
import sys

ASKED = ["epsilon", "--noise-multiplier", "2", "--sampling-rate", "0.1", "--steps", "10"]


def test_the_module_is_the_command():
    found = subprocess.run(
        [sys.executable, "-m", "tacit", *ASKED, "--delta", "1e-5", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(found.stdout)["epsilon"] > 0
    wrong = subprocess.run(
        [sys.executable, "-m", "tacit", *ASKED, "--delta", "2"], capture_output=True, text=True
    )
    assert wrong.returncode == 1
    assert "delta" in wrong.stderr
    assert "Traceback" not in wrong.stderr
