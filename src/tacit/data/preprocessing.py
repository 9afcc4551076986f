"""The stages between a record as it is given and the input of a network, kept with the run.

Statistics that were released with noise were paid for with ε. Without them a run's weights are
useless, and computing them again would be another release. So every stage is written to one JSON
file, a line for each: its kind, its settings, and its constants as lists of numbers. The shortest
decimal form of a number is read back to the same bits. Reading it runs no code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol, get_args, get_type_hints

import torch
from torch import Tensor

from tacit.data.download import whole_file
from tacit.data.private_counts import MergedCategories
from tacit.data.private_ranges import ColumnRanges
from tacit.data.private_scaling import Centre
from tacit.data.scaling import HSV, RGB, YIQ, YUV, Greyscale, PublicScaler, RangeScaler, UnitNorm
from tacit.data.scattering import ScatteringMap
from tacit.errors import DataError

FILE = "preprocessing.json"
_FORMAT = 2


class Stage(Protocol):
    """Maps each record by itself, with constants that are public or were paid for."""

    def __call__(self, inputs: Tensor) -> Tensor: ...

    def describe(self) -> str: ...


# Dataclasses whose fields are tensors and plain values. Their names are in the files.
_STAGES: dict[str, Any] = {
    stage.__name__: stage
    for stage in (
        *(PublicScaler, RangeScaler, ColumnRanges, MergedCategories, UnitNorm, Centre),
        ScatteringMap,
        *(RGB, YUV, YIQ, Greyscale, HSV),
    )
}


@dataclass(frozen=True)
class Preprocessing:
    """Stages in turn: `preprocessing(inputs)` is what the network was given in training.

    For a named dataset, `inputs` are those of `tacit.load(name, scale=None)`: pixels in [0, 1]. For
    your own file they are its columns, in the training file's order, or what a schema makes of
    them: `schema.inputs(table)`.
    """

    stages: tuple[Stage, ...] = ()

    def __call__(self, inputs: Tensor) -> Tensor:
        for stage in self.stages:
            inputs = stage(inputs)
        return inputs

    def then(self, stage: Stage) -> Preprocessing:
        """The same stages, followed by one more."""
        return Preprocessing((*self.stages, stage))

    def describe(self) -> list[str]:
        return [stage.describe() for stage in self.stages]

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write preprocessing.json into a folder, durably, whole or not at all."""
        lines = []
        for stage in self.stages:
            kind = type(stage).__name__
            if _STAGES.get(kind) is not type(stage):
                raise ValueError(
                    f"{kind} is a stage of your own, which a folder cannot hold without its code; "
                    f"save its constants yourself, or use one of {', '.join(_STAGES)}"
                )
            values = {field.name: getattr(stage, field.name) for field in fields(stage)}  # type: ignore[arg-type]
            plain = {name: _plain(value) for name, value in values.items()}
            lines.append(json.dumps({"kind": kind, **plain}, ensure_ascii=False, allow_nan=False))
        file = Path(folder) / FILE
        stages = "".join(f"\n    {line}," for line in lines).rstrip(",")
        text = f'{{\n  "format": {_FORMAT},\n  "stages": [{stages}\n  ]\n}}\n'
        with whole_file(file) as draft, draft.open("w", encoding="utf-8") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        return file

    @classmethod
    def of(cls, given: Preprocessing | Stage | Iterable[Stage]) -> Preprocessing:
        """`given` as a `Preprocessing`: itself, one stage or several."""
        if isinstance(given, Preprocessing):
            return given
        return cls((given,) if callable(given) else tuple(given))


def load_preprocessing(folder: str | os.PathLike[str]) -> Preprocessing:
    """The preprocessing of the run in `folder`, constants included: nothing is computed again.

    The model takes inputs that went through it:

        preprocessing = tacit.data.load_preprocessing("runs/x")
        outputs = model(preprocessing(inputs))
    """
    file = Path(folder) / FILE
    if not file.is_file():
        raise ValueError(
            f"{folder} has no {FILE}, so what its inputs went through is not known; a run that an "
            "earlier version of Tacit saved must be read by that version"
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if (version := content["format"]) != _FORMAT:
            raise DataError(f"{file} has format {version!r}, and {_FORMAT} is known")
        return Preprocessing(tuple(map(_stage, content["stages"])))
    except DataError:
        raise
    except _UNREADABLE as error:
        raise DataError(
            f"{file} cannot be read ({type(error).__name__}: {' '.join(str(error).split())}); copy "
            "it from the run's folder again"
        ) from error


def _plain(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return {"dtype": str(value.dtype).removeprefix("torch."), "values": value.tolist()}


# What reading a file of the wrong content raises.
_UNREADABLE = (
    *(OSError, RecursionError, LookupError, TypeError, AttributeError),
    *(ValueError, RuntimeError, OverflowError),
)
# The types of the constants; an entry of a file is looked up here, and nowhere else.
_DTYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}


def _stage(values: dict[str, Any]) -> Stage:
    stored = dict(values)
    kind = _STAGES[stored.pop("kind")]
    stage: Stage = kind(**{name: _value(value) for name, value in stored.items()})
    hints = get_type_hints(kind)
    for field in fields(kind):
        value = getattr(stage, field.name)
        if not _fits(value, hints[field.name]):
            raise ValueError(f"{field.name} of {kind.__name__} is {value!r}")
    return stage


def _value(value: Any) -> Any:
    if isinstance(value, dict):
        return torch.tensor(value["values"], dtype=_DTYPES[value["dtype"]])
    return tuple(value) if isinstance(value, list) else value


def _fits(value: Any, hint: Any) -> bool:
    """Whether the value of a field has the type that its class declares."""
    if isinstance(value, tuple):
        return len(value) == len(get_args(hint)) and all(map(_fits, value, get_args(hint)))
    return isinstance(value, Tensor) or type(value) in (get_args(hint) or (hint,))
