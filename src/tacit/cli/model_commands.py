"""`tacit certify`, `tacit inspect` and `tacit data`: a run's network, a network, and datasets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tacit.cli.console import JSON, print_facts, print_json
from tacit.cli.recipes import recipe_for
from tacit.cli.schema import options_of
from tacit.cli.settings import TrainSettings

if TYPE_CHECKING:
    import torch

    from tacit.certificates.accuracy import CertifiedAccuracy
    from tacit.cli.run_directory import SavedRun
    from tacit.data.scaling import Scaler
    from tacit.records import Records


def certify(
    folder: Path = typer.Argument(..., help="Folder of a run, as tacit train makes it."),
    radii: str = typer.Option("0,1,2,4,8,16", help="L2 radii in units of 1/255, with commas."),
    device: str = typer.Option("auto", help="Device to compute on: cpu, cuda or auto."),
    as_json: bool = JSON,
) -> None:
    """Show the certified accuracy of a run on held-out records.

    At radius r this is the share of records that are classified correctly whatever change of L2
    norm up to r is made to the input. It needs a network with a known Lipschitz constant. Writes
    certificate.json and certified.png into the folder.

    Example: tacit certify runs/x --radii 0,1,2,4,8,16,36
    """
    from rich.console import Console

    from tacit.cli.build_model import device_for

    try:
        sizes = [float(part) for part in radii.split(",")]
    except ValueError:
        raise ValueError(f"--radii is {radii!r}; give numbers such as 0,1,2,4") from None
    certified, facts = certificate_of(folder, sizes, device_for(device))
    if as_json:
        print_json(facts)
        return
    console = Console()
    console.print(certified.table())
    console.print(f"of {facts['inputs']}; written to {folder}/", highlight=False)


def certificate_of(
    folder: Path, radii: Sequence[float], device: torch.device
) -> tuple[CertifiedAccuracy, dict[str, Any]]:
    """Certify the run in `folder`; write certificate.json and certified.png, and return them."""
    from tacit.certificates.accuracy import certified_accuracy
    from tacit.cli.run_directory import read_run
    from tacit.report import source, write_json

    run = read_run(folder)
    test, scalers, inputs = held_out_records(run)
    certified = certified_accuracy(run.network().to(device), test, radii, before=scalers)
    facts = {**certified.facts(), "inputs": inputs, "dataset": test.name, **source()}
    write_json(facts, folder / "certificate.json")
    certified.plot(folder / "certified.png")
    return certified, facts


def held_out_records(run: SavedRun) -> tuple[Records, list[Scaler], str]:
    """The run's test records, the scalers between them and the network, and what they are.

    Images are certified as pixels, before the scalers; tables as the network sees them. The
    scalers are those in the run's folder: nothing is computed again.
    """
    from tacit.cli.build_data import unscaled_records
    from tacit.data.catalogue import lookup, registered_loader
    from tacit.data.preprocessing import load_preprocessing
    from tacit.data.scaling import Scaler

    d = run.settings
    if d.features != "as-they-are":
        raise ValueError(
            f"the run in {run.folder} was trained on {d.features} features, whose own Lipschitz "
            "constant is not counted: no certificate holds for the pixels before them"
        )
    preprocessing = load_preprocessing(run.folder)
    _, test = unscaled_records(d)
    name = d.dataset or "digits"
    published = d.data is None and registered_loader(name) is None
    if published and len(lookup(name).shape) == 3:
        scalers = [stage for stage in preprocessing.stages if isinstance(stage, Scaler)]
        assert len(scalers) == len(preprocessing.stages)  # features are refused above
        return test, scalers, "pixels in [0, 1], before any scaling"
    as_scaled = replace(test, inputs=preprocessing(test.inputs))
    return as_scaled, [], "inputs as the network is given them"


def inspect(
    dataset: str = typer.Option("digits", help="Named dataset, for the shape of its records."),
    model: str = typer.Option(
        "default", help="Network of tacit train. An ordinary one is replaced by its Lipschitz twin."
    ),
    temperature: float | None = typer.Option(
        None, help="Temperature of the cross-entropy loss. Default: depends on the dataset."
    ),
    gradient_clip: float | None = typer.Option(
        None,
        help="Limit on the norm of each record's loss gradient in the outputs; 0 for no limit. "
        "Default: depends on the dataset.",
    ),
    as_json: bool = JSON,
) -> None:
    """Show how far one record can move the gradient of a Lipschitz network, layer by layer.

    Example: tacit inspect --dataset mnist --model lipschitz-lenet
    """
    from rich.console import Console

    from tacit.cli.build_model import network_for
    from tacit.data.loading import load
    from tacit.lipschitz.propagation import propagate, sensitivity_table
    from tacit.losses.classification import CrossEntropy
    from tacit.losses.record_loss import ClippedLoss

    given = {"model": model, "temperature": temperature, "gradient_clip": gradient_clip}
    for name, value in given.items():
        options_of(TrainSettings)[name].require(value)
    records, _ = load(dataset)
    assert records.num_classes is not None
    network, changes = network_for(model, records.shape, records.num_classes, "clipless")
    recipe = recipe_for(dataset, "clipless")
    loss = CrossEntropy(recipe.temperature if temperature is None else temperature)
    limit = recipe.gradient_clip if gradient_clip is None else gradient_clip
    bounds = propagate(network, ClippedLoss(loss, limit) if limit else loss, records.shape)
    if as_json:
        rows = [vars(row) for row in bounds.layers]
        facts = {"layers": rows, "by_parameter": bounds.by_parameter, "total": bounds.total()}
        print_json({**facts, "changes": changes})
        return
    for change in changes:
        typer.echo(change, err=True)
    Console().print(sensitivity_table(bounds))


def data(
    name: str | None = typer.Argument(
        None, help="Dataset to fetch, verify and describe. Without it, all are listed."
    ),
    as_json: bool = JSON,
) -> None:
    """List the named datasets, or fetch, verify and describe one.

    Example: tacit data fashion-mnist
    """
    from rich.console import Console
    from rich.table import Table

    from tacit.data.catalogue import available
    from tacit.data.loading import load

    if name is not None:
        train, test = load(name)
        facts = {
            "name": train.name,
            "train_records": train.public_size,
            "test_records": test.public_size,
            "shape": "×".join(map(str, train.shape)),
            "classes": train.num_classes,
            "notes": list(train.notes) if as_json else "\n".join(train.notes),
        }
        print_facts(facts, as_json, "dataset")
    elif as_json:
        print_json({"datasets": list(available())})
    else:
        table = Table("dataset")
        for dataset in available():
            table.add_row(dataset)
        Console().print(table)
        typer.echo("use one: tacit train --dataset NAME, or tacit.load(NAME) in Python")
