"""`tacit certify`: how robust the network of a run provably is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console

from tacit.certificates.accuracy import CertifiedAccuracy, certified_accuracy
from tacit.cli import accounting_options as options
from tacit.cli.devices import device_from
from tacit.cli.feature_options import FeaturesName
from tacit.cli.saved_run import SavedRun, read_run
from tacit.cli.train_data import load_records, unscaled
from tacit.data.catalogue import lookup
from tacit.data.loading import load
from tacit.data.preprocessing import load_preprocessing
from tacit.data.scaling import Scaler
from tacit.records import Records
from tacit.report.run_folder import source, to_json, write_json

PIXELS = "pixels in [0, 1], before any scaling"
AS_SCALED = "inputs as the network is given them"


def certify(
    folder: Path = typer.Argument(..., help="The folder of a run, as tacit train --out makes it."),
    radii: str = typer.Option("0,1,2,4,8,16", help="L2 radii, in 1/255."),
    device: str = typer.Option("auto", help="cpu, cuda, or auto."),
    as_json: bool = options.JSON,
) -> None:
    """The share of held-out records that no small change of the input can move to another class.

    For networks with a known Lipschitz constant. Writes certificate.json and certified.png into
    the folder.

    Example: tacit certify runs/x --radii 0,1,2,4,8,16,36
    """
    found, facts = certificate_of(folder, _numbers(radii), device_from(device))
    about = facts["inputs"]
    if as_json:
        typer.echo(to_json(facts))
        return
    console = Console()
    console.print(found.table())
    console.print(f"of {about}; written to {folder}/", highlight=False)


def certificate_of(
    folder: Path, radii: Sequence[float], device: torch.device
) -> tuple[CertifiedAccuracy, dict[str, Any]]:
    """Certify the run in `folder`; write certificate.json and certified.png, and return them."""
    run = read_run(folder)
    test, before, about = held_out(run)
    network = run.network().to(device)
    found = certified_accuracy(network, test, radii, before=before)
    facts = {**found.facts(), "inputs": about, "dataset": test.name, **source()}
    write_json(facts, folder / "certificate.json")
    found.plot(folder / "certified.png")
    return found, facts


def held_out(run: SavedRun) -> tuple[Records, list[Scaler], str]:
    """The run's test records, the scalers between them and the network, and what they are.

    Images are certified as pixels, for which the scalers count; tables as the network sees them.
    Scalers are those that the run's folder holds: none is computed anew.
    """
    features = run.options.get("features", FeaturesName.AS_THEY_ARE)  # older runs say nothing
    if features != FeaturesName.AS_THEY_ARE:
        raise ValueError(
            f"the run in {run.folder} was trained on {features} features, whose own Lipschitz "
            "constant is not counted: no certificate holds for the pixels before them"
        )
    preprocessing = load_preprocessing(run.folder)
    told = run.data_options()
    if told.file is None and len(lookup(told.dataset).shape) == 3:
        _, test = load(told.dataset, scale=None)
        scalers = [stage for stage in preprocessing.stages if isinstance(stage, Scaler)]
        assert len(scalers) == len(preprocessing.stages)  # features are refused above
        return test, scalers, PIXELS
    if told.file is None:
        _, test = load(told.dataset, scale=None)
    else:
        _, test = load_records(unscaled(told))
    return replace(test, inputs=preprocessing(test.inputs)), [], AS_SCALED


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--radii is {text!r}; give numbers such as 0,1,2,4") from None
