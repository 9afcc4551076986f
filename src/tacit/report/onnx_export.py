"""The model of a saved run as an ONNX file, with its preprocessing in the graph.

A run with a schema has one input per column (`onnx_table`); any other has one tensor. The file is
checked with onnxruntime against PyTorch on random records, for several batch sizes, before it is
put in its place.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tacit.data.download import whole_file
from tacit.data.private_ranges import ColumnRanges
from tacit.data.scattering import ScatteringMap
from tacit.losses.registry import Task
from tacit.report.onnx_table import (
    OUTPUTS,
    PREDICTION,
    PROBABILITIES,
    arrays_of,
    feed_of,
    input_names,
    random_table,
    with_columns,
)
from tacit.statistics.tracking import evaluating

if TYPE_CHECKING:
    from tacit.report.saved_run import SavedRun

TOLERANCE = 1e-4  # of the largest output; what was found is in the facts
_BATCHES = (1, 3, 64)


class _Scattering(nn.Module):
    """A `ScatteringMap` whose filters are made before it is traced."""

    def __init__(self, stage: ScatteringMap) -> None:
        super().__init__()
        self.stage, self.transform = stage, stage.transform()

    def forward(self, images: Tensor) -> Tensor:
        return self.stage.normalised(self.stage.coefficients(images, self.transform))


class _Graph(nn.Module):
    """What is exported: stages, network, and the answers that outputs stand for."""

    def __init__(self, run: SavedRun) -> None:
        super().__init__()
        self.network = run.model
        self.scattering = nn.ModuleList()
        self.stages: list[Callable[[Tensor], Tensor]] = []
        for stage in run.preprocessing.stages:
            if isinstance(stage, ScatteringMap):
                self.scattering.append(_Scattering(stage))
                self.stages.append(self.scattering[-1])
            else:
                self.stages.append(stage)
        self.task, self.temperature = run.task, run.temperature
        self.unit: tuple[float, float] | None = None
        if run.task is Task.REGRESSION and run.schema is not None and run.schema.target:
            lower, upper = run.schema.target_range
            self.unit = (upper - lower) / 2, (lower + upper) / 2

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...] | Tensor:
        for stage in self.stages:
            inputs = stage(inputs)
        outputs = self.network(inputs)
        if self.task is Task.REGRESSION and self.unit is not None:
            return outputs * self.unit[0] + self.unit[1]
        if self.task is None or self.task is Task.REGRESSION or outputs.dim() != 2:
            return outputs
        h = outputs / self.temperature
        if self.task is Task.MULTI_LABEL:
            return outputs, torch.sigmoid(h)
        if outputs.shape[1] == 1:
            return outputs, torch.cat([torch.sigmoid(-h), torch.sigmoid(h)], dim=1)
        return outputs, torch.softmax(h, dim=1)


def export_onnx(run: SavedRun, path: Path) -> dict[str, Any]:
    """Write `path`, whole or not at all, and say what is in it. See `SavedRun.export_onnx`."""
    try:
        import onnx
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"exporting needs {error.name}, which is not installed: pip install 'tacit[export]'"
        ) from error
    shape = run.record_shape
    if shape is None:
        raise ValueError(
            f"{run.folder} does not say which shape a record has; export needs one tensor of a "
            "known shape, as save_run(run, folder, test) records it"
        )
    device = run.device
    graph = _Graph(run).to("cpu").eval()
    example = _records(run, shape, 2, seed=0)
    outputs = [PREDICTION if run.task is Task.REGRESSION else OUTPUTS]
    try:
        with evaluating(graph), torch.no_grad():
            if isinstance(graph(example), tuple):
                outputs.append(PROBABILITIES)
            model = _exported(graph, example, outputs).model_proto
            if run.schema is not None:
                model = with_columns(model, run.schema)
            with whole_file(path) as draft:
                _describe(model, run)
                onnx.checker.check_model(model)
                onnx.save(model, draft)
                difference = _difference(graph, draft, run, shape)
    finally:
        run.model.to(device)
    encoded = [] if run.schema is None else ["the encoding of the table"]
    return {
        "file": str(path),
        "inputs": ["batch", *shape] if run.schema is None else _fed(run),
        "outputs": outputs,
        "in_the_graph": [*encoded, *run.preprocessing.describe(), "the network"],
        "largest_difference": difference,
    }


def onnx_inputs(run: SavedRun, x: Any) -> dict[str, Any]:
    """The records as the exported file takes them: see `SavedRun.onnx_inputs`."""
    if run.schema is None:
        return {"inputs": run.inputs_of(x).numpy()}
    return arrays_of(run.schema, x)


def _fed(run: SavedRun) -> list[str]:
    """What each column's input takes."""
    assert run.schema is not None
    names = input_names(run.schema)
    return [f"{names[column.name]}: {feed_of(column)}" for column in run.schema.features]


