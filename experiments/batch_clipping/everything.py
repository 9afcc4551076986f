"""All figures in order of importance, each result written as soon as it is there.

A second call goes on where the first was stopped: what is in the folder is not run again. Few
processes on one GPU are faster than many, which only take turns.

    python experiments/batch_clipping/everything.py --workers 3 --seconds 500 --out results/
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import figure
import torch
from runs import Setting, run

from tacit.report.run_folder import environment, to_json


@dataclass(frozen=True)
class Job:
    """One run of one figure, or of another group; `reduced` to fewer epochs than the figure has."""

    group: str
    name: str
    setting: Setting
    seed: int
    reduced: bool = False

    @property
    def file(self) -> str:
        plain = re.sub(r"[^a-z0-9.]+", "-", self.name.lower()).strip("-")
        scale = f"__{self.setting.epochs:g}-epochs" if self.reduced else ""
        return f"{self.group}__{plain}__{self.seed}{scale}.json"


def jobs_of(
    number: int, seeds: Sequence[int], epochs: float | None = None, only: Sequence[str] = ()
) -> list[Job]:
    settings = importlib.import_module(f"figure_{number}").SETTINGS
    wanted = {n: s for n, s in settings.items() if not only or n in only}
    assert not set(only) - set(wanted), f"figure {number} has no {set(only) - set(wanted)}"
    if epochs is not None:
        wanted = {n: replace(s, epochs=epochs) for n, s in wanted.items()}
    reduced = epochs is not None
    return [
        Job(f"figure_{number}", name, setting, seed, reduced)
        for seed in seeds
        for name, setting in wanted.items()
    ]


def in_order() -> list[Job]:
    """What the paper's text names, whole; then every other figure at a reduced scale."""
    layerwise = ("BC, enhanced, C = 0.095", "BC, enhanced, C = 0.0095")
    full = ("(a) full gradient, sigma",)
    slower = ("BC, enhanced, C = 0.095, slower decay",)
    original = ("BC, original (C_h = e_h)",)
    individual = ("IC, enhanced, C = 0.095",)
    named = [
        *jobs_of(4, [0], only=layerwise),
        *jobs_of(18, [0], only=full),
        *jobs_of(4, [0], only=slower),
        *jobs_of(14, [0]),
        *jobs_of(4, [1], only=layerwise[:1]),
        *jobs_of(18, [1], only=full),
        *jobs_of(14, [1, 2]),
        *jobs_of(12, [0, 1, 2], only=("(a) m = 64", "(b) sigma = 1.5", "(b) sigma = 0.5")),
        *jobs_of(4, [1, 2], only=slower),
        *jobs_of(4, [0, 1, 2], only=original),
        *jobs_of(4, [2], only=layerwise[:1]),
        *jobs_of(18, [2], only=full),
        *jobs_of(4, [0, 1, 2], only=individual),
    ]
    reduced = [
        *jobs_of(18, [0], 10, ("(b) full gradient, sigma/sqrt(62)", "factors, sigma/sqrt(62)")),
        *jobs_of(4, [0], 10, original + individual),
        *(job for number in (6, 7) for job in jobs_of(number, [0], 5)),
        *(job for number in (5, 3) for job in jobs_of(number, [0], 3)),
        *(job for number in (9, 10, 11) for job in jobs_of(number, [0], 5)),
        *jobs_of(12, [0], 5),
        *jobs_of(16, [0], 3),
        *jobs_of(15, [0], 2),
        *jobs_of(17, [0], 1),
        *(job for number in (2, 8, 13, 1) for job in jobs_of(number, [0], 4)),
    ]
    return [*named, *reduced]


def done_by(job: Job, folder: Path, device: str, limit: int | None) -> str:
    target = folder / job.file
    found = run(job.setting, job.seed, device, 5, limit)
    whole = {"group": job.group, "name": job.name, "setting": asdict(job.setting), **found}
    temporary = target.with_suffix(".tmp")
    temporary.write_text(to_json(whole) + "\n", encoding="utf-8")
    temporary.replace(target)
    if device != "cpu":
        torch.cuda.empty_cache()
    return f"{job.file}: {100 * found['accuracy']:.2f}% in {found['seconds']:.0f} s"


def collected(folder: Path) -> dict[str, dict]:
    """One table a figure, of all runs in the folder."""
    tables: dict[str, dict] = {}
    for file in sorted(folder.glob("*__*.json")):
        one = json.loads(file.read_text(encoding="utf-8"))
        title = one["group"].replace("_", " ").capitalize()
        table = tables.setdefault(one["group"], {"title": title, "settings": {}})
        # A setting at a reduced scale is not averaged with the whole.
        name = f"{one['name']}, {one['setting']['epochs']:g} epochs"
        row = table["settings"].setdefault(name, {"setting": one["setting"], "runs": []})
        row["runs"].append({k: v for k, v in one.items() if k not in ("group", "name", "setting")})
    for table in tables.values():
        for row in table["settings"].values():
            row |= figure.summary(row["runs"])
    return tables


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start none after")
    parser.add_argument("--small", action="store_true", help="640 records, two epochs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def run_all(jobs: Sequence[Job], asked: argparse.Namespace) -> dict[str, dict]:
    """Those whose results are not in the folder yet; then tables of all that are."""
    asked.out.mkdir(parents=True, exist_ok=True)
    limit = None
    if asked.small:
        limit = figure.SMALL["limit"]
        jobs = [replace(job, setting=figure.small(job.setting)) for job in jobs]
    todo = [job for job in jobs if not (asked.out / job.file).exists()]
    started = time.monotonic()
    work = [(job, asked.out, asked.device, limit, started + asked.seconds) for job in todo]
    if asked.workers > 1:
        with multiprocessing.get_context("spawn").Pool(asked.workers) as pool:
            for line in pool.imap_unordered(_work, work):
                print(line, flush=True)
    else:
        for one in work:
            print(_work(one), flush=True)
    tables = collected(asked.out)
    for group, table in sorted(tables.items()):
        whole = {**table, "environment": environment()}
        (asked.out / f"{group}.json").write_text(to_json(whole) + "\n", encoding="utf-8")
        print(figure.table(table))
    return tables


def main(arguments: Sequence[str] | None = None) -> dict[str, dict]:
    parser = options()
    parser.add_argument("--figures", type=int, nargs="+", default=None)
    asked = parser.parse_args(arguments)
    wanted = None if asked.figures is None else {f"figure_{n}" for n in asked.figures}
    return run_all([j for j in in_order() if wanted is None or j.group in wanted], asked)


def _work(work: tuple) -> str:
    job, folder, device, limit, until = work
    if time.monotonic() > until:
        return f"{job.file}: not started, the time is up"
    try:
        return done_by(job, folder, device, limit)
    except Exception as error:
        return f"{job.file}: failed, {type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
