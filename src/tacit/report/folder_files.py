"""The files in the folder of a run: their names, their digests, and how JSON is written."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from tacit.data.download import whole_file
from tacit.data.preprocessing import FILE as PREPROCESSING
from tacit.errors import in_words
from tacit.training.state_file import CHECKPOINT

WEIGHTS, SCHEMA, STATEMENT = "weights.safetensors", "schema.json", "statement.json"
# What a run writes into its folder.
FILES = ("run.json", WEIGHTS, STATEMENT, "progress.png", SCHEMA, PREPROCESSING)
# Of a language model: the kind of its architecture in run.json, and the folder with its files.
LANGUAGE_MODEL, MODEL_FOLDER = "transformers", "model"
# The version of the "model" part of run.json.
FORMAT = 1
RESUME_FILE = "resume.json"  # the settings of a run of the command line, until it is complete


def unfinished_command(folder: Path) -> str | None:
    """The command whose run in `folder` is not complete, train or finetune; None if there is none.

    A file that cannot be read is None too.
    """
    try:
        stored = json.loads((folder / RESUME_FILE).read_text(encoding="utf-8"))
        return "finetune" if stored.get("command") == "finetune" else "train"
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def require_file(folder: Path, name: str) -> None:
    """Refuse a folder without this file, and say so if the run in it is not complete."""
    if (folder / name).is_file():
        return
    if (folder / CHECKPOINT).is_file():
        command = unfinished_command(folder) or "train"
        way = in_words(
            f'Trainer.fit(resume="{folder}"), then save_run', f"tacit {command} --resume {folder}"
        )
        raise ValueError(f"{folder} holds a run that is not complete; resume it with: {way}")
    raise ValueError(
        f"{folder} has no {name}; give the folder of a run, as tacit train --out makes it"
    )


def digest_of(file: Path) -> str:
    """SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_json(facts: dict[str, Any], path: Path) -> None:
    with whole_file(path) as draft:
        draft.write_text(to_json(facts) + "\n", encoding="utf-8")


def to_json(value: Any) -> str:
    """JSON that any reader takes: an infinite ε is the string "inf", which JSON numbers lack."""
    return json.dumps(plain_values(value), indent=2, ensure_ascii=False, allow_nan=False)


def plain_values(value: Any) -> Any:
    """The value as it is read back from `to_json`."""
    if isinstance(value, dict):
        return {str(k): plain_values(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, int | float | bool | str | None) else str(value)
