"""Compute ε and the curve of a privacy statement again: python verify_statement.py statement.json

It needs dp-accounting alone. docs/privacy-statement.md says what is compared."""

import hashlib
import json
import math
import sys
from pathlib import Path

import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution as plds
from scipy.stats import binom, norm

TOLERANCE = 1e-3  # of the stated ε, in either direction


def gaussian(z, rate, replace, h):  # z is over the most that one record, or a change of it, moves
    of_replace = {"neighboring_relation": NeighboringRelation.REPLACE_ONE, "sensitivity": 0.5}
    more = {"value_discretization_interval": h, "sampling_prob": rate}
    return plds.from_gaussian_mechanism(z, **more, **(of_replace if replace else {}))


def subset(z, p, h):  # C_p: losses above 0 as under Poisson sampling, mirrored; the rest is at 0
    top = math.log1p(p * math.expm1(min((0.5 + 9 * z) / z**2, 700)))
    losses = h * np.arange(math.ceil(top / h) + 1)
    x = (0.5 + z * z * np.log1p(np.expm1(losses) / p)) / z  # where the loss is this one
    none, one = -np.diff(norm.sf(x)), -np.diff(norm.sf(x - 1 / z))
    upper = (1 - p) * none + p * one
    high = np.clip((upper - np.exp(losses[:-1]) * none) / -np.expm1(-h), 0, upper)
    masses = np.append(upper - high, 0) + np.append(0, high)
    infinite = (1 - p) * norm.sf(x[-1]) + p * norm.sf(x[-1] - 1 / z)
    pmf = {i: m for i, m in enumerate(masses) if i and m > 0}
    pmf |= {-i: m * math.exp(-h * i) for i, m in pmf.items()}
    pmf[0] = 1 - infinite - sum(pmf.values())
    return plds.PrivacyLossDistribution.create_from_rounded_probability(pmf, infinite, h, True)


def loss_of(event, h):
    z, kind, q = event["noise_multiplier"], event["kind"], event.get("sampling_rate", 1.0)
    if kind == "sampled_without_replacement_gaussian":
        return subset(z, event["sample_size"] / event["population"], h)
    replace = event["relation"] == "replace-one" and "poisson" in kind
    loss = gaussian(z, 1.0 if "revealed" in kind else q, replace, h)
    if kind != "truncated_poisson_sampled_gaussian":
        return loss.compute_mixture(plds.identity(h), q) if "revealed" in kind else loss
    full = binom.sf(event["max_batch_size"] - 1, event["population"], q)
    return gaussian(z / 2, q, replace, h).compute_mixture(loss, full)


def wrong_figures(stated):
    plain = {k: v for k, v in stated.items() if k not in ("digests", "digest")}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    wrong = [] if hashlib.sha256(text.encode()).hexdigest() == stated["digest"] else ["digest"]
    epsilon, delta = float(stated["guarantee"]["epsilon"]), stated["guarantee"]["delta"]
    others = {event["relation"] for event in stated["events"]} - {stated["relation"]["name"]}
    wrong += ["relation"] if others and stated["unit"]["sampled"] == "record" else []
    if any(event["kind"] == "best_of_repeated_runs" for event in stated["events"]):
        return [*wrong, "the best of repeated runs has no pair of distributions: use tacit verify"]
    if any(event["noise_multiplier"] == 0 for event in stated["events"]):
        return wrong + ([] if math.isinf(epsilon) else ["epsilon: inf"])
    h, found, before, slack = 1e-3, math.inf, None, TOLERANCE * epsilon
    while before is None or (h > 1e-6 and found < math.inf and abs(found - before) > slack):
        h, before, total = h / 4, found, plds.identity(h / 4)
        for event in stated["events"]:
            total = total.compose(loss_of(event, h).self_compose(event["count"]))
        found = total.get_epsilon_for_delta(delta)
    pairs = [{"epsilon": epsilon, "delta": delta}, *stated["guarantee"]["profile"]]
    for e, d in ((float(pair["epsilon"]), pair["delta"]) for pair in pairs):
        at = total.get_epsilon_for_delta(d) if d > 1e-9 or d == delta else e
        if abs(e - at) > slack:
            wrong.append(f"epsilon {e} at delta {d}: {at}")
    print(f"epsilon {epsilon} at delta {delta}; by dp-accounting {found}")
    return wrong


if __name__ == "__main__" and (wrong := wrong_figures(json.loads(Path(sys.argv[1]).read_text()))):
    sys.exit("\n- ".join(["it does not hold", *wrong]))
