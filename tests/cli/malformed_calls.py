"""Malformed files and values through Python: what may come out is one clear error, or a result."""

from __future__ import annotations

import json
import random
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from malformed import (
    ODD_ARRAYS,
    ODD_CELLS,
    TOKENS,
    VALUES,
    Action,
    Call,
    Good,
    change_checkpoint,
    changed,
    changed_schema,
    damaged,
    killed_in_step,
    kind,
    write_mixed,
    write_npz,
    write_run,
    write_schema,
    write_unfinished,
)

import tacit
from tacit.data import Schema

# What a caller may give instead of a file, a number or an array.
ODD_VALUES: list[Any] = [*VALUES, *ODD_CELLS, *ODD_ARRAYS, Path("nowhere"), object(), 1j, {1}, "\n"]


def _frame(rng: random.Random, rows: int = 20) -> Any:
    """A mapping of columns, or a frame of pandas, with something odd in it."""
    columns: dict[Any, Any] = {
        "age": [float(i) for i in range(rows)],
        "city": [("Rome", "Oslo")[i % 2] for i in range(rows)],
        "smokes": [i % 2 == 0 for i in range(rows)],
        "seen": ["2020-05-05"] * rows,
        "ill": [i % 2 for i in range(rows)],
    }
    name = rng.choice(list(columns))
    choice = rng.randrange(5)
    if choice == 0:
        del columns[name]
    elif choice == 1:
        columns[name] = rng.choice(ODD_VALUES)
    elif choice == 2:
        columns[name] = [rng.choice(ODD_CELLS)] * rows
    elif choice == 3:
        columns[name][rng.randrange(rows)] = rng.choice((*ODD_CELLS, *TOKENS))
    else:
        columns[rng.choice((1, None, "", "age "))] = columns.pop(name)
    if rng.random() < 0.5:
        import pandas as pd

        try:
            return pd.DataFrame(columns)
        except (ValueError, TypeError):  # pandas refuses it by itself
            return columns
    return columns


@kind
def python_schema(rng: random.Random, good: Good, folder: Path) -> list[Action]:
    file = folder / "schema.toml"
    write_schema(rng, good, file)
    plain = changed_schema(rng, tomllib.loads(good.schema.read_text(encoding="utf-8")))

    def used(schema: Schema) -> object:
        schema.to_toml()
        return schema.inputs(good.mixed), schema.targets(good.mixed)

    def made_of_plain_values() -> object:
        schema = Schema.from_dict(plain)
        assert Schema.from_dict(schema.to_dict()) == schema
        return used(schema)

    return [
        Call("Schema.read", lambda: used(Schema.read(file))),
        Call(f"Schema.from_dict({plain!r})", made_of_plain_values),
    ]


@kind
def python_frame(rng: random.Random, good: Good, folder: Path) -> list[Action]:
    schema = Schema.read(good.schema)
    table = write_mixed(rng, good, folder) if rng.random() < 0.4 else _frame(rng)
    calls = [
        Call(f"schema.inputs({table!r})", lambda: schema.inputs(table)),
        Call(f"schema.targets({table!r})", lambda: schema.targets(table)),
        Call(f"schema.encoded({table!r})", lambda: schema.encoded(table)),
        Call(f"load_file({table!r}, schema)", lambda: tacit.load_file(table, schema=schema)),
        Call(f"load_file({table!r}, 'ill')", lambda: tacit.load_file(table, "ill")),
        Call(f"describe({table!r})", lambda: tacit.data.describe(table, ["ill"])),
    ]
    return [*rng.sample(calls, 2)]


@kind
def python_load_file(rng: random.Random, good: Good, folder: Path) -> list[Action]:
    arguments: dict[str, Any] = {"table": good.csv, "target": "y"}
    if rng.random() < 0.4:
        arguments["table"] = write_npz(rng, good, folder)
    else:
        names = "table target schema classes public_size scale feature_range test_fraction"
        name = rng.choice([*names.split(), "test_path"])
        arguments[name] = rng.choice(ODD_VALUES)
    return [Call(f"load_file({arguments!r})", lambda: tacit.load_file(**arguments), True)]


