"""Do runs on several ranks end within their budget when ranks are killed at random moments?

Runs of `torchrun -m tacit train` in which one rank after another is killed with SIGKILL, at random
moments and at random. `torchrun` starts all ranks again. Now and then the whole run is killed, and
resumed on another number of ranks. Every draw of noise is written to a file with its address. In
the end:

- no run hung: each kill was followed by a step, or by the end, within `PATIENCE` seconds;
- no step was drawn without a charge: a run has at most as many addresses as the ledger has events;
- all ranks drew the same addresses, as far as they came;
- epsilon is that of the plan, and the run is complete.

    python benchmarks/kill_ranks.py --kills 50 --out kill_ranks.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tacit.ledger import Ledger

PATIENCE = 240.0  # seconds without a step
PLUGIN = """
import os
from tacit.mechanism import PendingRelease

draw_into = PendingRelease.draw_into

def and_tell(self, model, *charge):
    with open(os.environ["DRAWS"], "a") as file:  # one short line is one write
        file.write(os.environ["RANK"] + " " + " ".join(map(str, charge)) + "\\n")
    draw_into(self, model, *charge)

PendingRelease.draw_into = and_tell
"""


def start(folder: Path, plugin: Path, ranks: int, steps: int, shard: bool) -> subprocess.Popen:
    again = ["--resume", str(folder)] if (folder / "resume.json").exists() else None
    given = again or [
        *("--dataset", "digits", "--epsilon", "3", "--delta", "1e-5", "--steps", str(steps)),
        *("--out", str(folder), "--overwrite", "--checkpoint-every", "5"),
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", "1000", "--monitor-interval", "0.2", "--standalone"]
    command += ["-m", "tacit", "--plugin", str(plugin), "train", *given, "--quiet"]
    command += ["--shard"] if shard else []
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def ranks_of(agent: int) -> list[int]:
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return [int(child) for child in children]


def draws(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def one_run(folder: Path, kills: int, chance: random.Random, steps: int, shard: bool) -> dict:
    folder.mkdir(parents=True)
    plugin, file = folder.parent / f"{folder.name}_plugin.py", folder.parent / f"{folder.name}.txt"
    plugin.write_text(PLUGIN)
    os.environ["DRAWS"] = str(file)
    ranks, killed = chance.choice([2, 3]), 0
    agent = start(folder, plugin, ranks, steps, shard)
    used = [ranks]
    while True:
        before, waited = len(draws(file)), time.monotonic()
        # Until there is a step to interrupt, or, one time in four, at once: while it starts.
        while agent.poll() is None and len(draws(file)) == before and chance.random() > 0.005:
            if time.monotonic() - waited > PATIENCE:
                os.killpg(agent.pid, signal.SIGKILL)
                return {"hung": True, "kills": killed, "ranks": used}
            time.sleep(0.05)
        if agent.poll() is not None:
            break
        if killed == kills:
            agent.wait(timeout=20 * PATIENCE)
            break
        time.sleep(chance.uniform(0.0, 0.6))
        alive = ranks_of(agent.pid)
        if not alive:
            continue
        if chance.random() < 0.2:  # all of it, as when a machine is lost
            os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()
            ranks = chance.choice([count for count in (1, 2, 3) if count != ranks])
            used.append(ranks)
            agent = start(folder, plugin, ranks, steps, shard)
        else:
            os.kill(chance.choice(alive), signal.SIGKILL)
        killed += 1
    return {"hung": False, "kills": killed, "ranks": used, "exit": agent.returncode} | facts(
        folder, file, steps
    )


def facts(folder: Path, file: Path, steps: int) -> dict:
    by_rank: dict[str, list[str]] = {}
    for line in draws(file):
        rank, _, address = line.partition(" ")
        by_rank.setdefault(rank, []).append(address)
    repeated = [r for r, addresses in by_rank.items() if len(set(addresses)) < len(addresses)]
    drawn = set().union(*by_rank.values())
    run = json.loads((folder / "run.json").read_text())
    with Ledger(folder / "ledger.sqlite") as ledger:
        ledger.verify()
        charged = ledger.statement().runs[-1].steps
    return {
        "complete": run["stopped"],
        "epsilon": run["epsilon"],
        "accuracy": run["accuracy"],
        "steps": run["steps"],
        "charged": charged,
        "drawn": len(drawn),
        "drawn twice by a rank": repeated,
        "within the charge": len(drawn) <= charged <= steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--kills-per-run", type=int, default=10)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    chance, rows, left = random.Random(args.seed), [], args.kills
    folder = Path(tempfile.mkdtemp())
    while left > 0:
        kills = min(left, args.kills_per_run)
        shard = len(rows) % 2 == 1
        row = one_run(folder / f"run{len(rows)}", kills, chance, args.steps, shard)
        rows.append(row | {"shard": shard})
        print(rows[-1], flush=True)
        left -= max(1, row["kills"])
        if args.out:
            args.out.write_text(json.dumps({"arguments": vars(args) | {"out": None}, "runs": rows}))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
