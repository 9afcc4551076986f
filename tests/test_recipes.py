"""The recipes of docs/architecture.md that are not whole programs, followed on the command line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import tacit

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SOURCE = Path(tacit.__file__).parent


def section(title: str) -> str:
    (found,) = re.findall(rf"^### {title}\n(.*?)(?=^### |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return found


def run(*arguments: str, source: Path, folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(source)}
    command = [sys.executable, "-m", "tacit", *arguments]
    done = subprocess.run(
        command, env=environment, cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout


SHORT = [
    *("--query", "clip", "--epochs", "1", "--batch-size", "128"),
    *("--quiet", "--json", "--out", "run"),
]


def test_a_dataset_is_one_function_and_trains_from_the_command_line(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", section("A dataset"), re.DOTALL)
    (tmp_path / "moons.py").write_text("import torch\nimport tacit\n\n" + code)
    command = ["--plugin", "moons.py", "train", "--dataset", "two-moons", "--delta", "1e-3", *SHORT]
    facts = json.loads(run(*command, source=SOURCE.parent, folder=tmp_path))
    assert facts["config"]["used"]["dataset"] == "two-moons"
    assert facts["epsilon"] <= 3


def test_an_option_is_one_declaration_and_one_use(tmp_path: Path) -> None:
    copy = tmp_path / "src" / "tacit"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    text = section("An option of `tacit train`")
    (declared,) = re.findall(r"^    weight_decay.*$", text, re.MULTILINE)
    settings, build = copy / "cli" / "settings.py", copy / "cli" / "build_model.py"

    def change(file: Path, before: str, after: str) -> None:
        code = file.read_text(encoding="utf-8")
        assert code.count(before) == 1
        file.write_text(code.replace(before, after), encoding="utf-8")

    head = "class TrainingSettings(StepOptions):\n"
    change(settings, head, f"{head}{declared}\n")
    change(build, "momentum=momentum)", "momentum=momentum, weight_decay=t.weight_decay)")

    page = run("train", "--help", source=copy.parent, folder=tmp_path)
    assert "--weight-decay" in page
    in_one_line = " ".join(page.replace("│", " ").split())
    assert "Weight decay of the optimizer." in in_one_line
    command = ["train", "--weight-decay", "0.25", "--delta", "1e-4", *SHORT]
    facts = json.loads(run(*command, source=copy.parent, folder=tmp_path))
    assert facts["config"]["settings"]["training"]["weight_decay"] == 0.25