@kind
def python_open_file(rng: random.Random, good: Good, folder: Path) -> list[Action]:
    import pyarrow as pa
    import pyarrow.parquet

    file = folder / f"table.{rng.choice(('parquet', 'arrow', 'feather'))}"
    cells = [[cell] * 3 for cell in ODD_CELLS]
    columns = {"a": [1.0, 2.0, 3.0], "b": [[1, 2], [3, 4], [5, 6]], "y": [0, 1, 1]}
    odd: list[Any] = [*cells, [1.0, None, 2.0], [[1], [2, 3], []], [[1, None], [2, 3], [1, 1]]]
    odd += [[[1], [2], None], [[[1]], [[2]], [[3]]], [["a"], ["b"], ["c"]], [2**63 - 1] * 3]
    if rng.random() < 0.6:
        columns[rng.choice("aby")] = rng.choice(odd)
    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    if rng.random() < 0.05:
        table = table.slice(0, 0)
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(table, file)
    else:
        make = rng.choice((pa.ipc.new_file, pa.ipc.new_stream))
        with make(str(file), table.schema) as writer:
            writer.write_table(table)
    if rng.random() < 0.5:
        file.write_bytes(damaged(rng, file.read_bytes()))
    arguments: dict[str, Any] = {"target": "y", "cache": good.folder / "cache"}
    if rng.random() < 0.3:
        name = rng.choice(("target", "columns", "prefetch", "public_size", "num_classes"))
        arguments[name] = rng.choice(ODD_VALUES)
    return [
        Call(f"open_file({arguments!r})", lambda: tacit.data.open_file(file, **arguments), True)
    ]


@kind
def python_run(rng: random.Random, good: Good, folder: Path) -> list[Action]:
    run = write_run(rng, good, folder)
    table = good.mixed if (run / "schema.json").exists() else good.npz

    def load() -> object:
        loaded = tacit.load_run(run)
        if loaded.schema is not None:
            loaded.predict_proba(table)
        return repr(loaded), loaded.record_shape

    return [
        Call("load_run(...).predict_proba(...)", load),
        Call("load_preprocessing", lambda: tacit.data.load_preprocessing(run)),
    ]


_LOADED: dict[Path, Any] = {}


@kind
def python_predict(rng: random.Random, good: Good, folder: Path) -> list[Action]:
    at = rng.choice((good.run, good.table_run))
    run = _LOADED.setdefault(at, tacit.load_run(at))
    values: list[Any] = [*ODD_VALUES, *map(torch.from_numpy, _numbers())]
    value = rng.choice(values)
    if rng.random() < 0.5:
        make = write_npz if at == good.run else write_mixed
        value = make(rng, good, folder) if rng.random() < 0.5 else _frame(rng)
    say = rng.choice(("predict", "predict_proba"))
    return [Call(f"load_run({at}).{say}({value!r})", lambda: getattr(run, say)(value), True)]


def _numbers() -> list[Any]:
    return [array for array in ODD_ARRAYS if array.dtype.kind in "fibc"]


@kind
def python_checkpoint(rng: random.Random, good: Good, folder: Path) -> list[Action]:
    from tacit.training.checkpoint import read_checkpoint

    run = write_unfinished(rng, good, folder)
    return [Call("read_checkpoint", lambda: read_checkpoint(run))]


@kind
def python_resume(rng: random.Random, good: Good, folder: Path) -> list[Action]:
    """`fit(resume=)`: a damaged checkpoint must leave the trainer's ledger in order."""
    from tacit.training.checkpoint import FILE

    here = folder / "small"
    shutil.copytree(small_folder(good), here)
    file = here / FILE
    if rng.random() < 0.8:
        change_checkpoint(rng, file)
    else:
        file.write_bytes(damaged(rng, file.read_bytes()))
    trainer = small_trainer(here)
    resume = here if rng.random() < 0.9 else rng.choice(ODD_VALUES)
    return [Call(f"fit(resume={resume!r})", lambda: trainer.fit(resume=resume), True)]


def small_folder(good: Good) -> Path:
    """What a run leaves that is killed in its fourth step."""
    whole = good.folder / "small"
    if not whole.exists():
        killed_in_step(4, lambda: small_trainer(whole).fit())
    return whole


def small_trainer(folder: Path) -> Any:
    """A trainer of 5 steps on 20 records."""
    from tacit.training import Checkpoint, MovingAverage

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(20, 2, generator=generator)
    records = tacit.Records(inputs, (inputs[:, 0] > 0).long(), 2, public_size=20, name="small")
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    return tacit.Trainer(
        model,
        loss=tacit.losses.CrossEntropy(),
        query=tacit.PerSampleClip(0.5),
        sampler=tacit.PoissonSampler(records, 0.5, steps=5),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        budget=tacit.Budget(8.0, 1e-3),
        noise=tacit.Noise(4.0),
        moving_average=MovingAverage(0.9),
        ledger=tacit.LedgerRun(folder / "ledger.sqlite", "run"),
        checkpoint=Checkpoint(folder, 1),
    )


