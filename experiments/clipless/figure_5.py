"""Figure 5: speed and memory of clipless training against the batch size.

The measuring is a benchmark's: this runs `benchmarks/clipless_speed.py` with the same arguments.

    python experiments/clipless/figure_5.py --batch-sizes 256 1024 4096 --out figure_5.json
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

if __name__ == "__main__":
    sys.path.insert(0, str(BENCHMARKS))
    runpy.run_path(str(BENCHMARKS / "clipless_speed.py"), run_name="__main__")
