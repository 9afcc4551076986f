"""A privacy statement in plain words: as a page, as a block of a model card, for a registry.

Words are made from the content of a statement, and from nothing else; `sentence`, `released` and
`not_covered` are those that the statement itself holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tacit.budget import Relation

if TYPE_CHECKING:
    from tacit.accounting.plan import Plan

NEIGHBOURS = {
    Relation.ADD_OR_REMOVE_ONE.value: "the same data with one record added or removed",
    Relation.REPLACE_ONE.value: "the same data with one record replaced by any other",
}
_CHANGED = {
    Relation.ADD_OR_REMOVE_ONE.value: "added or removed",
    Relation.REPLACE_ONE.value: "replaced",
}
_ENDED_EARLY = "the run ended before its plan"
FLOATING_POINT = (
    "The bounds contain what rounding can do to a sum over a batch; for float32 that figure is "
    "measured, not proved. The noise is drawn in float64 from a cryptographic stream, is not "
    "exactly Gaussian, and is rounded to the type of the weights. Attacks on low bits are not "
    "ruled out for whoever sees released gradients at full precision."
)
NO_SIGNATURE = (
    "The digest in statement.json protects against slips, and not against forgery: whoever changes "
    "the file can compute it again. What counts is that the figures follow from the events, and "
    "that the ledger holds those events."
)
BEFORE, GRADIENTS = "before the first step", "gradients"  # what an event released
CHEAP_TRIALS = "cheap trials"  # the method of a search whose trials come before the first step
CHECK = "tacit verify statement.json --ledger ledger.sqlite"


def sentence(epsilon: float, delta: float, unit: str, relation: str) -> str:
    """The guarantee in one sentence."""
    return (
        f"The weights are differentially private in the training records, with epsilon "
        f"{epsilon:.4g} at delta {delta:g}, for neighbours that differ by one {unit} that is "
        f"{_CHANGED[relation]}. The records that they were measured on are not covered."
    )


def released(facts: Mapping[str, Any], plan: Plan | None) -> list[dict[str, Any]]:
    """What left the training records or was measured, and whether ε covers it."""
    used = (facts.get("config") or {}).get("used")
    used = used if isinstance(used, dict) else {}
    prelude = () if plan is None else plan.prelude
    rows: list[tuple[str, bool]] = [
        (
            f"the weights, made from {facts['steps']:,} noisy sums of bounded gradients and from "
            "nothing else of the training records",
            True,
        )
    ]
    if prelude:
        sizes = ", ".join(f"{event.noise_multiplier:.4g}" for event in prelude)
        rows.append(
            (
                f"{len(prelude)} Gaussian release{'s' if len(prelude) > 1 else ''} from the "
                "training records before the first step, such as the constants of scaling and "
                f"category counts, with noise multiplier {sizes}",
                True,
            )
        )
    if used.get("statistics"):
        rows.append((f"running statistics of BatchNorm: {used['statistics']}", True))
    if facts.get("samples"):
        rows.append(("text that the trained model wrote, which is made from its weights", True))
    if facts.get("loss") is not None or facts.get("history"):
        rows.append(("metrics of held-out records, without noise", False))
    if facts.get("confusion"):
        rows.append(("a confusion matrix of held-out records, without noise", False))
    if facts.get("certificate"):
        rows.append(("certified accuracy on held-out records, without noise", False))
    return [{"what": what, "covered": covered} for what, covered in rows]


def not_covered(facts: Mapping[str, Any]) -> list[str]:
    """What ε says nothing about."""
    architecture = (facts.get("model") or {}).get("architecture") or {}
    items = [
        "Metrics on held-out records: accuracy, loss, the confusion matrix and certified accuracy "
        "are computed from those records without noise.",
        "The search for settings: if learning rate, clipping or the model were chosen by looking "
        "at other runs on the same records, those runs cost privacy too. Charge all of them to "
        "one ledger (--ledger); its ε then counts them together.",
        "Public choices: data that was declared public, sizes, classes and ranges that were "
        "declared, weights that the model began with.",
        "What is true of a population: a model may reveal what holds for people like you, whether "
        "or not your record was among those it learned from.",
    ]
    if "auto_class" in architecture:
        items += [
            "What the base model was pretrained on, and whoever's text was in it.",
            "Prompts and filters that were chosen by looking at the training text.",
            "Text of a person in a record of somebody else.",
        ]
    if facts["seeded"]:
        items.insert(
            0,
            "This run was seeded. Whoever knows the seed, or sees another run that was drawn from "
            "it, can remove the noise: against them it is not private.",
        )
    return items


# ---- the page ------------------------------------------------------------------------------------


def paragraphs(content: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """(heading, sentences) in the order of NIST SP 800-226, less what is not covered.

    A list of what is not covered has a place of its own on every page.
    """
    parts = [
        ("What is protected", _unit(content)),
        ("Against whom", _against(content)),
        ("ε and δ", _promise(content)),
        ("What a test can learn", tests_of(content)),
        ("How batches were drawn", _sampling(content)),
        ("Noise", _noise(content)),
        ("What was released", _released(content)),
        (
            "Public by declaration",
            [f"{text[:1].upper()}{text[1:].rstrip('.')}." for text in content["public"]],
        ),
        ("Searched and charged", _searched(content)),
        ("Random draws", [_random(content), FLOATING_POINT]),
        ("Accounting", _accounting(content)),
        ("The ledger", _ledger(content["ledger"])),
    ]
    return [(heading, found) for heading, found in parts if found]


def page_of_words(content: Mapping[str, Any]) -> str:
    """The whole statement as Markdown."""
    covered, software = paragraphs(content), content["software"]
    lines = ["# Privacy statement", content["text"]]
    for heading, found in covered[:-1] if content["ledger"] else covered:
        lines += [f"## {heading}", *found]
        if heading == "What a test can learn":
            lines.append(_curve(content))
    lines += ["## What ε does not cover", "\n".join(f"- {i}" for i in content["not_covered"])]
    if content["notes"]:
        lines += ["### Notes of the run", "\n".join(f"- {note}" for note in content["notes"])]
    versions = ", ".join(f"{n} {v}" for n, v in software.items() if v is not None and n != "dirty")
    changed = " The code differed from that commit." if software.get("dirty") else ""
    lines += ["## Software", f"{versions}.{changed}"]
    if content["ledger"]:
        lines += ["## The ledger", *covered[-1][1]]
    lines += ["## Check it", f"`{CHECK}`", NO_SIGNATURE, f"Digest {content['digest']}, "
              f"{content['date']}."]  # fmt: skip
    return "\n\n".join(lines) + "\n"


def _curve(content: Mapping[str, Any]) -> str:
    guarantee = content["guarantee"]
    rows = [(f"{r['type_one']:g}", f"{r['type_two']:.4f}") for r in guarantee["errors"]]
    points = [(f"{float(r['epsilon']):.4g}", f"{r['delta']:.3g}") for r in guarantee["profile"]]
    return "\n\n".join(
        (
            markdown_table(rows, ("false alarms (type I)", "misses (type II), at least")),
            "The whole curve, as pairs that all hold at once:",
            markdown_table(points, ("ε", "δ")),
        )
    )


def markdown_table(rows: Sequence[Sequence[str]], header: Sequence[str] = ("", "")) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _unit(content: Mapping[str, Any]) -> list[str]:
    name = content["unit"]["name"]
    words = [
        "One record of the training data: one row of its table, one image. A person with several "
        "records has a weaker promise."
    ]
    if name != "record":
        words = [f"One record of the training data, which is one {name}."]
    if content["unit"]["sampled"] == "mini-set":
        words.append(
            "Records were dealt into fixed mini-sets, and the bound is on what a whole set adds. "
            "So it holds for each record of a set."
        )
    return words


def _against(content: Mapping[str, Any]) -> list[str]:
    relation = content["relation"]
    return [
        f"Neighbouring relation {relation['name']}: the run is compared with one on "
        f"{relation['neighbours']}. The promise holds against somebody who sees every released "
        "weight, knows all other records, and has any amount of time. Whoever holds the records "
        "and trains is trusted (the central model)."
    ]


def _promise(content: Mapping[str, Any]) -> list[str]:
    epsilon, delta = (float(content["guarantee"][name]) for name in ("epsilon", "delta"))
    exact = f"ε = {epsilon!r}, δ = {delta!r}"
    if not math.isfinite(epsilon):
        return [exact, "An infinite ε promises nothing: the run is not private."]
    factor = f"{math.exp(epsilon):.4g}" if epsilon < 700 else "more than 10³⁰⁰"
    compared = "with a record as without it"
    if content["relation"]["name"] == Relation.REPLACE_ONE.value:
        compared = "with a record as with any other in its place"
    return [
        exact,
        f"Whatever can be seen of the model is at most e^ε = {factor} times as likely {compared}, "
        f"plus δ = {delta:.4g}, and the other way round.",
    ]


def in_one_sentence(content: Mapping[str, Any]) -> str | None:
    """What the curve promises to one record; None without a curve."""
    advantage = content["guarantee"].get("advantage")
    if advantage is None:
        return None
    question = "whether a given record took part"
    if content["relation"]["name"] == Relation.REPLACE_ONE.value:
        question = "which of two given records took part"
    return (
        "From even odds, somebody who sees this model and knows all other records is right about "
        f"{question} at most {_rounded_up((1 + advantage) / 2)} of the time. A coin is right "
        "50% of the time."
    )


def tests_of(content: Mapping[str, Any]) -> list[str]:
    """What the best test achieves; empty without a curve."""
    first = in_one_sentence(content)
    if first is None:
        return []
    guarantee = content["guarantee"]
    (misses,) = (row["type_two"] for row in guarantee["errors"] if row["type_one"] == 0.05)
    words = [
        first,
        "A test that raises a false alarm 5% of the time detects the record at most "
        f"{_rounded_up(1 - misses)} of the time.",
    ]
    mu = guarantee["mu"]
    if math.isfinite(float(mu["value"])):
        words.append(f"Gaussian DP: μ = {float(mu['value']):.4g}, {mu['definition']}.")
    return words


def _rounded_up(share: float) -> str:
    """A bound from above stays one when it is written with four digits."""
    return f"{100 * math.ceil(1e4 * share) / 1e4:.4g}%"


def _sampling(content: Mapping[str, Any]) -> list[str]:
    found = content["sampling"]
    words, planned = f"{found['how']}; {found['steps']:,} steps", found["planned_steps"]
    if planned is not None and planned != found["steps"]:
        words += f" of {planned:,} that were planned (ended: {found['stopped']})"
    if found["amplified"] is None:
        return [f"{words}."]
    more = "Who takes part in a step is drawn from a cryptographic stream, and ε counts on that."
    if not found["amplified"]:
        more = "ε counts on no randomness of the draw."
    times = f"{found['expected_participations']:.4g}"
    return [f"{words}; a record takes part {times} times on average.", more]


def _noise(content: Mapping[str, Any]) -> list[str]:
    multipliers = [e["noise_multiplier"] for e in content["events"] if e["what"] == GRADIENTS]
    if not multipliers:
        return []
    return [
        f"Gaussian, noise multiplier {multipliers[0]:.4g}: its standard deviation over "
        f"the most that one {content['unit']['sampled']} can move a step's sum of gradients."
    ]


def _released(content: Mapping[str, Any]) -> list[str]:
    covered = [r["what"] for r in content["released"] if r["covered"]]
    others = [r["what"] for r in content["released"] if not r["covered"]]
    words = [f"ε counts: {'; '.join(covered)}."]
    if content["sampling"]["amplified"] is None:
        words.append("What came before the first step is not known: the plan could not be read.")
    elif not any(event["what"] == BEFORE for event in content["events"]):
        words.append("Nothing was released from the training records before the first step.")
    if others:
        words.append(f"ε does not count: {'; '.join(others)}.")
    return words


def _searched(content: Mapping[str, Any]) -> list[str]:
    found = content["searched"]
    if not found["recorded"]:
        return [
            "Nothing is recorded of a search for settings, and ε counts none. Other runs of the "
            "ledger, if it has any, are listed there."
        ]
    trials, method = found["trials"], found["method"]
    said = f"Settings were searched for by {method}, {trials:g} trials."
    if not found["epsilon_of_search"]:
        return [f"{said} The trials used records that ε does not cover, and cost nothing."]
    search, final = (float(found[f"epsilon_of_{part}"]) for part in ("search", "final_run"))
    return [
        f"{said} ε counts it: the search alone costs {search:.4g}, and the final run alone "
        f"{final:.4g}, which is what would be printed had the search not been charged."
    ]


def _random(content: Mapping[str, Any]) -> str:
    if content["randomness"]["seeded"]:
        return (
            "Noise and batches were drawn from a seed. Whoever knows it can remove the noise: "
            "against them the run is not private."
        )
    return "Noise and batches were drawn from a cryptographic stream (ChaCha20) with a secret key."


def _accounting(content: Mapping[str, Any]) -> list[str]:
    guarantee, found = content["guarantee"], content["sampling"]
    words = [f"By {guarantee['method']}."]
    if guarantee["epsilon_rdp"] is not None:
        words.append(f"Cross-check by Rényi DP: ε = {float(guarantee['epsilon_rdp']):.4g}.")
    if any(note.startswith(_ENDED_EARLY) for note in content["notes"]):
        charged = found["charged_steps"]
        words.append(
            f"ε is that of all {charged:,} steps of the plan: when to stop may have been chosen by "
            "looking."
            if charged is not None
            else "ε is that of the whole plan."
        )
    elif found["stopped"] == "budget":
        words.append("The budget ended the run: one more step would have passed it.")
    return words


def _ledger(stated: Mapping[str, Any] | None) -> list[str]:
    if stated is None:
        return []
    count = len(stated["runs"])
    runs = "this run alone" if count == 1 else f"{count} runs"
    return [
        f"It held {runs} when this one was saved. Together: ε = {float(stated['epsilon']):.4g} "
        f"of a budget of {float(stated['budget_epsilon']):.4g}, at δ = {stated['delta']:.4g}.",
        f"Its head was {stated['head']}; tacit ledger verify --head checks that the file "
        "continues it.",
    ]


def mechanism_of(content: Mapping[str, Any]) -> str:
    """The mechanism, its sampling and its steps in a sentence or two."""
    return " ".join((*_noise(content), *_sampling(content)))


def model_card_block(content: Mapping[str, Any]) -> str:
    """The section of a model card that states the privacy of a model."""
    guarantee, sampling = content["guarantee"], content["sampling"]
    steps, charged = f"{sampling['steps']:,}", sampling["charged_steps"]
    if charged not in (None, sampling["steps"]):
        steps += f" ({charged:,} are charged)"
    noise = [e["noise_multiplier"] for e in content["events"] if e["what"] == GRADIENTS]
    random = "from a seed" if content["randomness"]["seeded"] else "secret"
    rows = [
        ("unit of privacy", f"one {content['unit']['name']}"),
        ("neighbouring relation", content["relation"]["name"]),
        ("ε", f"{float(guarantee['epsilon']):.6g}"),
        ("δ", f"{guarantee['delta']:g}"),
        ("μ (Gaussian DP)", f"{float(guarantee['mu']['value']):.4g}"),
        ("noise multiplier", ", ".join(f"{z:.6g}" for z in noise) or "none"),
        ("sampling", sampling["how"]),
        ("steps", steps),
        ("accounting", "privacy loss distributions (PLD)"),
        ("random draws", random),
        ("search for settings", _searched(content)[0]),
    ]
    if content["ledger"] is not None:
        rows.append(("head of the ledger", f"`{content['ledger']['head']}`"))
    parts = ["## Privacy statement", content["text"], markdown_table(rows)]
    parts += ["ε does not cover:", "\n".join(f"- {item}" for item in content["not_covered"])]
    if content["notes"]:
        parts += ["Notes of the run:", "\n".join(f"- {note}" for note in content["notes"])]
    parts.append(
        "Every figure can be computed again from `statement.json`: `tacit verify statement.json`, "
        f"or `verify_statement.py`, which needs dp-accounting alone. {NO_SIGNATURE}"
    )
    return "\n\n".join(parts)
