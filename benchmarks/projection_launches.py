"""How many operations does it take to project each group of the light twin's weights?

Counted on a CPU by PyTorch's dispatcher, views left out, on the way that a GPU goes: there both
bounds of a norm are computed, as nobody waits to see whether the first is enough.

    python benchmarks/projection_launches.py
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from clipless_speed import light_twin
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tacit.lipschitz import convolution_norm, operator_norm, sets
from tacit.lipschitz.projection import _keeper_of
from tacit.report.run_folder import source

VIEWS = {"view", "_unsafe_view", "transpose", "expand", "unbind", "diagonal", "slice", "select",
         "detach", "unsqueeze", "squeeze", "t", "permute", "alias", "as_strided"}  # fmt: skip


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name not in VIEWS:
            self.found[name] += 1
        return function(*args, **(kwargs or {}))


def both_bounds(w_LMN: Tensor, squarings: int = 5) -> Tensor:
    gram = operator_norm.gram_matrix(w_LMN)
    near = operator_norm.near_orthogonal_upper(gram)
    return torch.minimum(near, operator_norm.gram_iteration_upper(gram, near, squarings))


def main() -> None:
    print(source())
    for module in (sets, convolution_norm):
        if hasattr(module, "operator_norm_upper"):
            module.operator_norm_upper = both_bounds
    keeper = _keeper_of(light_twin(32))
    assert keeper is not None
    for alike in keeper.groups:
        with Counting() as counted, torch.no_grad():
            alike.keep(alike.within.project(alike.now()))
        found = counted.found
        shape = "×".join(map(str, alike.certified.shape[1:]))
        most = ", ".join(f"{count} {name}" for name, count in found.most_common(6))
        print(f"{shape}: {sum(found.values())} ({most}, …)")


if __name__ == "__main__":
    main()
