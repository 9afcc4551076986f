"""A finished run as a folder, which is enough to use its model; `load_run` reads it back.

run.json holds the facts of the run, how to build its network, its task and names, the statement of
its privacy, and the SHA-256 of the other files; weights are safetensors, the rest is JSON. The
statement is also a file of its own, statement.json, to be given away with the model.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import tacit
from tacit.canvas import blank
from tacit.data.download import whole_file
from tacit.data.preprocessing import FILE as PREPROCESSING
from tacit.data.preprocessing import Preprocessing, Stage
from tacit.data.table_schema import Schema
from tacit.diagnostics.predictions import confusion_matrix
from tacit.ledger import Ledger
from tacit.losses.registry import Task
from tacit.models.architectures import architecture_of, plain_arguments
from tacit.records import Records, as_records
from tacit.report.folder_files import (
    FILES,
    FORMAT,
    SCHEMA,
    WEIGHTS,
    digest_of,
    write_json,
)
from tacit.report.privacy_statement import state
from tacit.statistics.tracking import refuse_private_statistics
from tacit.training.evaluation import temperature_of
from tacit.training.run import Run


@functools.cache
def source() -> dict[str, Any]:
    """The package's version, the commit of its checkout, and whether its code was changed since.

    `commit` and `dirty` are None where the package is not part of a git checkout. `dirty` says
    that a Python file, tracked or not, differs from the commit, so that the commit alone does not
    name the code. Read once per process: code that is edited later is not what runs.
    """
    package = Path(tacit.__file__).parent
    commit = None
    # A package that is installed below another project's checkout is not tracked there.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is not None:
        commit = _git(package, "rev-parse", "HEAD")
    changed = None if commit is None else _git(package, "status", "--porcelain", "--", ":/*.py")
    return {
        "tacit": tacit.__version__,
        "commit": commit,
        "dirty": None if changed is None else bool(changed),
    }


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


# The metric that is drawn beside the loss, by preference: its label, and its factor.
_BESIDE = {
    "accuracy": ("held-out accuracy (%)", 100),
    "root_mean_squared_error": ("held-out RMSE", 1),
}


def plot_history(facts: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """The held-out loss at each evaluation against the ε spent by then, beside the accuracy or,
    for a regression, the root mean squared error."""
    history = facts["history"]
    epsilons = [point["epsilon"] for point in history]
    beside = next((m for m in _BESIDE if all(p.get(m) is not None for p in history)), None)
    figure, axes = blank(1, 2 if beside else 1, (9 if beside else 4.8, 3.6))
    *first, loss = axes[0]
    if beside:
        label, times = _BESIDE[beside]
        values = [times * point[beside] for point in history]
        first[0].plot(epsilons, values, marker="o", markersize=3)
        first[0].set_ylabel(label)
    loss.plot(epsilons, [p["loss"] for p in history], marker="o", markersize=3, color="tab:red")
    loss.set_ylabel("held-out loss")
    for panel in (*first, loss):
        panel.set_xlabel(f"ε spent (PLD, δ = {facts['delta']:g}, {facts['relation']})")
        panel.grid(alpha=0.3)
    figure.suptitle(f"{facts['sampling']}, noise multiplier {facts['noise_multiplier']:.4g}")
    figure.savefig(path, dpi=120)


def environment() -> dict[str, Any]:
    """The commit and the versions that a figure depends on."""
    return {
        **source(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
        "numpy": version("numpy"),
        "scipy": version("scipy"),
        "dp_accounting": version("dp-accounting"),
        "platform": platform.platform(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "command": sys.argv,
    }


def save_run(
    run: Run,
    folder: str | os.PathLike[str],
    test: Records | None = None,
    *,
    overwrite: bool = False,
    preprocessing: Preprocessing | Stage | Iterable[Stage] | None = None,
    schema: Schema | None = None,
    ledger: Ledger | str | os.PathLike[str] | None = None,
    arguments: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Write the run into `folder` and return its facts. Files appear whole or not at all.

    `tacit.load_run(folder)` gives the model back. It knows a network of `tacit.models` by its name.
    Of a module of your own the folder has the import path and the keyword arguments, and
    `load_run` asks whether it may import it.

    Args:
        test: held-out records to measure. Class and feature names are theirs, or those of the
            training records.
        preprocessing: what the inputs went through: the scalers given to `tacit.load`, a released
            mean and std, scattering features.
        schema: of the table that was trained on.
        ledger: what the run was charged to; its runs and head go into the privacy statement.
        arguments: the keyword arguments that a model of your own class was made with.

    A run that is there already is kept, and ValueError raised, unless `overwrite`; other files,
    such as a ledger, are left alone. Raises PrivateStatistics, and writes nothing, if the model
    holds private statistics.
    """
    refuse_private_statistics(run.model)
    test = None if test is None else as_records(test)
    target = Path(folder)
    # Without one of its own, a run must not replace preprocessing that another has paid for.
    kept = FILES if preprocessing is None else FILES[:-1]
    if not overwrite and any((target / name).exists() for name in kept):
        raise ValueError(
            f"folder {str(target)!r} holds a run already; give another folder, or overwrite=True"
        )
    described = describe_model(run, test, schema, arguments)
    facts = run.facts(test, target_unit(schema))
    facts["environment"] = environment()
    facts["public"] = declared(next(iter(run.known_records()), None), schema)
    facts["confusion"] = _confusion(run, test, facts)
    target.mkdir(parents=True, exist_ok=True)
    # Copies, since safetensors refuses the shared memory of tied weights.
    weights = {
        name: torch.clone(tensor.detach().cpu(), memory_format=torch.contiguous_format)
        for name, tensor in run.model.state_dict().items()
    }
    with whole_file(target / WEIGHTS) as draft:
        save_file(weights, draft)
    written = [WEIGHTS]
    if preprocessing is None:
        (target / PREPROCESSING).unlink(missing_ok=True)  # of a run that is overwritten
    else:
        Preprocessing.of(preprocessing).save(target)
        written.append(PREPROCESSING)
    if schema is None:
        (target / SCHEMA).unlink(missing_ok=True)
    else:
        write_json(schema.to_dict(), target / SCHEMA)
        written.append(SCHEMA)
    if run.history:
        plot_history(facts, target / "progress.png")
    else:
        (target / "progress.png").unlink(missing_ok=True)  # of a run that is overwritten
    described["files"] = {name: digest_of(target / name) for name in written}
    facts["model"] = described
    # run.json last: a folder with one is whole, and holds the statement beside it.
    statement = state(facts, ledger)
    facts["statement"] = dict(statement.content)
    statement.save(target)
    write_json(facts, target / "run.json")
    return facts


