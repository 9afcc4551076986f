"""A run that is killed while it releases ranges, counts and scaling makes the same releases again.

A forked child runs `tacit train` and kills itself at one of the points between the secret's first
byte and its deletion. Before that it sends every released stage to its parent.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import tacit
from tacit.cli import app, build_data, main, run_directory
from tacit.data import load_preprocessing
from tacit.data.preprocessing import Preprocessing
from tacit.errors import BudgetExceeded
from tacit.ledger import Ledger, read_statement

SCHEMA = """\
format = 1
target = "ill"
[[columns]]
name = "age"
kind = "numeric"
range = [0, 100]
[[columns]]
name = "income"
kind = "numeric"
range = "release"
[[columns]]
name = "city"
kind = "categorical"
categories = ["Paris", "Rome"]
[[columns]]
name = "ill"
kind = "boolean"
"""
NOISE = ["--range-noise", "20", "--category-noise", "9", "--scale-noise", "20"]  # two are equal
FAST = ["--noise-multiplier", "8", "--steps", "3", "--batch-size", "100", "--quiet", "--json"]
CLAIMS = {"column ranges": 20.0, "category counts": 9.0, "scaling statistics": 20.0}
RELEASES = ("release_ranges", "release_category_counts", "release_statistics")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    r = np.random.default_rng(0)
    cities = r.choice(["Paris", "Rome", "Oslo"], size=300)
    rows = [
        f"{100 * r.random():.4f},{np.exp(10 + r.normal()):.2f},{city},{i % 2}"
        for i, city in enumerate(cities)
    ]
    (tmp_path / "own.csv").write_text("\n".join(["age,income,city,ill", *rows]) + "\n")
    (tmp_path / "schema.toml").write_text(SCHEMA)
    return tmp_path


def run(*arguments: object):
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


def begun(table: Path, *more: object) -> list[object]:
    files = ["--data", table / "own.csv", "--schema", table / "schema.toml"]
    return [*files, "--out", table / "run", *NOISE, *FAST, *more]


@contextmanager
def points(reached: Callable[[str], None]) -> Iterator[None]:
    """Calls `reached` with the name of each point that a run passes."""
    with pytest.MonkeyPatch.context() as patch:

        def watch(owner: Any, name: str, told: Callable[..., str]) -> None:
            real = getattr(owner, name)

            def watched(*args: Any, **kwargs: Any) -> Any:
                reached(f"before {told(*args)}")
                value = real(*args, **kwargs)
                reached(f"after {told(*args)}")
                return value

            patch.setattr(owner, name, watched)

        watch(run_directory, "write_release_key", lambda folder: "the key")
        watch(os, "replace", lambda old, new: f"renaming to {Path(new).name}")
        watch(Ledger, "claim", lambda ledger, event, what, key: f"the claim of {what}")
        for name in RELEASES:
            watch(build_data, name, lambda *_, name=name: name)
        watch(Preprocessing, "save", lambda *_: "saving")
        watch(run_directory, "delete_release_key", lambda folder: "deleting the key")
        yield


@contextmanager
def sent(send: Callable[[tuple[str, Any]], None]) -> Iterator[None]:
    """Calls `send` with each release's name and the stage that it made."""
    with pytest.MonkeyPatch.context() as patch:
        for name in RELEASES:
            real = getattr(build_data, name)

            def watched(*args: Any, real: Any = real, name: str = name, **kwargs: Any) -> Any:
                stage, event = real(*args, **kwargs)
                send((name, stage))
                return stage, event

            patch.setattr(build_data, name, watched)
        yield


def killed_at(point: str, *arguments: object) -> dict[str, Any]:
    """Run it in a child that kills itself at the point; return the stages that it had released."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:

        def die(name: str) -> None:
            if name == point:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            with sent(lambda stage: os.write(write, pickle.dumps(stage)) and None), points(die):
                result = run(*arguments)
                print("not killed:", result.output, repr(result.exception))
        finally:
            os._exit(1)
    os.close(write)
    found = {}
    with os.fdopen(read, "rb") as pipe:
        while pipe.peek(1):
            name, stage = pickle.load(pipe)
            found[name] = stage
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), (point, status)
    return found


def same(stage: Any, other: Any) -> bool:
    return all(
        torch.equal(value, vars(other)[name])
        if isinstance(value, torch.Tensor)
        else name == "origin" or value == vars(other)[name]
        for name, value in vars(stage).items()
    )


def claims_of(ledger: Path) -> list[tuple[str, float]]:
    """The rows of the ledger's log that are claims."""
    with closing(sqlite3.connect(ledger)) as db:
        rows = db.execute("SELECT body FROM log WHERE kind = 'claim' ORDER BY seq").fetchall()
    bodies = [json.loads(body) for (body,) in rows]
    return [(body["claim"], body["noise_multiplier"]) for body in bodies]


POINTS = [
    "before the key",
    "before renaming to release.key",
    "after renaming to release.key",
    *(f"{when} the claim of {what}" for what in CLAIMS for when in ("before", "after")),
    *(f"after {name}" for name in RELEASES),
    "before saving",
    "before renaming to preprocessing.json",
    "before deleting the key",
    "after deleting the key",
]


