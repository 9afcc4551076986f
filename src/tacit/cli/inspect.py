"""`tacit inspect`: the bounds of a Lipschitz network, before anything is trained."""

from __future__ import annotations

import typer
from rich.console import Console

from tacit.cli import accounting_options as options
from tacit.cli.networks import ModelName, QueryName, network_for
from tacit.cli.numbers import check_gradient_clip
from tacit.cli.recipes import recipe_for
from tacit.data.loading import load
from tacit.lipschitz.propagation import propagate, sensitivity_table
from tacit.losses.classification import CrossEntropy
from tacit.losses.loss_constant import ClippedLoss
from tacit.report.run_folder import to_json


def inspect(
    dataset: str = typer.Option("digits", help="A named dataset, for the shape of its records."),
    model: ModelName = typer.Option(ModelName.DEFAULT, help="The network, or its Lipschitz twin."),
    temperature: float | None = typer.Option(None, help="Of the cross-entropy loss."),
    gradient_clip: float | None = typer.Option(
        None, help="Limit each record's loss gradient in the outputs; 0 for no limit."
    ),
    as_json: bool = options.JSON,
) -> None:
    """Show, layer by layer, how far one record can move a Lipschitz network's gradient.

    Example: tacit inspect --dataset mnist --model lipschitz-lenet
    """
    check_gradient_clip(gradient_clip)
    records, _ = load(dataset)
    network, changes = network_for(model, records, QueryName.CLIPLESS)
    recipe = recipe_for(dataset, QueryName.CLIPLESS)
    loss = CrossEntropy(recipe.temperature if temperature is None else temperature)
    limit = recipe.gradient_clip if gradient_clip is None else gradient_clip
    found = propagate(network, ClippedLoss(loss, limit) if limit else loss, records.shape)
    if as_json:
        rows = [vars(row) for row in found.layers]
        facts = {"layers": rows, "by_parameter": found.by_parameter, "total": found.total()}
        typer.echo(to_json({**facts, "changes": changes}))
        return
    for change in changes:
        typer.echo(change, err=True)
    Console().print(sensitivity_table(found))
