"""`tacit predict` and `tacit export`: use the model of a run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from tacit.cli.console import JSON, print_facts, print_json

FOLDER = typer.Argument(..., help="Folder of a run, as tacit train makes it.")
IMPORT = typer.Option(
    False,
    "--import-model",
    help="Import the module that the folder names, which runs its code. For a network of your own, "
    "in a folder whose author you trust.",
)
_SUFFIXES = (".csv", ".npz")


def predict(
    folder: Path = FOLDER,
    data: Path | None = typer.Argument(
        None, help="Records to predict: .csv, .tsv, .parquet, or .npz with the array X."
    ),
    dataset: str | None = typer.Option(
        None, help="Predict the test records of this named dataset instead of a file."
    ),
    out: Path | None = typer.Option(
        None, help="File to write: .csv, or .npz. Without it, CSV is printed."
    ),
    overwrite: bool = typer.Option(False, help="Replace the file of --out."),
    device: str = typer.Option("auto", help="Device to compute on: cpu, cuda or auto."),
    import_model: bool = IMPORT,
    as_json: bool = JSON,
) -> None:
    """Predict new records with the model of a run.

    A table has its columns found by name; others, such as the target, are
    ignored. The output has one row per record: the prediction, and the
    probability of each class.

    Example: tacit predict runs/x new.csv --out predictions.csv
    """
    if (data is None) == (dataset is None):
        given = "neither is given" if data is None else "both are given"
        raise ValueError(f"give a file of records or --dataset; {given}")
    if out is not None:
        _check_out(out, overwrite)
    # These import torch, for which the help must not wait.
    import numpy as np

    from tacit.cli.console import device_for
    from tacit.data.download import whole_file
    from tacit.data.loading import load
    from tacit.report.read_folder import load_model
    from tacit.report.saved_run import columns_as_text, prediction_columns

    run = load_model(folder, import_model=import_model, device=device_for(device))
    given_records = data if dataset is None else load(dataset, scale=None)[1]
    columns = prediction_columns(run, run.outputs(given_records))
    if out is not None:
        with whole_file(out) as draft:
            if out.suffix.lower() == ".npz":
                np.savez_compressed(draft, allow_pickle=False, **columns)
            else:
                draft.write_text(columns_as_text(columns), encoding="utf-8")
    count = len(next(iter(columns.values())))
    if as_json:
        facts: dict[str, Any] = {
            "records": count,
            "task": run.task,
            "out": None if out is None else str(out),
        }
        if out is None:
            facts["columns"] = {name: column.tolist() for name, column in columns.items()}
        print_json(facts)
    elif out is None:
        typer.echo(columns_as_text(columns), nl=False)
    else:
        typer.echo(f"{count:,} predictions written to {out}")


def export(
    folder: Path = FOLDER,
    format: str = typer.Option("onnx", help="Format of the file: onnx."),
    out: Path | None = typer.Option(
        None, help="File to write.", show_default="model.onnx in FOLDER"
    ),
    overwrite: bool = typer.Option(False, help="Replace the file of --out."),
    import_model: bool = IMPORT,
    as_json: bool = JSON,
) -> None:
    """Export the model of a run, with its preprocessing, and check the file.

    onnxruntime must agree with PyTorch on random records before the file is
    written. Its metadata holds the class names and the privacy statement.

    Example: tacit export runs/x --format onnx --out model.onnx
    """
    if format != "onnx":
        raise ValueError(f"--format is {format}; give onnx")
    target = out or folder / "model.onnx"
    if target.suffix.lower() != ".onnx":
        raise ValueError(f"--out is {target}; give a file that ends in .onnx")
    if target.exists() and not overwrite:
        raise ValueError(f"{target} exists already; give another --out, or --overwrite")
    from tacit.report.read_folder import load_run

    facts = load_run(folder, import_model=import_model).export_onnx(target)
    print_facts(facts if as_json else {n: _shown(v) for n, v in facts.items()}, as_json, "export")


def _check_out(out: Path, overwrite: bool) -> None:
    if out.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"--out is {out}; give a file that ends in {' or '.join(_SUFFIXES)}")
    if out.exists() and not overwrite:
        raise ValueError(f"{out} exists already; give another --out, or --overwrite")


def _shown(value: object) -> object:
    return "; ".join(map(str, value)) if isinstance(value, list) else value