# With a seed some of the points are enough.
@pytest.mark.parametrize(
    ("point", "seed"), [*((point, None) for point in POINTS), *((p, 0) for p in POINTS[4::4])]
)
def test_every_kill_is_followed_by_the_same_releases(
    point: str, seed: int | None, table: Path
) -> None:
    folder, more = table / "run", [] if seed is None else ["--seed", seed]
    first = killed_at(point, *begun(table, *more))
    has_key = (folder / "release.key").exists()
    assert has_key == (point not in ("before the key", POINTS[1], POINTS[-1]))
    if has_key and os.name != "nt":
        assert stat.S_IMODE((folder / "release.key").stat().st_mode) == 0o600
    again: dict[str, Any] = {}
    with sent(lambda stage: again.update([stage])):
        result = run("--resume", folder, "--json", "--quiet")
    assert result.exit_code == 0, result.exception
    facts = json.loads(result.stdout)
    assert set(again) == (set() if "deleting" in point else set(RELEASES))
    stages = dict(zip(RELEASES, load_preprocessing(folder).stages[-3:], strict=True))
    assert all(same(stage, stages[name]) for name, stage in (first | again).items())
    assert all(same(stage, again.get(name, stage)) for name, stage in first.items())
    assert all(("seeded" in s.origin) == (seed is not None) for s in stages.values())
    assert claims_of(folder / "ledger.sqlite") == list(CLAIMS.items())
    (charged,) = read_statement(folder / "ledger.sqlite").runs
    assert (facts["steps"], facts["stopped"], charged.steps) == (3, "plan complete", 3)
    assert facts["plan"]["prelude"] == list(CLAIMS.values())
    left = [file.name for file in folder.iterdir() if "release" in file.name]
    assert not left
    assert not (folder / "resume.json").exists()


def test_the_epsilon_is_that_of_a_run_that_was_not_killed(table: Path) -> None:
    killed_at("after release_category_counts", *begun(table))
    resumed = json.loads(run("--resume", table / "run", "--json", "--quiet").stdout)
    whole = json.loads(run(*begun(table)[:4], "--out", table / "whole", *NOISE, *FAST).stdout)
    assert resumed["epsilon"] == whole["epsilon"]
    assert not list((table / "whole").glob("*release*"))


def test_several_kills_in_a_row_release_one_set_of_values(table: Path) -> None:
    given = begun(table)
    seen = [killed_at("after release_ranges", *given)]
    given = ["--resume", table / "run"]
    seen += [killed_at(f"after {name}", *given) for name in RELEASES[1:]]
    seen.append(killed_at("before deleting the key", *given))
    for found in seen:
        assert all(same(stage, seen[-1][name]) for name, stage in found.items())
    assert run(*given).exit_code == 0


def test_another_key_and_other_records_are_refused(table: Path) -> None:
    killed_at("after release_ranges", *begun(table, "--public-size", 250))
    folder, key = table / "run", table / "run" / "release.key"
    secret, text = key.read_text(), (table / "own.csv").read_text()
    key.write_text("0" * 64)
    result = run("--resume", folder)
    assert isinstance(result.exception, BudgetExceeded)
    assert "claimed this release with another key" in str(result.exception)
    key.write_text(secret[:10])
    assert "not as tacit train wrote it" in str(run("--resume", folder).exception)
    key.write_text(secret)
    changed = text.splitlines()
    changed[1:20] = [f"1{line}" for line in changed[1:20]]  # training records are among them
    (table / "own.csv").write_text("\n".join(changed) + "\n")
    result = run("--resume", folder)
    assert isinstance(result.exception, BudgetExceeded)
    assert "with the records, the device and the secret" in str(result.exception)
    assert claims_of(folder / "ledger.sqlite") == [("column ranges", 20.0)]
    (table / "own.csv").write_text(text)
    assert run("--resume", folder, "--quiet").exit_code == 0


def test_without_the_key_and_the_values_it_says_what_is_lost(
    table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed_at("after deleting the key", *begun(table))
    folder = table / "run"
    (folder / "preprocessing.json").unlink()
    with pytest.raises(SystemExit) as exited:
        main(["train", "--resume", str(folder)])
    assert exited.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: column ranges: the run was charged for a release that is lost, since "
        f"{folder} has neither preprocessing.json, which holds it, nor release.key, which could "
        "repeat it; restore one of them, or start another run"
    ]
    assert not (folder / "release.key").exists()


def test_another_run_under_the_name_is_refused_and_leaves_no_key(table: Path) -> None:
    shared = ["--ledger", table / "book.sqlite", "--run-name", "r"]
    killed_at("after release_ranges", *begun(table, *shared))
    copied = begun(table, *shared)
    copied[copied.index(table / "run")] = table / "other"
    result = run(*copied)
    assert isinstance(result.exception, BudgetExceeded)
    assert "column ranges: what the run was charged for" in str(result.exception)
    assert not list((table / "other").glob("*release*"))
    assert run("--resume", table / "run", "--quiet").exit_code == 0


def test_a_run_without_checkpoints_writes_no_key(table: Path) -> None:
    killed_at("before saving", *begun(table, "--checkpoint-every", 0))
    assert not list((table / "run").glob("*release*"))


def test_nobody_else_is_in_the_folder_while_it_releases(table: Path) -> None:
    seen: list[object] = []

    def reached(point: str) -> None:
        if point not in ("before the key", "after deleting the key"):
            return
        pid = os.fork()
        if pid == 0:
            result = run("--resume", table / "run")
            os._exit(7 if "another process is training" in str(result.exception) else 1)
        seen.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    with points(reached):
        assert run(*begun(table)).exit_code == 0
    assert seen == [7, 7]


def test_an_interrupted_release_leaves_a_run_that_is_resumed(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Preprocessing, "save", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        assert "disk full" in str(run(*begun(table)).exception)
    assert run("--resume", table / "run", "--quiet").exit_code == 0
    assert tacit.load_run(table / "run")
