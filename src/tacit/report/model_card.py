"""The model card of a fine-tuned language model: what it is, and what is private about it.

The card goes beside the weights, to wherever they go, so it holds no path of this machine and
nothing that ε does not cover, except the figures of held-out text, which it says.
"""

from __future__ import annotations

from typing import Any

from tacit.report.run_folder import privacy_statement


def promise(facts: dict[str, Any]) -> str:
    """The guarantee on one line: ε, δ, and for one of what."""
    return f"ε = {facts['epsilon']:.4g} for one {facts['privacy_unit']}, δ = {facts['delta']:g}"


def model_card(facts: dict[str, Any], base: str | None, adapter: bool) -> str:
    """A README.md in the form of the Hugging Face hub, with a statement of privacy.

    `base` is the name of the model that was fine-tuned, or None where that is a private folder.
    """
    front = [f"library_name: {'peft' if adapter else 'transformers'}"]
    if base is not None:
        front.append(f"base_model: {base}")
    front += ["tags:", "- differential-privacy", "- tacit"]
    what = "A LoRA adapter" if adapter else "A language model"
    of = f" of `{base}`" if base is not None else ""
    parts = [
        "\n".join(["---", *front, "---"]),
        f"# {what}{of}, fine-tuned with differential privacy",
        f"**{promise(facts)}.** Trained with Tacit {facts['environment']['tacit']}.",
        "## Privacy statement",
        privacy_statement(facts)["text"],
        _table(_guarantee(facts)),
        "ε does not cover:",
        "\n".join(f"- {line}" for line in _not_covered(facts)),
    ]
    if facts["notes"]:
        parts += ["Notes of the run:", "\n".join(f"- {note}" for note in facts["notes"])]
    measured = _measured(facts)
    if measured:
        parts += [
            "## Held-out text",
            _table(measured, ("", "before", "after")),
        ]
    if facts.get("samples"):
        parts.append("## Samples")
        for sample in facts["samples"]:
            text = f"{sample['prompt']}▸{sample['text']}"
            parts.append("\n".join(f"    {line}" for line in text.splitlines() or [""]))
    parts += ["## Use", _use(facts, base, adapter)]
    return "\n\n".join(parts) + "\n"


def _guarantee(facts: dict[str, Any]) -> list[tuple[str, ...]]:
    charged = facts["charged_steps"]
    steps = f"{facts['steps']}"
    if charged not in (None, facts["steps"]):
        steps += f" ({charged} are charged)"
    rows: list[tuple[str, ...]] = [
        ("unit of privacy", f"one {facts['privacy_unit']}"),
        ("neighbouring relation", facts["relation"]),
        ("ε", f"{facts['epsilon']:.6g}"),
        ("δ", f"{facts['delta']:g}"),
        ("noise multiplier", f"{facts['noise_multiplier']:.6g}"),
        ("clipping norm", f"{facts['config']['used']['max_norm']:g}"),
        ("sampling", facts["sampling"]),
        ("steps", steps),
        ("accounting", "privacy loss distributions (PLD)"),
        ("random draws", "from a seed" if facts["seeded"] else "secret, from the operating system"),
    ]
    return rows


def _not_covered(facts: dict[str, Any]) -> list[str]:
    return [
        "what the base model was pretrained on, and whoever's text was in it",
        "choices that were made by looking at the training text: hyperparameters that were "
        "searched in other runs, prompts, filters",
        "the held-out text, and the figures measured on it",
        "text of a person in a record of somebody else",
    ]


def _measured(facts: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    before = facts.get("before") or {}
    for name, form in (("perplexity", ".4g"), ("accuracy", ".2%"), ("loss", ".4g")):
        pair = [side.get(name) for side in (before, facts)]
        if any(value is not None for value in pair):
            rows.append((name, *("–" if v is None else format(float(v), form) for v in pair)))
    return rows


def _table(rows: list[tuple[str, ...]], header: tuple[str, ...] = ("", "")) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _use(facts: dict[str, Any], base: str | None, adapter: bool) -> str:
    kind = facts["model"]["architecture"]["auto_class"]
    lines = [f"from transformers import {kind}, AutoTokenizer", ""]
    if adapter:
        lines = ["from peft import PeftModel", *lines]
        options = ""
        if facts["model"]["class_names"]:
            options = f", num_labels={len(facts['model']['class_names'])}"
        lines += [
            f'model = {kind}.from_pretrained("{base or "the base model"}"{options})',
            'model = PeftModel.from_pretrained(model, "this folder")',
        ]
    else:
        lines.append(f'model = {kind}.from_pretrained("this folder")')
    lines.append('tokenizer = AutoTokenizer.from_pretrained("this folder")')
    return "\n".join(["```python", *lines, "```"])
