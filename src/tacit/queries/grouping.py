"""Few blocks instead of many: layers whose gradients have similar norms are clipped together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from tacit.queries.blocks import Blocks


def group_by_norm(blocks: Blocks, expected: Sequence[float], groups: int) -> Blocks:
    """The partition into `groups` groups with the least spread of log e_h within them.

    Layerwise clipping of L blocks costs √L of the noise multiplier; clipped as one, blocks of
    norms e_h and e_j cost nothing more, as long as one constant suits both [Nguyen 2023, B.2].
    Minimises Σ_groups Σ_{h ∈ group} (log e_h − mean)². On a line the best groups are runs of the
    sorted values, so dynamic programming over cuts is exact: O(L²·G).

    `expected` must be public, such as `expected_norms` on a public set.
    """
    if len(expected) != len(blocks):
        raise ValueError(f"{len(expected)} norms for {len(blocks)} blocks; give one a block")
    if not 1 <= groups <= len(blocks):
        raise ValueError(f"{groups} groups of {len(blocks)} blocks; give 1 up to {len(blocks)}")
    if not all(math.isfinite(e) and e >= 0 for e in expected):
        raise ValueError(f"expected norms are {list(expected)}; give finite numbers of at least 0")
    least = 1e-12 * (max(expected) or 1.0)
    order = sorted(range(len(blocks)), key=lambda h: expected[h])
    logs = [math.log(max(expected[h], least)) for h in order]
    cuts = _best_cuts(logs, groups)
    return tuple(
        tuple(name for h in sorted(order[start:end]) for name in blocks[h])
        for start, end in itertools.pairwise(cuts)
    )


def _best_cuts(values: Sequence[float], groups: int) -> list[int]:
    """0 = c_0 < c_1 < … < c_G = L: where to cut a sorted list for the least sum of squares."""
    count = len(values)

    def spread(start: int, end: int) -> float:
        part = values[start:end]
        mean = math.fsum(part) / len(part)
        return math.fsum((v - mean) ** 2 for v in part)

    best = {(0, 0): (0.0, 0)}
    for parts in range(1, groups + 1):
        for end in range(parts, count + 1):
            best[parts, end] = min(
                (best[parts - 1, start][0] + spread(start, end), start)
                for start in range(parts - 1, end)
                if (parts - 1, start) in best
            )
    cuts = [count]
    for parts in range(groups, 0, -1):
        cuts.append(best[parts, cuts[-1]][1])
    return cuts[::-1]