@kind
def python_ledger(rng: random.Random, good: Good, folder: Path) -> list[Action]:
    from malformed_commands import damage_ledger

    file = folder / "book.sqlite"
    shutil.copy(good.ledger, file)
    arguments: dict[str, Any] = {"path": file}
    if rng.random() < 0.6:
        damage_ledger(rng, file)
    else:
        name = rng.choice(("path", "budget", "lease_steps", "anchor"))
        arguments[name] = rng.choice(ODD_VALUES)
        if isinstance(arguments[name], str | Path):  # where a file may be made
            arguments[name] = folder / "".join(filter(str.isalnum, str(arguments[name])))[:20]

    def opened() -> None:
        with tacit.Ledger(**arguments) as ledger:
            ledger.verify()

    return [Call(f"Ledger({arguments!r})", opened, True)]


@kind
def python_budget(rng: random.Random, good: Good, folder: Path) -> list[Action]:
    arguments: dict[str, Any] = {"epsilon": 3.0, "delta": 1e-5, "relation": "replace-one"}
    arguments[rng.choice(list(arguments))] = rng.choice(ODD_VALUES)
    return [Call(f"Budget({arguments!r})", lambda: tacit.Budget(**arguments), True)]


@kind
def python_records(rng: random.Random, good: Good, folder: Path) -> list[Action]:
    inputs, targets = torch.zeros(3, 2), torch.tensor([0, 1, 1])
    arguments: dict[str, Any] = {"inputs": inputs, "targets": targets, "num_classes": 2}
    names = "inputs targets num_classes public_size record_ids num_ids class_names feature_names"
    for name in rng.sample(names.split(), rng.choice((1, 1, 2))):
        arguments[name] = rng.choice((*ODD_VALUES, *map(torch.from_numpy, _numbers())))

    def used() -> object:
        records = tacit.Records(**arguments)
        return repr(records), len(records), records.take(slice(0, 1)), records.shape

    lazily = {k: v for k, v in arguments.items() if k not in ("inputs", "targets")}
    data = (arguments["inputs"], arguments["targets"])
    return [
        Call(f"Records({arguments!r})", used, True),
        Call(f"Records.lazy({arguments!r})", lambda: tacit.Records.lazy(data, **lazily), True),
        Call(f"as_records({data!r})", lambda: tacit.data.as_records(data), True),
    ]


@kind
def python_estimator(rng: random.Random, good: Good, folder: Path) -> list[Action]:
    from tacit.integrations import TacitClassifier, TacitRegressor

    numbers = np.random.default_rng(0)
    arguments: dict[str, Any] = {"steps": 1, "epsilon": 50.0, "delta": 1e-2, "random_state": 0}
    arguments |= {"feature_range": (0, 1), "scaling_share": 0}
    x: Any = numbers.random((20, 2))
    y: Any = numbers.integers(0, 2, 20)
    choice = rng.randrange(4)
    if choice == 0:
        x = rng.choice((*ODD_VALUES, _frame(rng)))
    elif choice == 1:
        y = rng.choice(ODD_VALUES)
    else:
        names = "epsilon delta hidden steps batch_size learning_rate max_norm feature_range schema"
        names += " scaling_share public_size relation model query random_state classes ledger"
        for name in rng.sample(names.split(), rng.choice((1, 1, 2))):
            arguments[name] = rng.choice(ODD_VALUES)
    if isinstance(arguments.get("ledger"), str | Path):
        arguments["ledger"] = folder / "nowhere"
    if "classes" in arguments or rng.random() < 0.7:
        make: Any = TacitClassifier
    else:
        make = TacitRegressor
        arguments["target_range"] = rng.choice(((0, 1), *ODD_VALUES))
    words = f"{make.__name__}({arguments!r}).fit({x!r}, {y!r})"
    return [Call(words, lambda: make(**arguments).fit(x, y).predict(x), True)]


@kind
def python_preprocessing(rng: random.Random, good: Good, folder: Path) -> list[Action]:
    file = folder / "preprocessing.json"
    content = json.loads((good.table_run / file.name).read_text(encoding="utf-8"))
    stages = [
        *content["stages"],
        {"kind": "UnitNorm"},
        {"kind": "RangeScaler", "lower": 0.0, "upper": 1.0},
        {"kind": "Centre"},
        {"kind": "YUV"},
    ]
    content["stages"] = changed(rng, rng.sample(stages, 2))
    file.write_text(json.dumps(content), encoding="utf-8")
    return [Call(f"load_preprocessing: {content!r}", lambda: _apply(folder))]


def _apply(folder: Path) -> object:
    """Stages of other shapes may not fit a tensor; the file itself must be refused or read."""
    return tacit.data.load_preprocessing(folder).describe()
