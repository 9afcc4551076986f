"""`tacit inspect`, `certify` and `ledger`: what a network, run or ledger holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tacit.budget import Budget, Relation
from tacit.cli.accounting_commands import DELTA
from tacit.cli.console import JSON, print_json
from tacit.cli.schema import options_of
from tacit.cli.settings import TrainSettings

if TYPE_CHECKING:
    import torch

    from tacit.certificates.accuracy import CertifiedAccuracy
    from tacit.data.scaling import Scaler
    from tacit.ledger import Statement
    from tacit.records import Records
    from tacit.report.saved_run import SavedRun


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

    from tacit.cli.console import device_for

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
    from tacit.report.folder_files import write_json
    from tacit.report.read_folder import load_run
    from tacit.report.run_folder import source

    run = load_run(folder, device=device)
    test, scalers, inputs = held_out_records(run)
    certified = certified_accuracy(run.model, test, radii, before=scalers)
    facts = {**certified.facts(), "inputs": inputs, "dataset": test.name, **source()}
    write_json(facts, folder / "certificate.json")
    certified.plot(folder / "certified.png")
    return certified, facts


def held_out_records(run: SavedRun) -> tuple[Records, list[Scaler], str]:
    """The run's test records, the scalers between them and the network, and what they are.

    Images are certified as pixels, before the scalers; tables as the network sees them. The
    scalers are those in the run's folder: nothing is computed again.
    """
    from tacit.cli.build_data import load_records
    from tacit.cli.run_directory import settings_of
    from tacit.data.catalogue import lookup, registered_loader
    from tacit.data.scaling import Scaler

    d = settings_of(run)
    if d.features != "as-they-are":
        raise ValueError(
            f"the run in {run.folder} was trained on {d.features} features, whose own Lipschitz "
            "constant is not counted: no certificate holds for the pixels before them"
        )
    preprocessing = run.preprocessing
    _, test = load_records(d, scaled=False)
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

    from tacit.cli.build_model import architecture_for, recipe_for
    from tacit.data.loading import load
    from tacit.lipschitz.propagation import propagate, sensitivity_table
    from tacit.losses.classification import CrossEntropy
    from tacit.losses.record_loss import ClippedLoss

    given = {"model": model, "temperature": temperature, "gradient_clip": gradient_clip}
    for name, value in given.items():
        options_of(TrainSettings)[name].require(value)
    records, _ = load(dataset)
    assert records.num_classes is not None
    network, changes = architecture_for(
        model, records.shape, records.num_classes, "clipless"
    ).build()
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


# ---- ledgers -------------------------------------------------------------------------------------


ledger_app = typer.Typer(
    help="Show, check or make a ledger. Example: tacit ledger show runs/x/ledger.sqlite",
    no_args_is_help=True,
)
FILE = typer.Argument(..., help="File of the ledger.")


@ledger_app.command()
def show(file: Path = FILE, as_json: bool = JSON) -> None:
    """Show every run that the ledger holds, and their total. The file is only read.

    The head that is printed last changes with each charge. Keep it elsewhere:
    `tacit ledger verify` then detects a ledger that was rewritten, or replaced
    by an older copy.

    Example: tacit ledger show runs/x/ledger.sqlite --json
    """
    from tacit.ledger.statement import read_statement

    _require_file(file)
    _print(read_statement(file), as_json)


@ledger_app.command()
def verify(
    file: Path = FILE,
    head: str | None = typer.Option(None, help="A head that the ledger had, as show prints it."),
    anchor: Path | None = typer.Option(None, help="The file that follows the ledger's head."),
    as_json: bool = JSON,
) -> None:
    """Check that no row of the ledger was changed, and that it continues a head it once had.

    The file is only read. Without --head or --anchor, it cannot tell an older
    copy of the whole file from the newest.

    Example: tacit ledger verify runs/x/ledger.sqlite --head 6b1f…
    """
    from tacit.ledger.statement import verify_file

    _require_file(file)
    statement = verify_file(file, head, anchor)
    if as_json:
        print_json({"verified": True, **statement.facts()})
        return
    against = [name for name, given in (("head", head), ("anchor", anchor)) if given is not None]
    continues = f", and it continues the {' and the '.join(against)}" if against else ""
    typer.echo(f"every row is as it was written{continues}\nhead {statement.head}")


@ledger_app.command()
def anchor(
    file: Path = FILE,
    target: Path = typer.Argument(..., help="File to write; best on another disk or machine."),
) -> None:
    """Write the ledger's head to a file, for `verify --anchor` and tacit.Ledger(anchor=...).

    Example: tacit ledger anchor data.sqlite /backup/data.anchor.json
    """
    from tacit.ledger import Ledger
    from tacit.ledger.statement import verify_file

    _require_file(file)
    if target.exists():
        verify_file(file, anchor=target)
    with Ledger(file) as book:
        book.write_anchor(target)
        typer.echo(f"head {book.head} written to {target}")


@ledger_app.command()
def create(
    file: Path = FILE,
    epsilon: float = typer.Option(..., help="ε that all runs together may spend."),
    delta: float = DELTA,
    relation: Relation = typer.Option(Relation.ADD_OR_REMOVE_ONE, help="Neighbouring relation."),
    as_json: bool = JSON,
) -> None:
    """Make a ledger for several runs over the same data.

    Example: tacit ledger create mnist.sqlite --epsilon 8 --delta 1e-5
    """
    from tacit.ledger import Ledger

    if file.exists():
        raise ValueError(f"{file} exists already; a ledger's budget is fixed when it is made")
    with Ledger(file, Budget(epsilon, delta, relation)) as book:
        _print(book.statement(), as_json)


def _require_file(file: Path) -> None:
    if not file.exists():
        raise ValueError(f"there is no ledger at {file}; make one with: tacit ledger create {file}")


def _print(statement: Statement, as_json: bool) -> None:
    if as_json:
        print_json(statement.facts())
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("run", "started", "steps", "ε charged", "ε planned", "noise", "sampling")
    for run in statement.runs:
        table.add_row(
            run.name,
            run.started[:16].replace("T", " "),
            f"{run.steps}/{'?' if run.step_limit is None else run.step_limit}",
            f"{run.epsilon:.4g}",
            f"{run.epsilon_planned:.4g}",
            f"{run.plan.noise_multiplier:.4g}" if run.plan else "?",
            run.plan.scheme.describe() if run.plan else run.note,
        )
    console = Console()
    console.print(table)
    budget = statement.budget
    console.print(
        f"guaranteed ε {statement.epsilon:.4g}, charged so far {statement.epsilon_charged:.4g} of "
        f"{budget.epsilon:g} ({statement.method}), δ {budget.delta:g}, {budget.relation}",
        highlight=False,
    )
    console.print(f"head {statement.head}", highlight=False, soft_wrap=True)
    if any(run.exclusive for run in statement.runs):
        console.print("one run took the whole budget: no other run can be added", highlight=False)