def _exported(graph: _Graph, example: Tensor, names: list[str]) -> Any:
    quiet = logging.getLogger("torch.onnx"), logging.getLogger("onnxscript")
    levels = [logger.level for logger in quiet]
    try:
        for logger in quiet:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.onnx.export(
                graph,
                (example,),
                dynamo=True,
                input_names=["inputs"],
                output_names=names,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                external_data=False,
                optimize=not graph.scattering,  # a minute for its operators, and nothing gained
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        cause = error.__cause__ or error
        raise ValueError(
            f"the network cannot be exported to ONNX ({type(cause).__name__}: "
            f"{str(cause).splitlines()[0]}); use tacit.load_run in Python"
        ) from error
    finally:
        for logger, level in zip(quiet, levels, strict=True):
            logger.setLevel(level)


def _describe(model: Any, run: SavedRun) -> None:
    """Names and the statement as metadata, one entry each; lists have a line per item."""
    entries = {
        "task": str(run.task or "unknown"),
        "class_names": "\n".join(run.class_names or ()),
        "feature_names": "\n".join(run.feature_names or ()),
        "inputs": "" if run.schema is None else "\n".join(_fed(run)),
        "privacy": str(run.statement["text"]),
        "epsilon": str(run.epsilon),
        "delta": str(run.delta),
        "relation": str(run.statement["relation"]["name"]),
        "ledger_head": str((run.statement["ledger"] or {}).get("head", "")),
    }
    del model.metadata_props[:]
    for key, value in entries.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value


def _records(run: SavedRun, shape: tuple[int, ...], count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, *shape, generator=generator)
    dtype = run.input_dtype or torch.float32
    return values.to(dtype) if dtype.is_floating_point else values.abs().to(dtype)


def _given(run: SavedRun, shape: tuple[int, ...], count: int) -> tuple[Tensor, dict[str, Any]]:
    """Random records as the preprocessing takes them, and as the graph does."""
    if run.schema is None:
        x = _records(run, shape, count, seed=count)
        return x, {"inputs": x.numpy()}
    ranges: dict[str, tuple[float, float]] = {}
    for stage in run.preprocessing.stages:
        if isinstance(stage, ColumnRanges):
            names = [run.schema.feature_names[i] for i in stage.entries.tolist()]
            ends = zip(stage.lower.tolist(), stage.upper.tolist(), strict=True)
            ranges.update(zip(names, ends, strict=True))
    table = random_table(run.schema, ranges, count, seed=count)
    return run.inputs_of(table), arrays_of(run.schema, table)


def _difference(graph: nn.Module, file: Path, run: SavedRun, shape: tuple[int, ...]) -> float:
    """The largest difference between onnxruntime and PyTorch, over the largest output."""
    import onnxruntime

    worst = 0.0
    for count in _BATCHES:
        x, fed = _given(run, shape, count)
        expected = graph(x)
        expected = expected if isinstance(expected, tuple) else (expected,)
        try:
            session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
            found = session.run(None, fed)
        except Exception as error:  # its errors have no public class in common
            raise ValueError(
                f"onnxruntime cannot run the graph on {count} records "
                f"({str(error).splitlines()[0]}); no file was written, use tacit.load_run in Python"
            ) from error
        for ours, theirs in zip(expected, found, strict=True):
            size = max(1.0, float(ours.abs().max()))
            worst = max(worst, float((ours - torch.from_numpy(theirs)).abs().max()) / size)
    if not worst <= TOLERANCE:
        raise ValueError(
            f"onnxruntime differs from PyTorch by {worst:.2g} of the largest output, more than "
            f"{TOLERANCE:g}; no file was written"
        )
    return worst
