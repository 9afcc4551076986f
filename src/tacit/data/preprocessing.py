"""The stages between a record as it is given and the input of a network, kept with the run.

Statistics that were released with noise were paid for with ε. Without them a run's weights are
useless, and computing them again would be another release. So every stage is written to one
safetensors file: numbers as tensors, in full precision, and the rest as JSON in the file's
metadata. Reading it runs no code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tacit.data.download import whole_file
from tacit.data.private_ranges import ColumnRanges
from tacit.data.private_scaling import Centre
from tacit.data.scaling import HSV, RGB, YIQ, YUV, Greyscale, PublicScaler, RangeScaler, UnitNorm
from tacit.data.scattering import ScatteringMap
from tacit.errors import DataError

FILE = "preprocessing.safetensors"
_FORMAT = "1"


class Stage(Protocol):
    """Maps each record by itself, with constants that are public or were paid for."""

    def __call__(self, inputs: Tensor) -> Tensor: ...

    def describe(self) -> str: ...


# Dataclasses whose fields are tensors and plain values. Their names are in the files.
_STAGES: dict[str, Any] = {
    stage.__name__: stage
    for stage in (
        *(PublicScaler, RangeScaler, ColumnRanges, UnitNorm, Centre, ScatteringMap),
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
        """Write preprocessing.safetensors into a folder, whole or not at all."""
        stages: list[dict[str, Any]] = []
        tensors: dict[str, Tensor] = {}
        for i, stage in enumerate(self.stages):
            kind = type(stage).__name__
            if _STAGES.get(kind) is not type(stage):
                raise ValueError(
                    f"{kind} is a stage of your own, which a folder cannot hold without its code; "
                    f"save its constants yourself, or use one of {', '.join(_STAGES)}"
                )
            stages.append({"kind": kind})
            for field in fields(stage):  # type: ignore[arg-type]
                value = getattr(stage, field.name)
                if isinstance(value, Tensor):
                    tensors[f"{i}.{field.name}"] = value.detach().cpu().contiguous()
                else:
                    stages[i][field.name] = value
        file = Path(folder) / FILE
        with whole_file(file) as draft:
            save_file(tensors, draft, {"format": _FORMAT, "stages": json.dumps(stages)})
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
            f"{folder} has no {FILE}; runs that were saved before Tacit kept it do not hold their "
            "preprocessing: in Python, use the records as they were scaled"
        )
    try:
        with safe_open(file, framework="pt") as content:
            metadata = content.metadata() or {}
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
        if (version := metadata.get("format")) != _FORMAT:
            raise DataError(f"{file} has format {version!r}, and {_FORMAT!r} is known")
        stages = json.loads(metadata["stages"])
        return Preprocessing(tuple(_stage(i, values, tensors) for i, values in enumerate(stages)))
    except DataError:
        raise
    except (SafetensorError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(
            f"{file} cannot be read ({type(error).__name__}: {error}); copy it from the run's "
            "folder again"
        ) from error


def _stage(i: int, values: dict[str, Any], tensors: dict[str, Tensor]) -> Stage:
    values = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
    values |= {n.removeprefix(f"{i}."): t for n, t in tensors.items() if n.startswith(f"{i}.")}
    stage: Stage = _STAGES[values.pop("kind")](**values)
    return stage
