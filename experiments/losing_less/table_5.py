"""Tables 5 and 6: the recipes, the ε that they really have, and the noise that ε = 3 asks for.

    python experiments/losing_less/table_5.py --out table_5.json

`epsilon` is by PLD under Poisson sampling with the paper's noise, `noise at 3` what PLD allows.
`shuffled` is what the paper's noise gives at the least if batches are shuffled epochs instead, of
whole batches (an attack, see `shuffled.py`), `no amplification` what can be promised then
(replace-one).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from recipes import DELTA, NAMES, RECIPES, SIZES, Recipe, pld_noise
from shuffled import shuffled_epsilon

import tacit
from tacit.report.run_folder import source, to_json


def row_of(recipe: Recipe) -> dict:
    per_epoch = SIZES[recipe.dataset] // recipe.batch_size
    z = recipe.noise_multiplier
    epochs = tacit.sampling.ShuffledEpochs(math.ceil(SIZES[recipe.dataset] / recipe.batch_size))
    return {
        "dataset": NAMES[recipe.dataset],
        "features": recipe.features,
        "steps": recipe.steps,
        "paper's noise": z,
        "epsilon": tacit.epsilon(z, recipe.sampling, recipe.steps, delta=DELTA),
        "epsilon by RDP": tacit.accounting.epsilon_rdp(
            z, recipe.sampling, recipe.steps, delta=DELTA
        ),
        "noise at 3": pld_noise(recipe),
        "shuffled": shuffled_epsilon(z, per_epoch, recipe.epochs, DELTA),
        # The noise is of one record's clipped gradient; a replacement moves the sum by twice that.
        "no amplification": tacit.epsilon(
            z / 2,
            epochs,
            recipe.epochs * epochs.steps_per_epoch,
            delta=DELTA,
            relation=tacit.Relation.REPLACE_ONE,
        ),
    }


def main(arguments: Sequence[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None, help="JSON")
    asked = parser.parse_args(arguments)
    rows = [row_of(recipe) for recipe in RECIPES.values()]
    for row in rows:
        print(*(f"{v:.3f}" if isinstance(v, float) else v for v in row.values()), sep="\t")
    if asked.out is not None:
        asked.out.write_text(to_json({"rows": rows, "source": source()}) + "\n", encoding="utf-8")
    return rows


if __name__ == "__main__":
    main()
