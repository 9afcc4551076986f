"""The runner: results survive a kill, errors are results, and nothing begins after its time."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from experiments import runner
from experiments.runner import Figure, Job, Paper, Selection


@dataclass(frozen=True)
class Setting:
    rate: float = 1.0


RAN: list[tuple[str, int]] = []


def work(job: Job) -> dict:
    RAN.append((job.name, job.seed))
    if job.setting.rate < 0:
        raise RuntimeError("out of memory")
    return {"accuracy": job.setting.rate / 10, "epsilon": math.inf}


def draw(report: dict, path: Path) -> None:
    path.write_text(report["title"])


SETTINGS = {"a": Setting(), "ab": Setting(2.0), "c": Setting(-1.0)}
FIGURES = {"1": Figure("Figure 1", SETTINGS), "2": Figure("Figure 2", {"a": Setting(5.0)})}
EVERYTHING = (Selection("2", (0, 1)), Selection("1", (0,), ("ab",), {"rate": 7.0}))
PAPER = Paper("Paper", FIGURES, work, lambda s: replace(s, rate=3.0), draw, EVERYTHING)


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    RAN.clear()


def main(*arguments: str) -> dict:
    return runner.main(PAPER, [*arguments, "--device", "cpu"])


def test_a_second_call_runs_what_is_missing(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path)]
    first = main("1", *out)["1"]
    assert list(first["settings"]) == ["a", "ab"]  # the third failed
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 3
    assert (tmp_path / "figure_1.png").read_text() == "Figure 1"
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"name": "a')  # killed while it wrote
    RAN.clear()
    again = main("1", "--seeds", "0", "1", *out)["1"]
    assert sorted(RAN) == [("a", 1), ("ab", 1), ("c", 0), ("c", 1)]
    assert [run["seed"] for run in again["settings"]["ab"]["runs"]] == [0, 1]
    assert json.loads((tmp_path / "figure_1.json").read_text()) == again
    RAN.clear()
    assert main("1", "--only", "a", "--seeds", "0", "1", *out)["1"]["settings"] == again["settings"]
    assert not RAN


def test_small_and_changed_runs_are_apart_from_the_others(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path)]
    whole, small = main("1", *out)["1"], main("1", "--small", *out)["1"]
    assert whole["settings"]["a"]["mean"] == 0.1
    assert small["settings"]["a"]["mean"] == 0.3
    changed = main("1", "--set", "rate=4", "--only", "ab", *out)["1"]["settings"]
    assert changed["ab"]["mean"] == 0.2
    assert changed["ab, rate = 4"]["mean"] == 0.4


def test_all_runs_the_selections_in_their_order() -> None:
    main("all")
    assert RAN == [("a", 0), ("a", 1), ("ab, rate = 7.0", 0)]
    assert list(runner.matching(SETTINGS, ["a"])) == ["a"]  # a whole name is not a part of another
    assert list(runner.matching(SETTINGS, ["b", "c"])) == ["ab", "c"]


def test_all_takes_no_selection_of_its_own(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main("all", "--only", "a")
    assert "--only and --set go with figures" in capsys.readouterr().err


def test_pictures_are_drawn_again(tmp_path: Path) -> None:
    main("2", "--out", str(tmp_path))
    picture = tmp_path / "figure_2.png"
    picture.unlink()
    RAN.clear()
    assert list(main("--plot-only", str(tmp_path))) == ["2"]
    assert picture.exists()
    assert not RAN


def test_the_list_names_figures_and_settings(capsys: pytest.CaptureFixture) -> None:
    main("--list")
    assert "Figure 2 (1 settings)" in capsys.readouterr().out
    main("1", "--list")
    assert "- ab" in capsys.readouterr().out
    assert not RAN


def results(jobs: Sequence[Job], workers: int, ends: float = math.inf) -> list[tuple[Job, dict]]:
    return list(runner.each_result(work, runner.in_groups(list(jobs), PAPER.group), workers, ends))


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_is_a_result_and_the_others_run(workers: int) -> None:
    jobs = [Job("1", name, setting, 0) for name, setting in SETTINGS.items()]
    found = {job.name: result for job, result in results(jobs, workers)}
    assert "out of memory" in found["c"]["error"]
    assert found["ab"]["accuracy"] == 0.2
    assert results(jobs, workers, time.perf_counter()) == []


@pytest.mark.parametrize(("workers", "expected"), [(1, 1), (2, 2), (3, 2)])
def test_a_worker_keeps_to_its_group(workers: int, expected: int) -> None:
    jobs = [Job(figure, "a", Setting(), seed) for seed in range(9) for figure in "12"]
    next_job = runner.in_groups(jobs, lambda job: job.figure)
    first, later = ([next_job(i) for i in range(workers)] for _ in range(2))
    assert [job.figure for job in first] == [job.figure for job in later]
    assert len({job.figure for job in first}) == expected
