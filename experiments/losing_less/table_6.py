"""Tables 6 and 7: the search for e_t and β that the paper's values come from.

Table 7's grid, coarser by default, with γ of Table 6, scored on 5,000 training records that were
held out. The search is not charged for, as in the paper.

    python experiments/losing_less/table_6.py --workers 3 --out table_6.json
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from figure import main
from recipes import NAMES, RECIPES
from runs import Setting, paper_setting

EPOCHS, BETAS = (0, 2, 4, 7, 10), (1, 11, 51, 191)


def settings() -> dict[str, Setting]:
    return {
        f"{NAMES[dataset]}, {features}, e_t {epoch}, beta {beta}": replace(
            paper_setting(dataset, features, "tailored"),
            threshold_epoch=epoch,
            beta=beta,
        )
        for dataset, features in RECIPES
        for epoch in EPOCHS
        for beta in BETAS
    }


SETTINGS = settings()


def table_6(arguments: Sequence[str] | None = None) -> dict:
    """The table, and under `chosen` the best setting of each task."""
    found = main("Tables 6 and 7: search", SETTINGS, arguments, held_out=True)
    best: dict[str, tuple[float, str]] = {}
    for name, row in found["settings"].items():
        task = name.partition(", e_t")[0]
        best[task] = max(best.get(task, (-1.0, "")), (row["median"], name))
    found["chosen"] = {task: name for task, (_, name) in best.items()}
    for name in found["chosen"].values():
        print("chosen:", name)
    return found


if __name__ == "__main__":
    table_6()
