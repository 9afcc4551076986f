"""Malformed files of every kind that Tacit reads: made from a seed, one case at a time.

To cover another kind of file, write a function that takes (rng, good, folder), writes a damaged
file into `folder` and returns the command lines that read it, and decorate it with `@kind`. `good`
holds files that are whole: one of each, made once.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import random
import shutil
import sqlite3
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Make = Callable[[random.Random, "Good", Path], list[list[str]]]
KINDS: dict[str, Make] = {}


def kind(make: Make) -> Make:
    KINDS[make.__name__] = make
    return make


@dataclass(frozen=True)
class Good:
    """A run's folder, a ledger with budget left, tables and settings, all of them whole."""

    run: Path
    ledger: Path
    csv: Path
    parquet: Path
    npz: Path
    toml: Path


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


# ---- the kinds -----------------------------------------------------------------------------------

QUICK = ["--steps", "1", "--noise-multiplier", "9", "--model", "linear", "--quiet", "--json"]


def train(folder: Path, *more: str) -> list[str]:
    return ["train", "--out", str(folder / "new"), *QUICK, *more]


@kind
def settings(rng: random.Random, good: Good, folder: Path) -> list[list[str]]:
    file = folder / "settings.toml"
    if rng.random() < 0.4:
        file.write_bytes(damaged(rng, good.toml.read_bytes()))
    else:
        import tomllib

        stored = tomllib.loads(good.toml.read_text())
        for _ in range(rng.randrange(1, 3)):
            stored = changed(rng, stored)
            if not isinstance(stored, dict):
                stored = {"data": stored}
        lines = [f"{json.dumps(k)} = {in_toml(v)}" for k, v in stored.items()]
        file.write_text("\n".join(lines), encoding="utf-8")
    return [train(folder, "--config", str(file))]


@kind
def settings_in_run_json(rng: random.Random, good: Good, folder: Path) -> list[list[str]]:
    facts = json.loads((good.run / "run.json").read_text())
    facts["config"]["settings"] = changed(rng, facts["config"]["settings"])
    file = folder / "run.json"
    file.write_text(json.dumps(facts), encoding="utf-8")
    return [train(folder, "--config", str(file))]


def _table(rng: random.Random, file: Path, folder: Path) -> list[list[str]]:
    target = rng.choice(("y", "y", "y", "y", "a", "", "nothing"))
    more = rng.choice(
        (
            [],
            ["--feature-range", "0,1"],
            ["--classes", "0,1"],
            ["--public-size", "40"],
            ["--classes", "a,b", "--unit-norm"],
            ["--query", "batch-clip", "--relation", "replace-one"],
            ["--scale-noise", "5", "--feature-range", "-1,1"],
        )
    )
    told = train(folder, "--data", str(file), "--target", target, *more)
    return [told, ["doctor", "--data", str(file), "--target", target]][: rng.choice((1, 1, 1, 2))]


@kind
def csv_file(rng: random.Random, good: Good, folder: Path) -> list[list[str]]:
    file = folder / "table.csv"
    if rng.random() < 0.5:
        file.write_bytes(damaged(rng, good.csv.read_bytes()))
    else:
        rows = [line.split(",") for line in good.csv.read_text().splitlines()]
        for _ in range(rng.choice((1, 1, 3, 20))):
            row = rng.choice(rows)
            if row:
                row[rng.randrange(len(row))] = rng.choice(TOKENS)
            if rng.random() < 0.2:
                rng.choice(rows).append("1")
        rows = rows[: rng.choice((1, 2, 3, len(rows)))]
        file.write_text("\n".join(map(",".join, rows)), encoding="utf-8")
    return _table(rng, file, folder)


@kind
def parquet_file(rng: random.Random, good: Good, folder: Path) -> list[list[str]]:
    file = folder / "table.parquet"
    if rng.random() < 0.6:
        file.write_bytes(damaged(rng, good.parquet.read_bytes()))
    else:
        import datetime

        import pyarrow as pa
        import pyarrow.parquet

        odd: list[Any] = [
            *([1.0, None, 2.0], ["a", "b", None], [[1], [2, 3], []], [{"a": 1}] * 3, [b"\xff"] * 3),
            *([datetime.date(2020, 1, 1)] * 3, [True, False, None], [10**18] * 3, [math.nan] * 3),
            *([None] * 3, [math.inf, -math.inf, 0.0], [0, 1, 1], [0.0, 1.0, 1.0]),
        ]
        columns = {name: pa.array(rng.choice(odd)) for name in ("a", "b", "y")}
        pyarrow.parquet.write_table(pa.table(columns), file)
    return _table(rng, file, folder)


@kind
def npz_file(rng: random.Random, good: Good, folder: Path) -> list[list[str]]:
    file = folder / "table.npz"
    if rng.random() < 0.6:
        file.write_bytes(damaged(rng, good.npz.read_bytes()))
    else:
        odd: list[Any] = [
            *(np.zeros((3, 2)), np.zeros(()), np.zeros((0, 2)), np.full((3, 2), np.nan)),
            *(np.array(["a", "b", "c"]), np.array([{}, [], None], dtype=object), np.zeros((3, 0))),
            *(np.array([0, 1, 1]), np.zeros((3, 2), complex), np.zeros((3, 2), "datetime64[s]")),
            *(np.array([0.0, 1.0, 1.5]), np.full((3, 2), 1e300), np.zeros(3, [("a", "f4")])),
        ]
        buffer = io.BytesIO()
        np.savez(buffer, **{n: rng.choice(odd) for n in rng.sample(("X", "inputs", "y", "a"), 2)})
        file.write_bytes(buffer.getvalue())
        if rng.random() < 0.1:
            with zipfile.ZipFile(file, "a") as archive:
                archive.writestr("y.npy", b"no array")
    return _table(rng, file, folder)


