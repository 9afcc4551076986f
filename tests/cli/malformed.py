"""Malformed inputs, made from a seed one case at a time: how they are damaged, and what is whole.

`malformed_commands` has kinds of files for the command line, `malformed_calls` for Python. To cover
another kind, write a function that takes (rng, good, folder), writes a damaged file into `folder`
and returns what is to be done with it, and decorate it with `@kind`. `good` holds files that are
whole, one of each, made once.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import io
import json
import math
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Call(NamedTuple):
    """A call in Python; `words` say which, for whoever reads a failure."""

    words: str
    function: Callable[[], object]
    odd: bool = False  # an argument may be of a wrong type, and Python's own TypeError says so


# A command line, or a call in Python.
Action = list[str] | Call
Make = Callable[[random.Random, "Good", Path], list[Action]]
KINDS: dict[str, Make] = {}


def kind(make: Make) -> Make:
    KINDS[make.__name__] = make
    return make


# ---- what is whole -------------------------------------------------------------------------------

QUICK = ["--steps", "1", "--noise-multiplier", "9", "--model", "linear", "--quiet", "--json"]
SCHEMA = """format = 1
target = "ill"
[[columns]]
name = "age"
kind = "numeric"
range = [0, 100]
[[columns]]
name = "city"
kind = "categorical"
categories = ["Rome", "Oslo", "Bonn"]
[[columns]]
name = "smokes"
kind = "boolean"
[[columns]]
name = "seen"
kind = "date"
range = ["2020-01-01", "2021-01-01"]
[[columns]]
name = "ill"
kind = "boolean"
"""


@dataclass(frozen=True)
class Good:
    """Folders of runs, a ledger with budget left, tables, a schema and settings, all whole."""

    folder: Path

    def __getattr__(self, name: str) -> Path:
        return self.folder / FILES[name]


FILES = {
    "run": "run",  # clipless, on the digits
    "table_run": "table_run",  # with a schema
    "unfinished": "unfinished",  # killed, with its checkpoint
    "ledger": "book",
    "csv": "table.csv",
    "mixed": "mixed.csv",
    "parquet": "table.parquet",
    "npz": "table.npz",
    "schema": "schema.toml",
    "toml": "settings.toml",
}


def make_good(folder: Path) -> Good:
    import pyarrow as pa
    import pyarrow.parquet

    good = Good(folder)
    rng = np.random.default_rng(0)
    table = np.column_stack([rng.random((40, 2)), rng.integers(0, 2, 40)])
    lines = ["a,b,y", *(f"{a:.3f},{b:.3f},{int(y)}" for a, b, y in table)]
    good.csv.write_text("\n".join(lines), encoding="utf-8")
    np.savez(good.npz, X=table[:, :2].astype("float32"), y=table[:, 2].astype(int))
    columns = {"a": table[:, 0], "b": table[:, 1], "y": table[:, 2].astype(int)}
    pyarrow.parquet.write_table(pa.table(columns), good.parquet)
    rows = ["age;city;smokes;seen;ill"]
    for i, (a, b, y) in enumerate(table):
        day = datetime.date(2020, 1, 1) + datetime.timedelta(int(300 * a))
        city = ("Rome", "Oslo", "Bonn")[i % 3]
        rows.append(f"{100 * b:.0f};{city};{'yes' if a > 0.5 else 'no'};{day};{int(y)}")
    good.mixed.write_text("\n".join(rows), encoding="utf-8")
    good.schema.write_text(SCHEMA, encoding="utf-8")
    good.toml.write_text(
        '[data]\ndataset = "digits"\n[privacy]\nepsilon = 3.0\ndelta = 1e-5\n[model]\n'
        'loss = "cross-entropy"\n[clipping]\nmax_norm = 0.5\n[training]\nbatch_size = 64\n'
        'lr = 0.5\nmomentum = 0.9\noptimizer = "sgd"\nseed = 1\n',
        encoding="utf-8",
    )
    book = str(good.ledger)
    _told(["train", "--query", "clipless", "--out", str(good.run), *QUICK])
    _told(["ledger", "create", book, "--epsilon", "50", "--delta", "1e-5"])
    _told(["train", "--ledger", book, "--out", str(folder / "r"), *QUICK])
    mixed = ["--data", str(good.mixed), "--schema", str(good.schema), "--delta", "1e-3"]
    _told(["train", *mixed, "--out", str(good.table_run), *QUICK])
    more = ["--out", str(good.unfinished), *QUICK, "--steps", "6", "--checkpoint-every", "1"]
    killed_in_step(4, lambda: _told(["train", *mixed, *more]))
    return good


def _told(arguments: list[str]) -> None:
    from tacit.cli import app

    with contextlib.redirect_stdout(io.StringIO()):
        app(arguments, standalone_mode=False)


class _Killed(BaseException):
    """Ends a process in the middle of a step."""


def killed_in_step(step: int, run: Callable[[], object]) -> None:
    """Run what dies in the middle of a step, and leaves what a process leaves."""
    import torch

    take, left = torch.optim.SGD.step, [step]

    def counted(self: Any, *args: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise _Killed
        return take(self, *args)

    torch.optim.SGD.step = counted  # type: ignore[method-assign]
    try:
        run()
    except _Killed:
        return
    finally:
        torch.optim.SGD.step = take  # type: ignore[method-assign]
    raise AssertionError("the run was to be killed")


# ---- how something is damaged --------------------------------------------------------------------

TOKENS = [
    *("", " ", "nan", "inf", "-inf", "1e999", "-1", "0", "1e-320", "9" * 400, "None", "true", "ä€"),
    *("\x00", '"', "'", ",,", "\r\n\n", "[[[[", "{" * 50, "\ufeff", "../../x", "=1+1", "1_000"),
    *("𝟙", "٣", "\u202e", "a" * 5000),
]
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 10**30, -(10**30), 1e308, 1e-308, math.nan, math.inf, 0.5),
    *("", "x", "nan", "../x", "\x00", "ä" * 300, [], [[]], {}, {"a": 1}, [1, 2, 3], [None], ["x"]),
    *([[[[[]]]]], {"": ""}, "digits", "clip", "sgd", [0.0, 0.0], [1.0, -1.0], 2**63, 2**64),
]


def damaged(rng: random.Random, content: bytes) -> bytes:
    """Bytes that were flipped, cut, repeated, spliced or replaced."""
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at, end = sorted(rng.randrange(len(content) + 1) for _ in range(2))
        choice = rng.randrange(9)
        if choice == 0 and content:
            place = rng.randrange(len(content))
            content = content[:place] + rng.randbytes(1) + content[place + 1 :]
        elif choice == 1:
            content = content[:at]
        elif choice == 2:
            content = content[:at] + content[end:]
        elif choice == 3:
            content = content[:at] + rng.choice(TOKENS).encode() + content[at:]
        elif choice == 4:
            content = content[:end] + content[at:]
        elif choice == 5:
            content = content[:at] + rng.randbytes(rng.randrange(64)) + content[end:]
        elif choice == 6:
            content = rng.choice((b"", b"\n", b"\0" * 100, rng.randbytes(200), content[::-1]))
        elif choice == 7 and len(content) > 8:
            place = rng.randrange(min(len(content) - 8, 200))
            number = struct.pack("<q", rng.choice((-1, 0, 2**62, 2**31, 255)))
            content = content[:place] + number + content[place + 8 :]
        else:
            content = content.replace(rng.choice((b"0", b"1", b":", b",", b"e")), b"", 3)
    return content


def changed(rng: random.Random, value: Any) -> Any:
    """A JSON value in which something is replaced, deleted or added."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        choice = rng.random()
        if choice < 0.15:
            return {k: v for k, v in value.items() if k != key}
        if choice < 0.25:
            return {**value, rng.choice(TOKENS): rng.choice(VALUES)}
        return {**value, key: changed(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.6:
        at = rng.randrange(len(value))
        return [*value[:at], changed(rng, value[at]), *value[at + 1 :]]
    return rng.choice(VALUES)


def in_toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {in_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(in_toml, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value)


# ---- files that commands and calls share ---------------------------------------------------------


def write_schema(rng: random.Random, good: Good, file: Path) -> None:
    import tomllib

    whole = good.schema.read_bytes()
    if rng.random() < 0.4:
        file.write_bytes(damaged(rng, whole))
        return
    stored = changed_schema(rng, tomllib.loads(whole.decode()))
    if not isinstance(stored, dict):
        stored = {"columns": stored}
    lines = [f"{json.dumps(k)} = {in_toml(v)}" for k, v in stored.items()]
    file.write_text("\n".join(lines), encoding="utf-8")


def changed_schema(rng: random.Random, stored: dict[str, Any]) -> Any:
    """Mostly another value in one of its columns: what stands around them is soon refused."""
    if rng.random() < 0.2:
        return changed(rng, stored)
    columns = list(stored["columns"])
    for _ in range(rng.randrange(1, 3)):
        at = rng.randrange(len(columns))
        columns[at] = changed(rng, columns[at])
    return {**stored, "columns": columns}


def write_mixed(rng: random.Random, good: Good, folder: Path) -> Path:
    """A table of numbers, categories and dates, in one of three formats."""
    rows = [line.split(";") for line in good.mixed.read_text(encoding="utf-8").splitlines()]
    suffix, separator = rng.choice(((".csv", ";"), (".csv", ","), (".tsv", "\t"), (".parquet", "")))
    file = folder / f"mixed{suffix}"
    for _ in range(rng.choice((0, 1, 1, 3, 20))):
        row = rng.choice((rows[0], *rows))
        if row:
            row[rng.randrange(len(row))] = rng.choice(TOKENS)
        if rng.random() < 0.2 and suffix != ".parquet":
            rng.choice(rows).append("1")
    rows = rows[: rng.choice((1, 2, 3, len(rows), len(rows)))]
    if suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet

        columns: list[Any] = [pa.array([row[i] for row in rows[1:]]) for i in range(5)]
        if rng.random() < 0.5:
            at = rng.randrange(5)
            columns[at] = pa.array([rng.choice(ODD_CELLS)] * (len(rows) - 1))
        table = pa.table(columns, names=rows[0])
        pyarrow.parquet.write_table(table, file)
        if rng.random() < 0.3:
            file.write_bytes(damaged(rng, file.read_bytes()))
        return file
    content = "\n".join(map(separator.join, rows)).encode()
    file.write_bytes(damaged(rng, content) if rng.random() < 0.4 else content)
    return file


ODD_CELLS: list[Any] = [
    *(1.5, None, "x", [1, 2], {"a": 1}, b"\xff", datetime.date(1, 1, 1), True, 10**18, math.nan),
    *(math.inf, datetime.datetime(9999, 12, 31), datetime.time(1), datetime.timedelta(1), []),
]
ODD_ARRAYS: list[Any] = [
    *(np.zeros((3, 2)), np.zeros(()), np.zeros((0, 2)), np.full((3, 2), np.nan)),
    *(np.array(["a", "b", "c"]), np.array([{}, [], None], dtype=object), np.zeros((3, 0))),
    *(np.array([0, 1, 1]), np.zeros((3, 2), complex), np.zeros((3, 2), "datetime64[s]")),
    *(np.array([0.0, 1.0, 1.5]), np.full((3, 2), 1e300), np.zeros(3, [("a", "f4")])),
    *(np.zeros((3, 64)), np.zeros((3, 8, 8)), np.zeros((3, 1, 8, 8)), np.array([0, -1, 2**62])),
    *(np.zeros((3, 1)), np.full((3, 64), np.inf), np.array([True, False, True])),
]


def write_npz(rng: random.Random, good: Good, folder: Path) -> Path:
    file = folder / "table.npz"
    if rng.random() < 0.4:
        file.write_bytes(damaged(rng, good.npz.read_bytes()))
        return file
    buffer = io.BytesIO()
    names = rng.sample(("X", "inputs", "y", "a"), 2)
    np.savez(buffer, **{name: rng.choice(ODD_ARRAYS) for name in names})
    file.write_bytes(buffer.getvalue())
    if rng.random() < 0.1:
        with zipfile.ZipFile(file, "a") as archive:
            archive.writestr("y.npy", b"no array")
    return file


def write_run(rng: random.Random, good: Good, folder: Path) -> Path:
    """The folder of a run, with one file damaged; half of the time run.json vouches for it."""
    run = folder / "run"
    shutil.copytree(rng.choice((good.run, good.table_run, good.table_run)), run)
    names = sorted(f.name for f in run.iterdir() if f.suffix in (".json", ".safetensors"))
    name = rng.choice((*names, "run.json", "run.json"))
    file = run / name
    if rng.random() < 0.05:
        file.unlink()
        return run
    if file.suffix != ".json" or rng.random() < 0.25:
        file.write_bytes(damaged(rng, file.read_bytes()))
    else:
        stored = json.loads(file.read_text(encoding="utf-8"))
        part = rng.choice(("model", "statement", "plan", "history", None))
        if name == "run.json" and part in stored:
            stored[part] = changed(rng, stored[part])
        else:
            stored = changed(rng, stored)
        file.write_text(json.dumps(stored), encoding="utf-8")
    if name != "run.json" and rng.random() < 0.7:
        facts = json.loads((run / "run.json").read_text(encoding="utf-8"))
        facts["model"]["files"][name] = hashlib.sha256(file.read_bytes()).hexdigest()
        (run / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    return run


def write_unfinished(rng: random.Random, good: Good, folder: Path) -> Path:
    from tacit.training.checkpoint import FILE

    run = folder / "unfinished"
    shutil.copytree(good.unfinished, run)
    name = rng.choice((FILE, FILE, "resume.json", "resume.json", "ledger.sqlite"))
    file = run / name
    if name == "resume.json" and rng.random() < 0.7:
        stored = changed(rng, json.loads(file.read_text(encoding="utf-8")))
        file.write_text(json.dumps(stored), encoding="utf-8")
    elif name == FILE and rng.random() < 0.8:
        change_checkpoint(rng, file)
    else:
        file.write_bytes(damaged(rng, file.read_bytes()))
    return run


def change_checkpoint(rng: random.Random, file: Path) -> None:
    """Another state in a checkpoint that is whole: its digest is right."""
    from tacit.training.state_file import read_state, write_state

    state = read_state(file)
    for _ in range(20):
        new = changed(rng, state)
        with contextlib.suppress(ValueError, TypeError):  # a value that no checkpoint holds
            write_state(file, new if isinstance(new, dict) else {"progress": new})
            return
