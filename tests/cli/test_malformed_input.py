"""Whatever a file holds: no traceback, no hang, nothing half-written, and the right exit code.

The full run is 10,000 cases. It can be split: -k names kinds, and environment variables say which
cases of each kind are run, and where failures are written as they happen:

    TACIT_CASES=0:400 TACIT_FAILURES=failures.txt pytest -n0 -m full -k settings THIS_FILE
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import malformed_calls  # noqa: F401  (registers its kinds)
import malformed_commands  # noqa: F401
import pytest
from malformed import KINDS, QUICK, Call, Good, make_good

import tacit
from tacit.cli import MISTAKE, _is_mistake, main

SECONDS = 20.0  # of processor time for one action
MOST_SECONDS = 300.0  # by the clock, for what waits and computes nothing
LEAST_CASES = 10_000
RETURNED = "returned"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Good:
    return make_good(tmp_path_factory.mktemp("good"))


class Hung(BaseException):
    """A case took too long."""


@contextmanager
def limited() -> Iterator[None]:
    if not hasattr(signal, "setitimer"):
        yield
        return

    def stop(number: int, _: object) -> None:
        raise Hung(f"{SECONDS:g} s of processor time" if number == signal.SIGPROF else "the clock")

    timers = {signal.SIGPROF: signal.ITIMER_PROF, signal.SIGALRM: signal.ITIMER_REAL}
    before = {number: signal.signal(number, stop) for number in timers}
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    try:
        yield
    finally:
        for number, timer in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


def contents(folder: Path) -> dict[str, bytes]:
    files = (f for f in folder.rglob("*") if f.is_file())
    # SQLite makes and removes these beside a database that it reads.
    return {str(f): f.read_bytes() for f in files if not f.name.endswith(("-wal", "-shm"))}


def written(before: dict[str, bytes], folder: Path, but: str = "") -> list[str]:
    """The files that differ now, apart from the one called `but`."""
    after = contents(folder)
    names = sorted({*before, *after})
    return [n for n in names if before.get(n) != after.get(n) and Path(n).name != but]


def ended(arguments: list[str]) -> int:
    """The exit code; `main` returns nothing where all went well without asking to exit."""
    try:
        main(arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return 0


def command_complaint(arguments: list[str], folder: Path) -> tuple[str | None, str]:
    before, new = contents(folder), folder / "new"
    out, err = io.StringIO(), io.StringIO()
    with limited(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = ended(arguments)
    said, ending = err.getvalue(), f"exit {code}"
    doctor, resume = arguments[0] == "doctor", "--resume" in arguments
    text = f"ended with {code}: {said[-1500:]}"
    if code not in ((0, 1) if doctor else (0, MISTAKE)):
        return text, ending
    if "Traceback" in said or "Traceback" in out.getvalue():
        return text, ending
    if code and not doctor and not said.strip():
        return f"{text} (without a word)", ending
    if doctor or code:
        # A run that is resumed says so on its ledger before it is compared with the checkpoint.
        differs = written(before, folder, but="ledger.sqlite" if resume else "")
        if differs:
            return f"{text} (and changed {differs})", ending
    elif new.exists():
        assert json.loads((new / "run.json").read_text(encoding="utf-8"))
    return None, ending


def call_complaint(call: Call, folder: Path) -> tuple[str | None, str]:
    before = contents(folder)
    try:
        with limited():
            call.function()
    except (ValueError, TypeError, OSError, tacit.errors.TacitError) as error:
        text, ending = traceback.format_exc(), type(error).__name__
        if isinstance(error, OSError) and not call.odd:  # of a path that a caller gives
            return text, ending
        if _of_sklearn(error):
            return None, ending
        if not _is_mistake(error) and not (call.odd and isinstance(error, TypeError | OSError)):
            return f"{text}\n(raised by accident)", ending
        if not str(error).strip() or "\n" in str(error).strip():
            return f"{text}\n(not one or two sentences)", ending
        differs = written(before, folder, but="ledger.sqlite")
        return (f"{text}\n(and changed {differs})" if differs else None), ending
    return None, RETURNED


def _of_sklearn(error: BaseException) -> bool:
    """Checks of scikit-learn say in its own words what an estimator cannot take."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").startswith("sklearn."):
            return True
        trace = trace.tb_next
    return False


def complaints(name: str, number: int, good: Good, folder: Path) -> tuple[list[str], Counter[str]]:
    """What is wrong with how one case ended, if anything; and how its actions ended."""
    folder.mkdir()
    found: list[str] = []
    endings: Counter[str] = Counter()
    try:
        actions = KINDS[name](random.Random(f"{name} {number}"), good, folder)
    except Exception:
        return [f"{name} {number}: the generator failed\n{traceback.format_exc()}\n"], endings
    for action in actions:
        said = " ".join((action.words if isinstance(action, Call) else " ".join(action)).split())
        try:
            if isinstance(action, Call):
                wrong, ending = call_complaint(action, folder)
            else:
                wrong, ending = command_complaint(action, folder)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            wrong, ending = traceback.format_exc(), type(error).__name__
        endings[ending] += 1
        if wrong is not None:
            found.append(f"{name} {number}: {said}\n{wrong}\n")
            break
        if (folder / "new").exists():
            break
    return found, endings


