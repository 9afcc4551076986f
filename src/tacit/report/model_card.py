"""The model card of a fine-tuned language model: what it is, and what is private about it.

The card goes beside the weights, to wherever they go, so it holds no path of this machine and
nothing that ε does not cover, except the figures of held-out text, which it says.
"""

from __future__ import annotations

from typing import Any

from tacit.report import statement_words
from tacit.report.privacy_statement import PrivacyStatement
from tacit.report.statement_words import markdown_table


def promise(facts: dict[str, Any]) -> str:
    """The guarantee on one line: ε, δ, and for one of what."""
    return f"ε = {facts['epsilon']:.4g} for one {facts['privacy_unit']}, δ = {facts['delta']:g}"


def model_card_block(statement: PrivacyStatement) -> str:
    """The section of a Hugging Face model card that states the privacy of a model, as Markdown.

    Put statement.json beside the card: its last line says how to compute the figures again.

        block = tacit.report.model_card_block(tacit.report.statement("runs/x"))
    """
    return statement_words.model_card_block(statement.content)


def model_card(
    statement: PrivacyStatement, facts: dict[str, Any], base: str | None, adapter: bool
) -> str:
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
        model_card_block(statement),
    ]
    measured = _measured(facts)
    if measured:
        parts += [
            "## Held-out text",
            markdown_table(measured, ("", "before", "after")),
        ]
    if facts.get("samples"):
        parts.append("## Samples")
        for sample in facts["samples"]:
            text = f"{sample['prompt']}▸{sample['text']}"
            parts.append("\n".join(f"    {line}" for line in text.splitlines() or [""]))
    parts += ["## Use", _use(facts, base, adapter)]
    return "\n\n".join(parts) + "\n"


def _measured(facts: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    before = facts.get("before") or {}
    for name, form in (("perplexity", ".4g"), ("accuracy", ".2%"), ("loss", ".4g")):
        pair = [side.get(name) for side in (before, facts)]
        if any(value is not None for value in pair):
            rows.append((name, *("–" if v is None else format(float(v), form) for v in pair)))
    return rows


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
