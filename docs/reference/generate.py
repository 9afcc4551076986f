"""Writes train.md: every option of `tacit train`, from its one definition."""

from __future__ import annotations

from pathlib import Path

from tacit.cli.build_model import recipe_for
from tacit.cli.schema import Option, options_of, sections_of
from tacit.cli.settings import TrainSettings

PAGE = Path(__file__).parent / "train.md"
INTRODUCTION = """# Settings of `tacit train`

Made by `python docs/reference/generate.py`; do not edit by hand.

Each setting is an option of the command line and a key of a TOML file, in the section of its
heading. Command-line options override `--config`, which overrides the defaults.

```toml
# tacit train --config run.toml --seed 1
[data]
dataset = "mnist"
[privacy]
epsilon = 3.0
[clipping]
max_norm = 0.1
```

The `run.json` of a run holds its settings under `config.settings`.
`tacit train --config runs/x/run.json` starts a new run with the same settings, in a new folder. It
is charged again, and equals the old run only if both had the same `--seed`.
"""


def page() -> str:
    lines = [INTRODUCTION]
    for part in sections_of(TrainSettings):
        lines += [f"## {part.title}: `[{part.name}]`", ""]
        lines += ["| setting | what it is | default | takes |", "|---|---|---|---|"]
        for o in options_of(TrainSettings).values():
            if o.section == part:
                lines.append(f"| `{o.flag}` | {o.help} | {o.default_text()} | {takes(o)} |")
        lines.append("")
    return "\n".join([*lines, *recipe_lines()])


def recipe_lines() -> list[str]:
    """The defaults "by dataset and query"."""
    lines = ["## Defaults by dataset and query", ""]
    lines += ["| query | dataset | " + " | ".join(f"`{flag}`" for _, flag in COLUMNS) + " |"]
    lines += ["|" + "---|" * (2 + len(COLUMNS))]
    for query in ("clip", "clipless", "batch-clip"):
        for features in ("as-they-are", "scattering"):
            for dataset in ("digits", "mnist", "fashion-mnist", "cifar10", "other"):
                recipe = recipe_for(dataset, query, features)
                if features == "scattering" and recipe == recipe_for(dataset, query):
                    continue
                name = dataset if features == "as-they-are" else f"{dataset}, scattering features"
                used = [
                    f"{getattr(recipe, field):g}" if field not in UNUSED[query] else "–"
                    for field, _ in COLUMNS
                ]
                lines.append(f"| {query} | {name} | {' | '.join(used)} |")
    return [*lines, ""]


COLUMNS = [
    ("batch_size", "--batch-size"),
    ("epochs", "--epochs"),
    ("learning_rate", "--lr"),
    ("temperature", "--temperature"),
    ("max_norm", "--max-norm"),
    ("gradient_clip", "--gradient-clip"),
    ("mini_set_size", "--mini-set-size"),
    ("mini_sets", "--mini-sets"),
]
UNUSED = {
    "clip": ("gradient_clip", "mini_set_size", "mini_sets"),
    "clipless": ("max_norm", "mini_set_size", "mini_sets"),
    "batch-clip": ("gradient_clip",),
}


def takes(o: Option) -> str:
    """The choices or the range, and the options that it goes with."""
    kinds = {bool: "true or false", int: "a whole number", float: "a number", Path: "a path"}
    said = [o.range.words if o.range else ", ".join(o.choices) or kinds.get(o.kind, "text")]
    if o.goes_with:
        said.append(f"goes with {o.goes_with.alternatives()}")
    if o.not_with:
        said.append(f"not with {o.not_with.alternatives()}")
    return "; ".join(said)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