# A matrix of more classes is no picture, and long as JSON.
_MOST_CLASSES = 40


def _confusion(run: Run, test: Records | None, facts: dict[str, Any]) -> list[list[int]] | None:
    """Counts of the held-out records, a row for each true class; None where there are no classes.

    What the records are measured on is not covered by ε, as their accuracy is not.
    """
    if test is None or facts["accuracy"] is None or (test.num_classes or 2) > _MOST_CLASSES:
        return None
    with suppress(ValueError):  # several targets per record, or several tensors of outputs
        counts: list[list[int]] = confusion_matrix(run.model, test).tolist()
        return counts if len(counts) <= _MOST_CLASSES else None
    return None


# ---- what a folder says of its model -------------------------------------------------------------


def describe_model(
    run: Run, test: Records | None, schema: Schema | None, arguments: dict[str, Any] | None
) -> dict[str, Any]:
    """How to build the network, what it takes, and what its outputs mean, as plain values."""
    records = next((r for r in (test, *run.known_records()) if r is not None), None)
    example = None if records is None else records.inputs
    is_tensor = isinstance(example, torch.Tensor)
    task = _task_of(run, test) if schema is None or not schema.target else Task(schema.task)
    one_output = getattr(run.loss, "task", None) is Task.BINARY
    names = getattr(records, "class_names", None), getattr(records, "feature_names", None)
    if schema is not None:
        names = schema.class_names if schema.target else None, schema.feature_names
    return {
        "format": FORMAT,
        "architecture": _architecture(run.model, arguments),
        "task": Task.BINARY if one_output and task is Task.CLASSIFICATION else task,
        "input_shape": list(example.shape[1:]) if isinstance(example, torch.Tensor) else None,
        "input_dtype": str(example.dtype).removeprefix("torch.")  # type: ignore[union-attr]
        if is_tensor
        else None,
        "class_names": None if names[0] is None else list(names[0]),
        "feature_names": None if names[1] is None else list(names[1]),
        "temperature": temperature_of(run.loss),
    }


def declared(records: Records | None, schema: Schema | None) -> list[str]:
    """What the user declared public about the training records, in sentences."""
    found = []
    if records is not None and records.public_size is not None:
        found.append(f"the number of training records, declared as {records.public_size:,}")
    if records is not None and records.num_classes is not None:
        named = f": {', '.join(records.class_names)}" if records.class_names else ""
        found.append(f"there are {records.num_classes} classes{named}")
    if schema is not None:
        found.append("the names, kinds and categories of the columns in schema.json")
        ranged = [c.name for c in schema.columns if isinstance(getattr(c, "range", None), tuple)]
        if ranged:
            found.append(f"the ranges of {', '.join(ranged)}, as schema.json has them")
    return found


def _task_of(run: Run, test: Records | None) -> Task | None:
    """What the loss declares, or what it is for held-out records of this kind."""
    task = getattr(run.loss, "task", None)
    if task is not None:
        return Task(task)
    return None if test is None else run.evaluate(test.take(slice(2))).task


def _architecture(model: nn.Module, arguments: dict[str, Any] | None) -> dict[str, Any]:
    known = architecture_of(model)
    if known is not None and arguments is None:
        return {"kind": "registered", **known.facts()}
    kind = type(model)
    if arguments is not None:
        arguments = plain_arguments(arguments)
        try:
            inspect.signature(kind).bind(**arguments)
        except TypeError as error:
            raise ValueError(
                f"arguments are {arguments}, which {kind.__name__} does not take ({error}); give "
                "the keyword arguments that the model was made with"
            ) from error
    return {
        "kind": "import",
        "module": kind.__module__,
        "name": kind.__qualname__,
        "arguments": arguments,
        "layers": hashlib.sha256(str(model).encode()).hexdigest(),
    }


def target_unit(schema: Schema | None) -> float:
    """How many of the target's own units are 1 for the network."""
    if schema is None or not schema.target or schema.task != Task.REGRESSION:
        return 1.0
    lower, upper = schema.target_range
    return (upper - lower) / 2
