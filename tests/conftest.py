"""For all tests: one thread each, since several processes of them share the cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
