"""Settings that `tacit train` starts from when it is not told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """Batch size, epochs, learning rate, momentum and clipping norm for a dataset."""

    batch_size: int
    epochs: float
    learning_rate: float
    momentum: float = 0.9
    max_norm: float = 0.1


# The image rows are Table 5 of Losing Less (end-to-end networks), itself from [Tramèr 2021].
RECIPES = {
    "digits": Recipe(batch_size=720, epochs=30, learning_rate=4.0, max_norm=0.25),
    "mnist": Recipe(batch_size=512, epochs=40, learning_rate=0.5),
    "fashion-mnist": Recipe(batch_size=2048, epochs=40, learning_rate=4.0),
    "cifar10": Recipe(batch_size=1024, epochs=30, learning_rate=1.0),
}
OTHERWISE = Recipe(batch_size=1024, epochs=20, learning_rate=2.0, max_norm=0.25)


def recipe_for(name: str) -> Recipe:
    return RECIPES.get(name, OTHERWISE)
