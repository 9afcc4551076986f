"""Whatever a file holds: no traceback, no hang, nothing half-written, and the right exit code."""

from __future__ import annotations

import json
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from malformed import KINDS, QUICK, Good

from tacit.cli import MISTAKE, main

SECONDS = 30  # for one case, on a machine that is busy


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Good:
    folder = tmp_path_factory.mktemp("good")
    rng = np.random.default_rng(0)
    table = np.column_stack([rng.random((40, 2)), rng.integers(0, 2, 40)])
    lines = ["a,b,y", *(f"{a:.3f},{b:.3f},{int(y)}" for a, b, y in table)]
    (folder / "table.csv").write_text("\n".join(lines), encoding="utf-8")
    np.savez(folder / "table.npz", X=table[:, :2].astype("float32"), y=table[:, 2].astype(int))
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    columns = {"a": table[:, 0], "b": table[:, 1], "y": table[:, 2].astype(int)}
    pyarrow.parquet.write_table(pa.table(columns), folder / "table.parquet")
    (folder / "settings.toml").write_text(
        '[data]\ndataset = "digits"\n[privacy]\nepsilon = 3.0\ndelta = 1e-5\n[model]\n'
        'loss = "cross-entropy"\n[clipping]\nmax_norm = 0.5\n[training]\nbatch_size = 64\n'
        'lr = 0.5\nmomentum = 0.9\noptimizer = "sgd"\nseed = 1\n',
        encoding="utf-8",
    )
    told = ["--query", "clipless", "--out", str(folder / "run"), *QUICK]
    main_quietly(["train", *told])
    main_quietly(["ledger", "create", str(folder / "book"), "--epsilon", "50", "--delta", "1e-5"])
    main_quietly(["train", "--ledger", str(folder / "book"), "--out", str(folder / "r"), *QUICK])
    return Good(
        folder / "run",
        folder / "book",
        folder / "table.csv",
        folder / "table.parquet",
        folder / "table.npz",
        folder / "settings.toml",
    )


def main_quietly(arguments: list[str]) -> None:
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()):
        assert outcome_of(arguments) == 0


def outcome_of(arguments: list[str]) -> int:
    """The exit code; `main` returns nothing where all went well without asking to exit."""
    try:
        main(arguments)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    return 0


class Hung(BaseException):
    """A case took too long."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    if not hasattr(signal, "SIGALRM"):
        yield
        return

    def stop(*_: object) -> None:
        raise Hung(f"{seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def contents(folder: Path) -> dict[str, bytes]:
    files = (f for f in folder.rglob("*") if f.is_file())
    # SQLite makes and removes these beside a database that it reads.
    return {str(f): f.read_bytes() for f in files if not f.name.endswith(("-wal", "-shm"))}


def complaint(
    name: str, number: int, good: Good, folder: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[str | None, Counter[int]]:
    """What is wrong with how one case ended, if anything; and the exit codes of its commands."""
    folder.mkdir()
    codes: Counter[int] = Counter()
    for arguments in KINDS[name](random.Random(f"{name} {number}"), good, folder):
        before, new = contents(folder), folder / "new"
        capsys.readouterr()
        try:
            with limited(SECONDS):
                code = outcome_of(arguments)
        except BaseException:
            return f"{arguments}: {traceback.format_exc()}", codes
        said = capsys.readouterr()
        codes[code] += 1
        text = f"{arguments} ended with {code}: {said.err[-600:]}"
        doctor = arguments[0] == "doctor"
        if code not in ((0, 1) if doctor else (0, MISTAKE)):
            return text, codes
        if "Traceback" in said.err or "Traceback" in said.out:
            return text, codes
        if code and not doctor and not said.err.strip():
            return f"{text} (without a word)", codes
        if doctor or (code and not new.exists()):
            after = contents(folder)
            if after != before:
                differs = sorted(n for n in {*before, *after} if before.get(n) != after.get(n))
                return f"{text} (and changed {differs})", codes
        if code and new.exists():
            return f"{text} (and left {sorted(p.name for p in new.iterdir())})", codes
        if new.exists():
            assert json.loads((new / "run.json").read_text(encoding="utf-8"))
            return None, codes
    return None, codes


def run_cases(
    name: str, count: int, good: Good, folder: Path, capsys: pytest.CaptureFixture[str]
) -> Counter[int]:
    codes: Counter[int] = Counter()
    wrong = []
    for number in range(count):
        found, ended = complaint(name, number, good, folder / f"{name}-{number}", capsys)
        codes += ended
        if found is not None:
            wrong.append(f"case {number}: {found}")
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong[:20])
    return codes


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # a path in a damaged file may be relative
    monkeypatch.delenv("TACIT_DEBUG", raising=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
def test_a_malformed_file(
    name: str, good: Good, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = run_cases(name, 25, good, tmp_path, capsys)
    assert codes[MISTAKE] + codes[1] > 0, "not one of the files was malformed"


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
def test_many_malformed_files(
    name: str, good: Good, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """10,000 cases over all kinds."""
    started = time.monotonic()
    codes = run_cases(name, -(-10_000 // len(KINDS)), good, tmp_path, capsys)
    with capsys.disabled():
        print(f"\n{name}: exit codes {dict(codes)}, {time.monotonic() - started:.0f} s")
