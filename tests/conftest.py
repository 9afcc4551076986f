"""For all tests: one thread each, since several processes of them share the cores."""

from __future__ import annotations

import os

# Before NumPy and PyTorch are imported, and for the processes that tests start.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import torch  # noqa: E402

torch.set_num_threads(1)
