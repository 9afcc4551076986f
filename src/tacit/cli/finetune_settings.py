"""The settings of `tacit finetune`: each option once, in the section under which it is shown.

Options that `tacit train` has too are in `tacit.cli.run_settings`. `tacit.cli.schema` makes the
command line, files of settings and the reference page from all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from tacit.cli.run_settings import BudgetOptions, FolderOptions, StepOptions
from tacit.cli.schema import (
    BELOW_ONE,
    NORM,
    ONE_OR_MORE,
    POSITIVE,
    SHARE,
    ZERO_OR_MORE,
    Range,
    Rule,
    option,
    overridden,
    section,
)

_CLASSES = Rule("task", ("classification",), "which has labels")
_NOT_NEGATIVE = Range("0, or a finite number above it", lambda v: 0 <= v < float("inf"))


@section("text", "Text")
class TextSettings:
    data: Path | None = option(
        "File of training text: .jsonl, one JSON object per line.", common=True
    )
    record: Literal["line", "document", "user"] = option(
        "What epsilon protects: a line of --data, cut at --max-length; a document, which is a line "
        "of any length, in up to --max-blocks rows; or a user with up to --max-rows lines.",
        "line",
        common=True,
    )
    text_field: str = option("Field of a line that holds its text.", "text")
    label_field: str | None = option(
        "Field that holds the class of a line: text, or a whole number.",
        usual="label",
        goes_with=_CLASSES,
    )
    classes: tuple[str, ...] | None = option(
        "Classes, declared public: a,b,c.",
        usual="those that occur in --data, which the report says",
        form="their names, such as a,b,c",
        goes_with=_CLASSES,
    )
    user_field: str | None = option(
        "Field that holds the user of a line.", usual="user", goes_with=Rule("record", ("user",))
    )
    max_length: int | None = option(
        "Tokens in a row.",
        usual="128, or the model's context if that is shorter",
        range=ONE_OR_MORE,
        common=True,
    )
    max_blocks: int | None = option(
        "Rows of a document. What is longer is cut off.",
        usual="4",
        range=ONE_OR_MORE,
        goes_with=Rule("record", ("document",)),
    )
    max_rows: int | None = option(
        "Rows of a user. Later lines are left out.",
        usual="8",
        range=ONE_OR_MORE,
        goes_with=Rule("record", ("user",)),
    )
    pack: bool = option(
        "Join the texts of a user, with the end-of-text token between them, and cut that into full "
        "rows. No row holds text of two users.",
        False,
        goes_with=Rule("record", ("user",), "whose text fills its rows already"),
        not_with=Rule("task", ("classification",), "whose lines have a label each"),
    )
    public_size: int | None = option(
        "Number of training records (lines, documents or users), declared public.",
        usual="their number in --data, which the report says",
        range=ONE_OR_MORE,
    )
    held_out: Path | None = option(
        "File of held-out text to evaluate on; epsilon does not cover it."
    )
    held_out_fraction: float | None = option(
        "Share of the records of --data to hold out and evaluate on.",
        usual="none",
        range=SHARE,
        not_with=Rule("held_out", (), "and a run evaluates on one of them"),
    )


@section("privacy", "Privacy")
class TextPrivacySettings(BudgetOptions):
    epsilon: float = overridden(8.0)
    max_norm: float = option("Clipping norm of a record's gradient.", 1.0, range=NORM)


_LORA = Rule("lora", (), "and without it all weights are trained")


@section("model", "Model")
class LanguageModelSettings:
    model: str | None = option(
        "Folder of a model of transformers with its tokenizer, or its name on the Hugging Face "
        "hub.",
        common=True,
    )
    task: Literal["causal", "classification"] = option(
        "Predict the next token, or the class of a text.", "causal", common=True
    )
    lora: int = option(
        "Rank of low-rank adapters, which are trained instead of the weights; 0 trains all "
        "weights.",
        0,
        range=ZERO_OR_MORE,
        common=True,
    )
    lora_targets: tuple[str, ...] | None = option(
        "Layers that get an adapter, by the ends of their names: q_proj,v_proj.",
        usual="all linear layers but the output",
        form="names such as q_proj,v_proj",
        goes_with=_LORA,
    )
    lora_alpha: float | None = option(
        "Adapters are scaled by this over the rank.",
        usual="twice the rank",
        range=POSITIVE,
        goes_with=_LORA,
    )


@section("training", "Training")
class FinetuneTrainingSettings(StepOptions):
    batch_size: int | None = overridden(
        help="Expected number of records in a batch. Noise is added once per step: larger is "
        "better.",
        usual="1024, or a quarter of the records if that is fewer",
    )
    epochs: float | None = overridden(usual="5")
    lr: float | None = overridden(
        help="Learning rate of AdamW.", usual="1e-3 with --lora, else 2e-4", common=True
    )
    weight_decay: float = option("Weight decay of AdamW.", 0.0, range=_NOT_NEGATIVE)
    schedule: Literal["linear", "constant"] = option(
        "Learning rate over the run: falling to 0, or constant.", "linear"
    )
    warmup: float = option(
        "Share of the steps in which the learning rate rises from 0.", 0.0, range=BELOW_ONE
    )
    micro_batch: int | None = option(
        "Largest number of records to process at once. It affects memory, not results.",
        usual="32 divided by the rows of a record",
        range=ONE_OR_MORE,
        with_resume=True,
    )
    bf16: bool = option(
        "Compute in bfloat16. Frozen weights are kept in it, trained ones in float32.", False
    )
    gradient_checkpointing: bool = option(
        "Compute layers again in the backward pass, which needs less memory.", False
    )


_PROMPT = Rule("prompt")


@section("samples", "Samples of the finished model")
class SampleSettings:
    prompt: list[str] | None = option(
        "Text to continue with the finished model. May be given several times.",
        not_with=Rule("task", ("classification",), "which generates no text"),
        form="a list of texts",
    )
    new_tokens: int = option("Most tokens of a sample.", 40, range=ONE_OR_MORE, goes_with=_PROMPT)
    temperature: float = option(
        "Temperature of the samples; 0 takes the most probable token each time.",
        0.0,
        range=_NOT_NEGATIVE,
        goes_with=_PROMPT,
    )


@section("output", "Output")
class FinetuneOutputSettings(FolderOptions):
    out: Path | None = overridden(
        help="Folder for run.json, ledger, plot and, in model/, the weights or the adapter with "
        "tokenizer and model card."
    )


@dataclass(frozen=True)
class FinetuneSettings(
    TextSettings,
    TextPrivacySettings,
    LanguageModelSettings,
    FinetuneTrainingSettings,
    SampleSettings,
    FinetuneOutputSettings,
):
    """Everything that `tacit finetune` can be told."""

    command: ClassVar[str] = "finetune"
