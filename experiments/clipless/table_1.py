"""Table 1 and Figure 4: certified accuracy on CIFAR-10 against the published best of each radius.

The published figures are at ε = 20 and chosen on the test records, each radius on its own; ours are
one network's, chosen on held-out training records. Shows what `figure_3b.py` has written:

    python experiments/clipless/figure_3b.py --search --tasks cifar10/certified --out search.jsonl
    python experiments/clipless/figure_3b.py --chosen search.jsonl --tasks cifar10/certified \\
        --epsilons 2 4 8 --out final.jsonl
    python experiments/clipless/table_1.py final.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from figure_3b import lines_of
from image_search import summaries

PUBLISHED = {"0": 47.4, "1": 39.1, "2": 35.6, "4": 30.9, "8": 25.9, "16": 19.7}


def main(arguments: Sequence[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("final", type=Path, help="final runs, as figure_3b.py writes them")
    asked = parser.parse_args(arguments)
    rows = [row for row in summaries(lines_of(asked.final)) if row["certified"]]
    return table(rows)


def table(rows: Sequence[dict]) -> str:
    """In Markdown: a row a task and ε, a column a radius over 255."""
    said = ["| | " + " | ".join(PUBLISHED) + " |", "|---" * (len(PUBLISHED) + 1) + "|"]
    for row in rows:
        name = f"{row['task'].partition('/')[0]}, ε = {row['target_epsilon']:g}"
        name += f", {row['setting']['model']}, {len(row['seeds'])} seeds"
        shares = (row["certified"][radius] for radius in PUBLISHED)
        cells = (f"{100 * mean:.1f} ± {100 * std:.1f}" for mean, std in shares)
        said.append(f"| {name} | " + " | ".join(cells) + " |")
    published = " | ".join(f"{share:.1f}" for share in PUBLISHED.values())
    said.append(f"| published, cifar10, ε = 20 | {published} |")
    return "\n".join(said)


if __name__ == "__main__":
    print(main())
