"""`torchrun -m tacit train`: one folder, one ledger, and ranks that are killed and start again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tacit.cli import app
from tacit.cli.launch import ended_meanwhile
from tacit.ledger import Ledger

SETTINGS = ["--dataset", "digits", "--epsilon", "3", "--delta", "1e-5", "--steps", "12", "--quiet"]


def start(ranks: int, *arguments: str, restarts: int = 0) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    command += ["--monitor-interval", "0.2"]
    return subprocess.Popen(
        [*command, "-m", "tacit", "train", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def ranks_of(agent: subprocess.Popen) -> list[int]:
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text()
    return [int(child) for child in children.split()]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="lists processes in /proc")
def test_a_rank_is_killed_and_the_run_goes_on(tmp_path):
    folder = tmp_path / "x"
    given = [*SETTINGS, "--checkpoint-every", "1", "--shard", "--out", str(folder)]
    agent = start(2, *given, restarts=9)
    waited = time.monotonic()
    while not (folder / "checkpoint.safetensors").exists():
        assert agent.poll() is None, agent.stdout.read()
        assert time.monotonic() - waited < 120
        time.sleep(0.05)
    os.kill(ranks_of(agent)[-1], signal.SIGKILL)
    printed, _ = agent.communicate(timeout=240)
    assert agent.returncode == 0, printed
    run = json.loads((folder / "run.json").read_text())
    assert printed.count("private training run") == 1  # one rank speaks
    assert run["stopped"] in ("plan complete", "budget")
    with Ledger(folder / "ledger.sqlite") as ledger:
        ledger.verify()
        assert run["steps"] <= ledger.statement().runs[-1].steps <= 12


def test_mistakes_are_said_once(tmp_path):
    printed, _ = start(2, *SETTINGS).communicate(timeout=120)
    assert printed.count("under torchrun the run needs a folder") == 1
    result = CliRunner().invoke(app, ["train", *SETTINGS, "--shard", "--out", str(tmp_path / "y")])
    assert "this is one process" in str(result.exception)


def test_a_run_that_ended_is_not_begun_again(tmp_path, monkeypatch):
    (tmp_path / "run.json").write_text("{}")
    assert not ended_meanwhile(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert ended_meanwhile(tmp_path)
    (tmp_path / "resume.json").write_text("{}")
    assert not ended_meanwhile(tmp_path)
