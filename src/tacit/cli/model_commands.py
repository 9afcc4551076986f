"""`tacit certify`, `tacit inspect` and `tacit data`: a run's network, a network, and datasets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tacit.cli.output import JSON, print_facts, print_json
from tacit.cli.recipes import recipe_for
from tacit.cli.schema import LIMIT

if TYPE_CHECKING:
    import torch

    from tacit.certificates.accuracy import CertifiedAccuracy
    from tacit.cli.saved_run import SavedRun
    from tacit.data.scaling import Scaler
    from tacit.records import Records


def certify(
    folder: Path = typer.Argument(..., help="Folder of a run, as tacit train --out makes it."),
    radii: str = typer.Option("0,1,2,4,8,16", help="L2 radii, in 1/255."),
    device: str = typer.Option("auto", help="cpu, cuda or auto."),
    as_json: bool = JSON,
) -> None:
    """Show the share of held-out records that no small change of the input moves to another class.

    For networks with a known Lipschitz constant. Writes certificate.json and
    certified.png into the folder.

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
    from tacit.cli.saved_run import read_run
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

    d = run.settings.data
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
    model: str = typer.Option("default", help="Network, or its Lipschitz twin."),
    temperature: float | None = typer.Option(None, help="Temperature of the cross-entropy loss."),
    gradient_clip: float | None = typer.Option(
        None, help="Limit on the loss gradient of each record in the outputs; 0 for none."
    ),
    as_json: bool = JSON,
) -> None:
    """Show, layer by layer, how far one record can move a Lipschitz network's gradient.

    Example: tacit inspect --dataset mnist --model lipschitz-lenet
    """
    from rich.console import Console

    from tacit.cli.build_model import NETWORKS, network_for
    from tacit.data.loading import load
    from tacit.lipschitz.propagation import propagate, sensitivity_table
    from tacit.losses.classification import CrossEntropy
    from tacit.losses.record_loss import ClippedLoss

    if gradient_clip is not None and not LIMIT.contains(gradient_clip):
        raise ValueError(f"--gradient-clip is {gradient_clip}; give {LIMIT.words}")
    if model not in NETWORKS:
        raise ValueError(f"--model is {model}; give one of {', '.join(NETWORKS)}")
    records, _ = load(dataset)
    network, changes = network_for(model, records, "clipless")
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
    name: str | None = typer.Argument(None, help="Dataset to fetch, verify and describe."),
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
        for known in available():
            table.add_row(known)
        Console().print(table)
        typer.echo("tacit train --dataset NAME, or tacit.load(NAME) in Python")
