"""`tacit doctor`: what is installed, how fast it will be, and whether files can be used."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sqlite3
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import typer

import tacit
from tacit.cli.console import JSON, print_json

# The releases of PyTorch that the tests were run on; a test compares this with what they say.
TESTED_TORCH = ("2.9", "2.11", "2.13", "2.14")
NEEDED = ("torch", "numpy", "scipy", "dp-accounting", "cryptography", "safetensors", "typer")
# Packages that are not needed, by their module, and what each is for.
OPTIONAL = {
    "pyarrow": "tables in .parquet files",
    "kymatio": "scattering features of images",
    "pandas": "frames as tables",
    "polars": "frames as tables",
    "sklearn": "estimators, and the dataset digits",
    "transformers": "language models",
    "peft": "fine-tuning with few weights",
    "onnx": "export to ONNX",
    "onnxruntime": "checking an export to ONNX",
    "tensorboard": "logging to TensorBoard",
    "mlflow": "logging to MLflow",
    "trackio": "logging to trackio",
    "wandb": "logging to Weights & Biases",
}
_DISTRIBUTION = {"sklearn": "scikit-learn"}


class Checked(NamedTuple):
    """One line of the report. `state` is ok, note (it works, with less) or problem."""

    section: str
    name: str
    state: str
    text: str


def doctor(
    data: Path | None = typer.Option(None, help="A file of your own, to see if it can be read."),
    target: str | None = typer.Option(None, help="Column of --data that holds the classes."),
    run: Path | None = typer.Option(None, help="Folder of a run, to see if it is whole."),
    ledger: Path | None = typer.Option(None, help="A ledger, to see if it can be charged."),
    as_json: bool = JSON,
) -> None:
    """Show what is installed, which device and speed path are used, and which files are usable.

    Exits with 0 if all is well, and with 1 if something is not. Nothing is changed or downloaded.

    Example: tacit doctor --data patients.csv --target outcome --ledger patients.sqlite
    """
    checks: list[Callable[[], Iterator[Checked]]] = [_installed, _optional, _device, _folders]
    checks.append(_randomness)
    if data is not None:
        checks.append(lambda: _data_file(data, target))
    if run is not None:
        checks.append(lambda: _run_folder(run))
    if ledger is not None:
        checks.append(lambda: _ledger(ledger))
    findings = [finding for check in checks for finding in check()]
    problems = [f for f in findings if f.state == "problem"]
    if as_json:
        print_json({"well": not problems, "findings": [f._asdict() for f in findings]})
    else:
        _print(findings)
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        typer.echo(f"{count}, marked with ✗" if problems else "all is well")
    if problems:
        raise typer.Exit(1)


def _print(findings: list[Checked]) -> None:
    from rich.console import Console
    from rich.table import Table

    marks = {"ok": "[green]✓[/]", "note": "[yellow]–[/]", "problem": "[red]✗[/]"}
    console = Console()
    for section in dict.fromkeys(f.section for f in findings):
        table = Table("", section, "", show_edge=False, pad_edge=False, box=None)
        for finding in findings:
            if finding.section == section:
                table.add_row(marks[finding.state], finding.name, finding.text)
        console.print(table)
        console.print()


def _release_of(name: str) -> str | None:
    try:
        return version(_DISTRIBUTION.get(name, name))
    except PackageNotFoundError:
        return None


def _installed() -> Iterator[Checked]:
    yield Checked("installed", "tacit", "ok", tacit.__version__)
    yield Checked("installed", "Python", "ok", f"{platform.python_version()} ({sys.executable})")
    for name in NEEDED:
        found = _release_of(name)
        if found is None:
            text = f"missing; install it: pip install {name}"
            yield Checked("installed", name, "problem", text)
        elif name == "torch" and not _is_tested(found):
            text = f"{found}, which the tests were not run on; they were on {_tested()}"
            yield Checked("installed", name, "note", text)
        else:
            yield Checked("installed", name, "ok", found)


def _is_tested(torch_version: str) -> bool:
    return ".".join(torch_version.split(".")[:2]) in TESTED_TORCH


def _tested() -> str:
    return ", ".join(TESTED_TORCH)


def _optional() -> Iterator[Checked]:
    for name, use in OPTIONAL.items():
        if find_spec(name) is None:
            text = f"not installed; for {use}: pip install {_DISTRIBUTION.get(name, name)}"
            yield Checked("optional", name, "note", text)
        else:
            yield Checked("optional", name, "ok", f"{_release_of(name) or 'installed'}, for {use}")


def _device() -> Iterator[Checked]:
    """The device of --device auto, and what a step of many records is made fast by."""
    import torch

    section = "device and speed"
    if torch.cuda.is_available():
        name, memory = torch.cuda.get_device_name(), torch.cuda.mem_get_info()
        yield Checked(section, "device", "ok", f"cuda: {name}, {memory[1] >> 30} GiB")
        state = "ok" if torch.cuda.is_bf16_supported() else "note"
        yield Checked(section, "bfloat16", state, "yes" if state == "ok" else "not supported")
        has_triton = find_spec("triton") is not None
        text = "yes" if has_triton else "missing; our kernels and the compiler need it"
        yield Checked(section, "Triton", "ok" if has_triton else "note", text)
        text = "steps are captured as CUDA graphs" + (", and long runs compiled" * has_triton)
        yield Checked(section, "speed path", "ok" if has_triton else "note", text)
        return
    yield Checked(section, "device", "ok", "cpu: PyTorch finds no CUDA GPU")
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    compiler = next((found for name in names if name and (found := shutil.which(name))), None)
    if compiler is None:
        text = "steps run as they are, uncompiled: there is no C++ compiler (g++ or clang++)"
        yield Checked(section, "speed path", "note", text)
    else:
        yield Checked(section, "speed path", "ok", f"long runs are compiled, by {compiler}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = torch.get_num_threads()
    text = f"{threads} of PyTorch on {cores} cores"
    if threads * 2 < (cores or 1):
        yield Checked(section, "threads", "note", f"{text}; OMP_NUM_THREADS={cores} uses them all")
    else:
        yield Checked(section, "threads", "ok", text)


def _folders() -> Iterator[Checked]:
    from tacit.data.download import cache_folder

    section = "folders"
    own = os.environ.get("TACIT_DATA")
    if own is None:
        yield Checked(section, "TACIT_DATA", "ok", "not set; datasets come from the cache")
    elif not Path(own).expanduser().is_dir():
        text = f"{own} is no folder; make it, or unset TACIT_DATA"
        yield Checked(section, "TACIT_DATA", "problem", text)
    elif not os.access(Path(own).expanduser(), os.R_OK | os.X_OK):
        yield Checked(section, "TACIT_DATA", "problem", f"{own} cannot be read; check its rights")
    else:
        yield Checked(section, "TACIT_DATA", "ok", own)
    cache = cache_folder()
    nearest = next(p for p in (cache, *cache.parents) if p.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        yield Checked(section, "cache", "ok", str(cache))
    else:
        text = f"{cache} cannot be written; set TACIT_CACHE to a folder that can"
        yield Checked(section, "cache", "problem", text)


def _randomness() -> Iterator[Checked]:
    import torch

    from tacit.randomness import Randomness

    one, other = (Randomness().stream("noise", 0) for _ in range(2))
    first, second = (s.normals([64], torch.device("cpu"))[0] for s in (one, other))
    if bool((first == second).any()):
        text = "two secret streams gave the same numbers; do not train on this machine"
        yield Checked("randomness", "source", "problem", text)
        return
    text = "keys from the operating system, draws by ChaCha20"
    yield Checked("randomness", "source", "ok", text)


# ---- files ---------------------------------------------------------------------------------------


def _data_file(path: Path, target: str | None) -> Iterator[Checked]:
    """The names of the columns, which are read without the records."""
    section = "data"
    try:
        columns = _columns(path)
    except Exception as error:  # whatever the file holds, the report goes on
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        yield Checked(section, str(path), "problem", f"cannot be read: {said}")
        return
    yield Checked(section, str(path), "ok", f"{len(columns)} columns: {_few(columns)}")
    if target is not None and target not in columns:
        text = f"--target {target} is none of them; give --target {columns[-1] if columns else ''}"
        yield Checked(section, "target", "problem", text)
    elif target is not None:
        yield Checked(section, "target", "ok", target)


def _few(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")


def _columns(path: Path) -> list[str]:
    if not path.is_file():
        raise ValueError("there is no such file; check the path")
    suffix = path.suffix.lower()
    if suffix in (".csv", ".tsv"):
        from tacit.data.table_cells import text_rows

        _, header = next(text_rows(path), (0, []))
        if not header:
            raise ValueError("it is empty; give a header row")
        return [name.strip() for name in header]
    if suffix == ".parquet":
        import pyarrow.parquet

        return list(pyarrow.parquet.read_schema(path).names)
    if suffix == ".npz":
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    raise ValueError(f"it ends in {suffix or 'no suffix'}; give .csv, .tsv, .parquet or .npz")


def _weights_of(folder: Path) -> str:
    from safetensors import safe_open

    with safe_open(folder / "weights.safetensors", framework="pt") as content:
        return f"{len(list(content.keys()))} tensors"


def _preprocessing_of(folder: Path) -> str:
    from tacit.data.preprocessing import load_preprocessing

    return f"{len(load_preprocessing(folder).stages)} stages"


_PARTS_OF_A_RUN = {"weights.safetensors": _weights_of, "preprocessing.json": _preprocessing_of}


def _run_folder(folder: Path) -> Iterator[Checked]:
    from safetensors import SafetensorError

    section = "run"
    if not folder.is_dir():
        yield Checked(section, str(folder), "problem", "there is no such folder; check the path")
        return
    try:
        facts = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        text = f"ε = {float(facts['epsilon']):.4g}, {facts['steps']} steps, {facts['stopped']}"
        yield Checked(section, "run.json", "ok", text)
    except OSError:
        text = "missing: the run has not ended, or this is no run's folder"
        yield Checked(section, "run.json", "problem", text)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        text = f"cannot be read ({type(error).__name__}); copy it from a backup"
        yield Checked(section, "run.json", "problem", text)
    for name, measure in _PARTS_OF_A_RUN.items():
        if not (folder / name).is_file():
            yield Checked(section, name, "problem", "missing; copy it from a backup")
            continue
        try:
            yield Checked(section, name, "ok", measure(folder))
        except (SafetensorError, ValueError, OSError) as error:
            yield Checked(section, name, "problem", f"cannot be read ({error})")
    own = folder / "ledger.sqlite"
    if own.exists():
        yield from _ledger(own, to_charge=False)


def _ledger(file: Path, to_charge: bool = True) -> Iterator[Checked]:
    """Whether the ledger is whole and, to be charged, has budget left and is not locked."""
    from tacit.errors import TacitError
    from tacit.ledger.statement import read_statement

    section = "ledger"
    try:
        statement = read_statement(file)
    except (TacitError, ValueError, OSError, sqlite3.Error) as error:
        yield Checked(section, str(file), "problem", str(error))
        return
    text = f"every row is as it was written, head {statement.head[:16]}…"
    yield Checked(section, str(file), "ok", text)
    budget = statement.budget
    spent = f"{statement.epsilon_charged:.4g} of ε = {budget.epsilon:g} charged at δ = "
    spent += f"{budget.delta:g}, {len(statement.runs)} run{'s' if len(statement.runs) != 1 else ''}"
    full = any(r.exclusive for r in statement.runs) or statement.epsilon_charged >= budget.epsilon
    if not to_charge:
        yield Checked(section, "budget", "ok", spent)
        return
    if full:
        text = f"{spent}: no other run can be added; make a ledger with a larger budget"
        yield Checked(section, "budget", "problem", text)
    else:
        yield Checked(section, "budget", "ok", spent)
    yield _lock_of(file)


def _lock_of(file: Path) -> Checked:
    if not (os.access(file, os.W_OK) and os.access(file.absolute().parent, os.W_OK)):
        return Checked("ledger", "writable", "problem", "no; check the rights of file and folder")
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=rw", uri=True)) as db:
            db.isolation_level = None
            db.execute("PRAGMA busy_timeout = 200")
            db.execute("BEGIN IMMEDIATE")
            db.execute("ROLLBACK")
    except sqlite3.Error as error:
        text = f"another process holds it ({error}); wait for its run, or end it"
        return Checked("ledger", "writable", "problem", text)
    return Checked("ledger", "writable", "ok", "yes, and no other process holds it")
