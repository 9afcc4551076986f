"""The subsampling operator of f-DP."""

from __future__ import annotations

import numpy as np

from tacit.accounting.trade_off import TradeOff


def subsample(curve: TradeOff, probability: float) -> TradeOff:
    """C_p(f) = min{f_p, f_p⁻¹}**, f_p = p·f + (1 − p)·Id, Id(α) = 1 − α.  [Dong 2022, Sec. 4]

    If M is f-DP on m records under replace-one, M on a sample of m of N records without
    replacement is C_{m/N}(f)-DP, in both directions [Dong 2022, Sec. 4].

    Where f is the largest of lines 1 − δ − e^ε·α, f_p is that of p·(1 − δ − e^ε·α) +
    (1 − p)·(1 − α) = 1 − p·δ − (1 + p·(e^ε − 1))·α: again a line, with ε' = log(1 + p·(e^ε − 1))
    and δ' = p·δ. Those with ε ≥ 0 and their mirror images have min{f_p, f_p⁻¹}** as their
    envelope: the other lines of f_p are flatter than −1, where f_p⁻¹ is lower. So nothing is
    rounded but the lines of f themselves, and a curve that is not above f makes one that is not
    above C_p(f).
    """
    if not 0 < probability <= 1:
        raise ValueError(f"probability is {probability}; give a number above 0 and at most 1")
    before, deltas = curve.epsilons, curve.deltas
    if before[0] > 0:
        # A line of slope −1 through a corner of f adds nothing to f, but its image does to f_p.
        before, deltas = np.append(0.0, before), np.append(curve.advantage, deltas)
    # log(1 + p·(e^ε − 1)) = ε + log(p + (1 − p)·e^(−ε)), whose exponent cannot overflow.
    small = np.log1p(probability * np.expm1(np.minimum(before, 1.0)))
    large = before + np.log(probability + (1 - probability) * np.exp(-before))
    # Two lines may meet in one double: the lower δ, which is the later one's, holds for both.
    epsilons, last = np.unique(np.where(before < 1, small, large)[::-1], return_index=True)
    return TradeOff(epsilons, (probability * deltas)[::-1][last], curve.relation)
