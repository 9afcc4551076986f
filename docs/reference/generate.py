"""Writes train.md, search.md and finetune.md: every option, from its one definition."""

from __future__ import annotations

from pathlib import Path

from tacit.cli.build_model import recipe_for
from tacit.cli.finetune_settings import FinetuneSettings
from tacit.cli.schema import Option, options_of, sections_of
from tacit.cli.search_settings import SearchSettings
from tacit.cli.settings import TrainSettings

FOLDER = Path(__file__).parent
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


FINETUNE = """# Settings of `tacit finetune`

Made by `python docs/reference/generate.py`; do not edit by hand.

Each setting is an option of the command line and a key of a TOML file, in the section of its
heading. Command-line options override `--config`, which overrides the defaults.
[Fine-tuning a language model](../language-models.md) shows runs.
"""


SEARCH = """# Settings of `tacit search`

Made by `python docs/reference/generate.py`; do not edit by hand.

Each setting is an option of the command line and a key of a TOML file, in the section of its
heading. Command-line options override `--config`, which overrides the defaults.
[A search that is charged](../search.md) shows runs.
"""


def pages() -> dict[str, str]:
    """Each page by the name of its file."""
    train = [INTRODUCTION, *option_lines(TrainSettings), *recipe_lines()]
    return {
        "train.md": "\n".join(train),
        "search.md": "\n".join([SEARCH, *option_lines(SearchSettings)]),
        "finetune.md": "\n".join([FINETUNE, *option_lines(FinetuneSettings)]),
    }


def option_lines(settings: type) -> list[str]:
    lines = []
    for part in sections_of(settings):
        lines += [f"## {part.title}: `[{part.name}]`", ""]
        lines += ["| setting | what it is | default | takes |", "|---|---|---|---|"]
        for o in options_of(settings).values():
            if o.section == part:
                lines.append(f"| `{o.flag}` | {o.help} | {o.default_text()} | {takes(o)} |")
        lines.append("")
    return lines


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
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
