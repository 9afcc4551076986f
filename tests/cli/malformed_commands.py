"""Malformed files of every kind that the command line reads, and options that make no sense."""

from __future__ import annotations

import hashlib
import json
import math
import random
import shutil
import sqlite3
from pathlib import Path
from typing import Any

from malformed import (
    QUICK,
    TOKENS,
    Action,
    Good,
    changed,
    damaged,
    in_toml,
    kind,
    write_mixed,
    write_npz,
    write_run,
    write_schema,
    write_unfinished,
)


def train(folder: Path, *more: str) -> list[str]:
    return ["train", "--out", str(folder / "new"), *QUICK, *more]


@kind
def settings(rng: random.Random, good: Good, folder: Path) -> list[Action]:
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
def settings_in_run_json(rng: random.Random, good: Good, folder: Path) -> list[Action]:
    facts = json.loads((good.run / "run.json").read_text())
    facts["config"]["settings"] = changed(rng, facts["config"]["settings"])
    file = folder / "run.json"
    file.write_text(json.dumps(facts), encoding="utf-8")
    return [train(folder, "--config", str(file))]


def _table(rng: random.Random, file: Path, folder: Path) -> list[Action]:
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
def csv_file(rng: random.Random, good: Good, folder: Path) -> list[Action]:
    suffix, separator = rng.choice((("csv", b","), ("csv", b";"), ("tsv", b"\t")))
    file = folder / f"table.{suffix}"
    if rng.random() < 0.5:
        file.write_bytes(damaged(rng, good.csv.read_bytes().replace(b",", separator)))
    else:
        rows = [line.split(",") for line in good.csv.read_text().splitlines()]
        for _ in range(rng.choice((1, 1, 3, 20))):
            row = rng.choice(rows)
            if row:
                row[rng.randrange(len(row))] = rng.choice(TOKENS)
            if rng.random() < 0.2:
                rng.choice(rows).append("1")
        rows = rows[: rng.choice((1, 2, 3, len(rows)))]
        text = "\n".join(separator.decode().join(row) for row in rows)
        file.write_text(text, encoding="utf-8")
    return _table(rng, file, folder)


@kind
def parquet_file(rng: random.Random, good: Good, folder: Path) -> list[Action]:
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
def npz_file(rng: random.Random, good: Good, folder: Path) -> list[Action]:
    return _table(rng, write_npz(rng, good, folder), folder)


@kind
def ledger_file(rng: random.Random, good: Good, folder: Path) -> list[Action]:
    file = folder / "book.sqlite"
    shutil.copy(good.ledger, file)
    damage_ledger(rng, file)
    commands = [
        ["ledger", "show", str(file)],
        ["ledger", "verify", str(file), "--json"],
        ["ledger", "anchor", str(file), str(folder / "anchor")],
        ["doctor", "--ledger", str(file)],
        train(folder, "--ledger", str(file)),
    ]
    return rng.sample(commands, 2)


def damage_ledger(rng: random.Random, file: Path) -> None:
    if rng.random() < 0.5:
        file.write_bytes(damaged(rng, file.read_bytes()))
    else:
        _rewrite(rng, file)


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
def anchor_file(rng: random.Random, good: Good, folder: Path) -> list[Action]:
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
def run_json(rng: random.Random, good: Good, folder: Path) -> list[Action]:
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
def weights(rng: random.Random, good: Good, folder: Path) -> list[Action]:
    run, commands = _run(rng, good, folder)
    file = run / "weights.safetensors"
    file.write_bytes(damaged(rng, file.read_bytes()))
    return [commands[0], ["certify", str(run), "--radii", "0", "--json"]][1:]


@kind
def preprocessing(rng: random.Random, good: Good, folder: Path) -> list[Action]:
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
def options(rng: random.Random, good: Good, folder: Path) -> list[Action]:
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


@kind
def schema_file(rng: random.Random, good: Good, folder: Path) -> list[Action]:
    file = folder / "schema.toml"
    write_schema(rng, good, file)
    told = train(folder, "--data", str(good.mixed), "--schema", str(file), "--delta", "1e-3")
    return [told]


@kind
def described_table(rng: random.Random, good: Good, folder: Path) -> list[Action]:
    file = write_mixed(rng, good, folder)
    targets = [["--target", rng.choice(("ill", "ill", "age", "city,ill", "", "nothing"))], []]
    return [["data", "describe", str(file), *rng.choice(targets), *rng.choice(([], ["--json"]))]]


@kind
def table_with_a_schema(rng: random.Random, good: Good, folder: Path) -> list[Action]:
    file = write_mixed(rng, good, folder)
    schema = ["--schema", str(good.schema), "--delta", "1e-3"]
    doctor = ["doctor", "--data", str(file), "--target", rng.choice(("ill", "age"))]
    return rng.choice(([train(folder, "--data", str(file), *schema)], [doctor]))


@kind
def predicted_table(rng: random.Random, good: Good, folder: Path) -> list[Action]:
    run, make = rng.choice(((good.table_run, write_mixed), (good.run, write_npz)))
    file = make(rng, good, folder)
    out = rng.choice(([], ["--json"], ["--out", str(folder / "new.csv")]))
    return [["predict", str(run), str(file), *out]]


@kind
def run_folder(rng: random.Random, good: Good, folder: Path) -> list[Action]:
    run = write_run(rng, good, folder)
    table = str(good.mixed if (run / "schema.json").exists() else good.npz)
    commands: list[list[str]] = [
        ["predict", str(run), table, "--out", str(folder / "new.csv")],
        ["predict", str(run), table, "--json"],
        ["export", str(run), "--out", str(folder / "new.onnx")],
        ["report", str(run), "--out", str(folder / "new.html")],
        ["compare", str(run), str(good.table_run), "--out", str(folder / "new.html")],
        ["doctor", "--run", str(run)],
        ["certify", str(run), "--radii", "0", "--json"],
        ["trade-off", str(run), "--json"],
    ]
    weights = (3, 3, 1, 3, 3, 2, 1, 1)
    return [*rng.choices(commands, weights)]


@kind
def resumed(rng: random.Random, good: Good, folder: Path) -> list[Action]:
    """checkpoint, resume.json or ledger of a run that is not complete."""
    run = write_unfinished(rng, good, folder)
    return [["train", "--resume", str(run), "--quiet", "--json"]]
