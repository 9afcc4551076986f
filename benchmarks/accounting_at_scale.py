"""ε and processor time of one call, over sampling rates, noise, steps, δ and relations.

    python benchmarks/accounting_at_scale.py --out rows.jsonl

`--out` gets one row per case: relation, rate, noise multiplier, steps, δ, ε, seconds of processor
time. Run it in two versions of Tacit to compare them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path

from tacit import epsilon
from tacit.budget import Relation
from tacit.sampling import Poisson

RATES, NOISE = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6), (0.4, 0.5, 1.0, 3.0, 10.0)
STEPS, DELTAS = (1, 1000, 10**6), (1e-5, 1e-10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    cases = itertools.product(RATES, NOISE, STEPS, DELTAS, Relation)
    with parser.parse_args().out.open("w") as out:
        for q, z, steps, delta, relation in cases:
            started = time.process_time()
            found = epsilon(z, Poisson(q), steps, delta=delta, relation=relation)
            seconds = round(time.process_time() - started, 3)
            row = [relation.value, q, z, steps, delta, found, seconds]
            out.write(json.dumps(row) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
