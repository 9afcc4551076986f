"""A run's folder read back: its settings, its network, and its plan."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from tacit.accounting.plan import Plan
from tacit.cli.build_model import network_for
from tacit.cli.schema import assemble, options_of, read_nested
from tacit.cli.settings import TrainSettings


@dataclass(frozen=True)
class NetworkInputs:
    """The shape of one input of the network, after preprocessing, and the number of classes."""

    shape: tuple[int, ...]
    num_classes: int


@dataclass(frozen=True)
class SavedRun:
    """The folder of a run of `tacit train`, and the settings that it was given."""

    folder: Path
    settings: TrainSettings
    inputs: NetworkInputs

    def network(self) -> nn.Module:
        """The network as it was built, with the run's weights; no record is needed."""
        s = self.settings
        convert = s.batch_clipping.statistics == "convert"
        network, _ = network_for(s.model.model, self.inputs, s.query.query, convert)
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
    facts = _facts(folder)
    _require(folder, "weights.safetensors")
    try:
        config = facts["config"]
        inputs = NetworkInputs(
            tuple(config["used"]["input_shape"]), int(config["used"]["num_classes"])
        )
        if "settings" in config:
            values = read_nested(TrainSettings, config["settings"])
        else:  # a run that was saved before settings had sections
            known = options_of(TrainSettings)
            told = {n: v for n, v in config["options"].items() if n in known and v is not None}
            values = {name: known[name].read(value, name) for name, value in told.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder}/run.json does not say how to build the run's network "
            f"({type(error).__name__}: {error}); it was not made by tacit train. In Python: "
            "tacit.certificates.certified_accuracy(model, records)"
        ) from error
    return SavedRun(folder, assemble(TrainSettings, values), inputs)


@dataclass(frozen=True)
class SavedPlan:
    """A run's plan, how many of its steps the run answers for, and its δ and ε."""

    plan: Plan
    steps: int
    delta: float
    epsilon: float


def read_plan(folder: Path) -> SavedPlan:
    """The plan of the run in `folder`, or an error that says what is missing."""
    facts = _facts(folder)
    try:
        told = facts["plan"] if "plan" in facts else facts["config"]["used"]["plan"]
        plan = Plan.from_json(told if isinstance(told, str) else json.dumps(told))
        # A run that its budget ended answers for the steps it took, any other for its whole plan.
        taken = int(facts["steps"])
        steps = taken if facts["stopped"] == "budget" or plan.steps is None else plan.steps
        return SavedPlan(plan, steps, float(facts["delta"]), float(facts["epsilon"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder}/run.json does not hold a run's plan ({type(error).__name__}: {error}); "
            "in Python: tacit.trade_off(noise_multiplier, sampling, steps)"
        ) from error


def _facts(folder: Path) -> dict[str, Any]:
    _require(folder, "run.json")
    try:
        facts = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{folder}/run.json is not JSON ({error}); it was not made by tacit train"
        ) from error
    return facts if isinstance(facts, dict) else {}


def _require(folder: Path, name: str) -> None:
    if not (folder / name).is_file():
        raise ValueError(
            f"{folder} has no {name}; give the folder of a run, as tacit train --out makes it"
        )
