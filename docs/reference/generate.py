"""Writes train.md: every option of `tacit train`, from its one definition."""

from __future__ import annotations

from pathlib import Path

from tacit.cli.schema import Option, options_of, sections_of
from tacit.cli.settings import TrainSettings

PAGE = Path(__file__).parent / "train.md"
INTRODUCTION = """# Settings of `tacit train`

Made by `python docs/reference/generate.py`; do not edit by hand.

Each setting is an option of the command line and a key of a TOML file, in the section of its
heading. Options of the command line come first, then `--config`, then the defaults.

```toml
# tacit train --config run.toml --seed 1
[data]
dataset = "mnist"
[privacy]
epsilon = 3.0
[clipping]
max_norm = 0.1
```

The `run.json` of a run holds its settings under `config.settings`, so that
`tacit train --config runs/x/run.json` repeats it in a new folder.
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
    return "\n".join(lines)


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