def run_cases(name: str, cases: range, good: Good, folder: Path) -> Counter[str]:
    endings: Counter[str] = Counter()
    wrong: list[str] = []
    log = os.environ.get("TACIT_FAILURES")
    for number in cases:
        place = folder / f"{name}-{number}"
        found, how = complaints(name, number, good, place)
        endings += how
        wrong += found
        if log and found:
            with open(log, "a", encoding="utf-8") as file:
                file.write("\n".join(found))
        shutil.rmtree(place, ignore_errors=True)
    assert not wrong, f"{len(wrong)} of {len(cases)}:\n" + "\n".join(wrong[:20])
    return endings


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # a path in a damaged file may be relative
    monkeypatch.delenv("TACIT_DEBUG", raising=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
def test_malformed_input(name: str, good: Good, tmp_path: Path) -> None:
    endings = run_cases(name, range(10), good, tmp_path)
    assert any(how not in ("exit 0", RETURNED) for how in endings), "nothing was malformed"


@pytest.mark.parametrize(
    "option", ["noise-multiplier", "range-noise", "scale-noise", "statistics-noise"]
)
def test_infinite_noise_leaves_no_file(option: str, good: Good, tmp_path: Path) -> None:
    """It was refused in the first step, after ranges had been released and charged."""
    told = ["train", "--data", str(good.csv), "--target", "y", "--out", str(tmp_path / "new")]
    assert ended([*told, f"--{option}", "inf"]) == MISTAKE
    assert contents(tmp_path) == {}


def test_a_run_is_saved_though_its_pixels_have_no_certificate(tmp_path: Path) -> None:
    told = ["train", "--query", "clipless", "--unit-norm", "--out", str(tmp_path / "new"), *QUICK]
    assert ended(told) == 0
    facts = json.loads((tmp_path / "new" / "run.json").read_text(encoding="utf-8"))
    assert facts["certificate"] is None
    assert any("no certificate" in note for note in facts["notes"])
    assert not (tmp_path / "new" / "resume.json").exists()


def test_a_huge_number_of_classes_is_refused_at_once(good: Good) -> None:
    with pytest.raises(ValueError, match="classes is 9223372036854775808; give at most"):
        tacit.load_file(good.csv, "y", classes=2**63)


def test_a_ledger_is_no_descriptor_of_an_open_file() -> None:
    with pytest.raises(TypeError, match="not int"):
        tacit.Ledger(2)  # type: ignore[arg-type]


def test_a_schema_of_other_features_than_the_model(good: Good, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(good.table_run, run)
    schema = json.loads((run / "schema.json").read_text(encoding="utf-8"))
    schema["columns"][1]["categories"].append("Nice")
    (run / "schema.json").write_text(json.dumps(schema), encoding="utf-8")
    facts = json.loads((run / "run.json").read_text(encoding="utf-8"))
    digest = hashlib.sha256((run / "schema.json").read_bytes()).hexdigest()
    facts["model"]["files"]["schema.json"] = digest
    (run / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    with pytest.raises(ValueError, match="its schema has"):
        tacit.load_run(run)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("ledger", "head"), ["x"]),
        (("ledger", "attempt"), 10**30),
        (("parts", "moving average", "average", "weight"), 0.5),
        (("parts", "optimizer", "state", 0, "momentum_buffer"), 1),
    ],
)
def test_a_checkpoint_is_refused_before_a_step(
    place: tuple[Any, ...], value: Any, good: Good, tmp_path: Path
) -> None:
    from malformed_calls import small_folder, small_trainer

    from tacit.training.checkpoint import FILE
    from tacit.training.state_file import read_state, write_state

    shutil.copytree(small_folder(good), tmp_path / "small")
    state = read_state(tmp_path / "small" / FILE)
    inner = state
    for key in place[:-1]:
        inner = inner[key]
    assert place[-1] in inner
    inner[place[-1]] = value
    write_state(tmp_path / "small" / FILE, state)
    with pytest.raises(tacit.errors.CheckpointRefused):
        small_trainer(tmp_path / "small").fit(resume=tmp_path / "small")


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
def test_much_malformed_input(
    name: str, good: Good, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """10,000 cases over all kinds."""
    chosen = os.environ.get("TACIT_CASES", f"0:{-(-LEAST_CASES // len(KINDS))}")
    cases = range(*map(int, chosen.split(":")))
    started = time.process_time()
    endings = run_cases(name, cases, good, tmp_path)
    with capsys.disabled():
        seconds = time.process_time() - started
        print(f"\n{name} {chosen}: {dict(endings)}, {seconds:.0f} s of a core")
