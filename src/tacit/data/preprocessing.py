"""What lies between a record as it is given and the input of a network, kept with the run.

Statistics that were released with noise were paid for with ε. Without them the weights of a run
are of no use to anybody, and to compute them again would be another release. So every stage is
written to one safetensors file: numbers as tensors, in full precision, and the rest as JSON in the
file's metadata. Reading it back runs no code.
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

from tacit.data.colour import HSV, RGB, YIQ, YUV, Greyscale
from tacit.data.private_scaling import Centre
from tacit.data.scaling import PublicScaler, RangeScaler, UnitNorm
from tacit.data.scattering import ScatteringMap
from tacit.errors import DataError

FILE = "preprocessing.safetensors"
_FORMAT = "1"


class Stage(Protocol):
    """Maps each record by itself, with constants that are public or were paid for."""

    def __call__(self, inputs: Tensor) -> Tensor: ...

    def describe(self) -> str: ...


# What can be written and read back: dataclasses whose fields are tensors and plain values.
_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        PublicScaler,
        RangeScaler,
        UnitNorm,
        Centre,
        ScatteringMap,
        RGB,
        YUV,
        YIQ,
        Greyscale,
        HSV,
    )
}


@dataclass(frozen=True)
class Preprocessing:
    """Stages in turn: `preprocessing(inputs)` is what the network was given in training.

    For a named dataset, `inputs` are those of `tacit.load(name, scale=None)`: pixels in [0, 1]. For
    a file of one's own they are its columns as they stand in it, in the training file's order.
    """

    stages: tuple[Stage, ...] = ()

    def __call__(self, inputs: Tensor) -> Tensor:
        for stage in self.stages:
            inputs = stage(inputs)
        return inputs

    def then(self, stage: Stage) -> Preprocessing:
        """The same, followed by one more stage."""
        return Preprocessing((*self.stages, stage))

    def describe(self) -> list[str]:
        return [stage.describe() for stage in self.stages]

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write preprocessing.safetensors into a folder, whole or not at all."""
        told, tensors = [], {}
        for place, stage in enumerate(self.stages):
            kind = type(stage).__name__
            if _KINDS.get(kind) is not type(stage):
                raise ValueError(
                    f"{kind} is a stage of your own, which a folder cannot hold without its code; "
                    f"save its constants yourself, or use one of {', '.join(_KINDS)}"
                )
            plain: dict[str, Any] = {"kind": kind}
            for each in fields(stage):  # type: ignore[arg-type]
                value = getattr(stage, each.name)
                if isinstance(value, Tensor):
                    tensors[f"{place}.{each.name}"] = value.detach().cpu().contiguous()
                else:
                    plain[each.name] = value
            told.append(plain)
        target = Path(folder) / FILE
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(FILE + ".tmp")
        save_file(tensors, temporary, {"format": _FORMAT, "stages": json.dumps(told)})
        os.replace(temporary, target)
        return target

    @classmethod
    def of(cls, given: Preprocessing | Stage | Iterable[Stage]) -> Preprocessing:
        if isinstance(given, Preprocessing):
            return given
        return cls((given,) if callable(given) else tuple(given))


def load_preprocessing(folder: str | os.PathLike[str]) -> Preprocessing:
    """The preprocessing of the run in `folder`, constants included: nothing is computed anew.

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
        with safe_open(file, framework="pt") as held:
            told = held.metadata() or {}
            tensors = {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118
        if told.get("format") != _FORMAT:
            raise DataError(f"{file} has format {told.get('format')!r}, and {_FORMAT!r} is known")
        return Preprocessing(
            tuple(
                _stage(place, one, tensors) for place, one in enumerate(json.loads(told["stages"]))
            )
        )
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{file} cannot be read ({type(error).__name__}: {error}); copy it from the run's "
            "folder again"
        ) from error


def _stage(place: int, told: dict[str, Any], tensors: dict[str, Tensor]) -> Stage:
    kind = _KINDS[told["kind"]]
    values = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in told.items()
        if name != "kind"
    }
    start = f"{place}."
    values |= {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}
    stage: Stage = kind(**values)
    return stage
