"""`python -m tacit` is `tacit`."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys

import pytest

ASKED = ["epsilon", "--noise-multiplier", "2", "--sampling-rate", "0.1", "--steps", "10"]


def test_the_module_is_the_command():
    found = subprocess.run(
        [sys.executable, "-m", "tacit", *ASKED, "--delta", "1e-5", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(found.stdout)["epsilon"] > 0


def test_a_mistake_ends_the_module_as_it_ends_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tacit", *ASKED, "--delta", "2"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("tacit", run_name="__main__")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "delta" in said
    assert "Traceback" not in said
