"""A run's folder read back: what `tacit train` was told, and the network that it left."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from tacit.cli.networks import ModelName, QueryName, network_for
from tacit.cli.statistics_options import StatisticsName
from tacit.cli.train_data import DataOptions, class_names


@dataclass(frozen=True)
class NetworkInputs:
    """The shape of one input of the network, after preprocessing, and the number of classes."""

    shape: tuple[int, ...]
    num_classes: int


@dataclass(frozen=True)
class SavedRun:
    """The folder of a run of `tacit train`, and the options that it was given."""

    folder: Path
    options: dict[str, Any]
    inputs: NetworkInputs

    def data_options(self) -> DataOptions:
        told = self.options
        span = told["feature_range"]
        return DataOptions(
            dataset=told["dataset"],
            file=_path(told["data"]),
            target=told["target"],
            test_file=_path(told["test_data"]),
            classes=class_names(told["classes"]),
            public_size=told["public_size"],
            feature_range=tuple(float(part) for part in span.split(",")) if span else None,  # type: ignore[arg-type]
            unit_norm=told["unit_norm"],
            scale_noise=told["scale_noise"],
        )

    def network(self) -> nn.Module:
        """The network as it was built, with the run's weights; no record is needed."""
        query = QueryName(self.options["query"])
        convert = self.options.get("statistics") == StatisticsName.CONVERT  # older runs say nothing
        network, _ = network_for(ModelName(self.options["model"]), self.inputs, query, convert)
        try:
            network.load_state_dict(load_file(self.folder / "weights.safetensors"))
        except (RuntimeError, SafetensorError) as error:
            raise ValueError(
                f"the weights in {self.folder} do not fit the network that its run.json names: "
                f"{str(error).splitlines()[0]}"
            ) from error
        return network


def read_run(folder: Path) -> SavedRun:
    """The run in `folder`, or an error that says what is missing."""
    for name in ("run.json", "weights.safetensors"):
        if not (folder / name).is_file():
            raise ValueError(
                f"{folder} has no {name}; give the folder of a run, as tacit train --out makes it"
            )
    try:
        facts = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        options = facts["config"]["options"]
        wanted = {"dataset", "data", "model", "query", "unit_norm", "scale_noise"}
        missing = sorted(wanted - set(options))
        used = facts["config"]["used"]
        inputs = NetworkInputs(tuple(used["input_shape"]), int(used["num_classes"]))
    except (json.JSONDecodeError, KeyError, TypeError):
        missing = ["config"]
    if missing:
        raise ValueError(
            f"{folder}/run.json does not say how to build the run's network (missing: "
            f"{', '.join(missing)}); it was not made by tacit train. In Python: "
            "tacit.certificates.certified_accuracy(model, records)"
        )
    return SavedRun(folder, options, inputs)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
