"""The model of a saved run as an ONNX file, with its preprocessing in the graph.

The file is checked with onnxruntime against PyTorch on random records, for several batch sizes,
before it is put in its place.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tacit.data.download import whole_file
from tacit.data.preprocessing import Preprocessing
from tacit.data.scattering import ScatteringMap
from tacit.losses.registry import Task
from tacit.statistics.tracking import evaluating

if TYPE_CHECKING:
    from tacit.report.saved_run import SavedRun

TOLERANCE = 1e-4  # of the largest output; what was found is in the facts
_BATCHES = (1, 3, 8)


class _Graph(nn.Module):
    """What is exported: stages, network, and the answers that outputs stand for."""

    def __init__(self, run: SavedRun, stages: Preprocessing) -> None:
        super().__init__()
        self.network, self.stages = run.model, stages
        self.task, self.temperature = run.task, run.temperature
        self.unit: tuple[float, float] | None = None
        if run.task is Task.REGRESSION and run.schema is not None and run.schema.target:
            lower, upper = run.schema.target_range
            self.unit = (upper - lower) / 2, (lower + upper) / 2

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...] | Tensor:
        outputs = self.network(self.stages(inputs))
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
    stages, shape, left_out = _in_the_graph(run)
    if shape is None:
        raise ValueError(
            f"{run.folder} does not say which shape a record has; export needs one tensor of a "
            "known shape, as save_run(run, folder, test) records it"
        )
    device = run.device
    graph = _Graph(run, stages).to("cpu").eval()
    example = _records(run, shape, 2, seed=0)
    names = ["outputs"]
    if run.task is Task.REGRESSION:
        names = ["prediction"]
    try:
        with evaluating(graph), torch.no_grad():
            if isinstance(graph(example), tuple):
                names.append("probabilities")
            program = _exported(graph, example, names)
            with whole_file(path) as draft:
                model = program.model_proto
                _describe(model, run, left_out)
                onnx.checker.check_model(model)
                onnx.save(model, draft)
                difference = _difference(graph, draft, run, shape)
    finally:
        run.model.to(device)
    return {
        "file": str(path),
        "inputs": ["batch", *shape],
        "outputs": names,
        "in_the_graph": [*stages.describe(), "the network"],
        "not_in_the_graph": left_out,
        "largest_difference": difference,
    }


def _in_the_graph(run: SavedRun) -> tuple[Preprocessing, tuple[int, ...] | None, list[str]]:
    """The stages that ONNX can hold, the shape that they take, and what comes before them."""
    stages, left_out = run.preprocessing.stages, []
    shape = run.record_shape
    after = [i for i, stage in enumerate(stages) if isinstance(stage, ScatteringMap)]
    if after:
        left_out = [stage.describe() for stage in stages[: after[-1] + 1]]
        stages, shape = stages[after[-1] + 1 :], run.input_shape
    if run.schema is not None:
        left_out.insert(0, "the encoding of the table: schema.inputs(table) makes the inputs")
    return Preprocessing(stages), shape, left_out


def _exported(graph: nn.Module, example: Tensor, names: list[str]) -> Any:
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


def _describe(model: Any, run: SavedRun, left_out: list[str]) -> None:
    """Names and the statement as metadata, one entry each; lists have a line per item."""
    entries = {
        "task": str(run.task or "unknown"),
        "class_names": "\n".join(run.class_names or ()),
        "feature_names": "\n".join(run.feature_names or ()),
        "privacy": str(run.statement.get("text", "")),
        "epsilon": str(run.statement.get("epsilon", "")),
        "delta": str(run.statement.get("delta", "")),
        "relation": str(run.statement.get("relation", "")),
        "ledger_head": str((run.statement.get("ledger") or {}).get("head", "")),
        "not_in_the_graph": "\n".join(left_out),
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


def _difference(graph: nn.Module, file: Path, run: SavedRun, shape: tuple[int, ...]) -> float:
    """The largest difference between onnxruntime and PyTorch, over the largest output."""
    import onnxruntime

    worst = 0.0
    for count in _BATCHES:
        x = _records(run, shape, count, seed=count)
        expected = graph(x)
        expected = expected if isinstance(expected, tuple) else (expected,)
        try:
            session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
            found = session.run(None, {"inputs": x.numpy()})
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