@kind
def ledger_file(rng: random.Random, good: Good, folder: Path) -> list[list[str]]:
    file = folder / "book.sqlite"
    shutil.copy(good.ledger, file)
    if rng.random() < 0.5:
        file.write_bytes(damaged(rng, file.read_bytes()))
    else:
        _rewrite(rng, file)
    commands = [
        ["ledger", "show", str(file)],
        ["ledger", "verify", str(file), "--json"],
        ["ledger", "anchor", str(file), str(folder / "anchor")],
        ["doctor", "--ledger", str(file)],
        train(folder, "--ledger", str(file)),
    ]
    return rng.sample(commands, 2)


def _rewrite(rng: random.Random, file: Path) -> None:
    """Edit the rows, and half of the time compute the whole chain anew."""
    from tacit.ledger.store import START, row_digest
    from tacit.ledger.store import Head as Tip

    db = sqlite3.connect(file)
    rows = db.execute("SELECT seq, kind, body FROM log ORDER BY seq").fetchall()
    at = rng.randrange(len(rows))
    seq, what, body = rows[at]
    choice = rng.randrange(5)
    if choice == 0:
        what = rng.choice(("ledger", "run", "charge", "attempt", "", "x"))
    elif choice == 1:
        body = damaged(rng, body.encode()).decode("utf-8", "replace")
    else:
        body = json.dumps(changed(rng, json.loads(body)))
    rows[at] = (seq, what, body)
    db.execute("DELETE FROM log")
    tip = START
    for seq, what, body in rows:
        digest = row_digest(tip, what, body)
        tip = Tip(tip.seq + 1, digest)
        db.execute("INSERT INTO log VALUES (?, ?, ?, ?)", (seq, what, body, digest))
    if rng.random() < 0.7:
        db.execute("UPDATE head SET seq = ?, digest = ?", (tip.seq, tip.digest))
    db.commit()
    db.close()


@kind
def anchor_file(rng: random.Random, good: Good, folder: Path) -> list[list[str]]:
    file, book = folder / "anchor.json", folder / "book.sqlite"
    shutil.copy(good.ledger, book)
    whole = json.dumps({"ledger": "a" * 64, "seq": 1, "digest": "a" * 64})
    if rng.random() < 0.5:
        file.write_bytes(damaged(rng, whole.encode()))
    else:
        file.write_text(json.dumps(changed(rng, json.loads(whole))), encoding="utf-8")
    return [["ledger", "verify", str(book), "--anchor", str(file)]]


def _run(rng: random.Random, good: Good, folder: Path) -> tuple[Path, list[list[str]]]:
    run = folder / "run"
    shutil.copytree(good.run, run)
    commands = [
        ["certify", str(run), "--radii", "0,1", "--json"],
        ["trade-off", str(run), "--json", "--out", str(folder / "curve.png")],
        ["doctor", "--run", str(run)],
    ]
    return run, rng.sample(commands, 2)


@kind
def run_json(rng: random.Random, good: Good, folder: Path) -> list[list[str]]:
    run, commands = _run(rng, good, folder)
    file = run / "run.json"
    if rng.random() < 0.3:
        file.write_bytes(damaged(rng, file.read_bytes()))
    else:
        facts = json.loads(file.read_text())
        part = rng.choice(("plan", "config", None))
        if part is None:
            facts = changed(rng, facts)
        elif part == "plan":
            facts["plan"] = changed(rng, facts["plan"])
        else:
            group = rng.choice(("used", "settings"))
            facts["config"][group] = changed(rng, facts["config"][group])
        file.write_text(json.dumps(facts), encoding="utf-8")
    return commands


@kind
def weights(rng: random.Random, good: Good, folder: Path) -> list[list[str]]:
    run, commands = _run(rng, good, folder)
    file = run / "weights.safetensors"
    file.write_bytes(damaged(rng, file.read_bytes()))
    return [commands[0], ["certify", str(run), "--radii", "0", "--json"]][1:]


@kind
def preprocessing(rng: random.Random, good: Good, folder: Path) -> list[list[str]]:
    run, _ = _run(rng, good, folder)
    file = run / "preprocessing.json"
    if rng.random() < 0.5:
        file.write_bytes(damaged(rng, file.read_bytes()))
    else:
        content = json.loads(file.read_text(encoding="utf-8"))
        content["stages"] = changed(rng, content["stages"] or [{"kind": "UnitNorm"}])
        file.write_text(json.dumps(content), encoding="utf-8")
        facts = json.loads((run / "run.json").read_text(encoding="utf-8"))
        facts["model"]["files"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
        (run / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    return [["certify", str(run), "--radii", "0", "--json"]]


@kind
def options(rng: random.Random, good: Good, folder: Path) -> list[list[str]]:
    """Values of options that make no sense, alone and together."""
    from tacit.cli.schema import options_of
    from tacit.cli.settings import TrainSettings

    every = [o for o in options_of(TrainSettings).values() if o.name not in ("out", "steps")]
    more: list[str] = []
    for option in rng.sample(every, rng.choice((1, 1, 2, 3))):
        if option.kind is bool:
            more.append(option.flag)
            continue
        token = str(rng.choice((*TOKENS, *option.choices, "1", "0.5", "2", "a,b", "1,0")))
        if option.name in ("ledger", "data", "test_data", "config"):
            token = str(folder / "".join(c for c in token if c.isalnum())[:20])
        token = token.replace("\x00", "")
        more.append(f"{option.flag}={token}")
    told = train(folder, *more)
    return [[t for t in told if t not in ("--json",)]]
