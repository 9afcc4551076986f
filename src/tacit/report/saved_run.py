"""`SavedRun`: a run that was read from its folder, as a model to use."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tacit.data.preprocessing import Preprocessing
from tacit.data.scaling import Greyscale
from tacit.data.scattering import ScatteringMap
from tacit.data.table_columns import Numeric
from tacit.data.table_formats import read_arrays
from tacit.data.table_schema import Schema
from tacit.errors import DataError, in_words
from tacit.losses.registry import Task
from tacit.pytrees import Tree, call_model, logits_of, map_tensors, num_rows
from tacit.records import Records, as_tensors
from tacit.statistics.tracking import evaluating
from tacit.training.evaluation import decide, pieces_of, probabilities

TABLES = (".csv", ".tsv", ".parquet")


class SavedRun:
    """A run that was read from its folder: a model with all that it needs to be used.

        run = tacit.load_run("runs/x")
        run.predict("new.csv")

    `predict` and `predict_proba` take records as they are before any preprocessing:

    - a tensor or an array with a row per record, or a pytree of them;
    - a table: the path of a .csv, .tsv or .parquet file, a frame of pandas or polars, or a mapping
      of columns. Columns are found by name, in any order, and others are ignored;
    - the path of an .npz file with the array X or inputs;
    - `Records` that were not scaled: `tacit.load(name, scale=None)`.

    Attributes: `model` (in evaluation mode), `preprocessing`, `schema`, `task`, `class_names`,
    `feature_names`, `statement` (of its privacy), `epsilon`, `delta`, `facts` (all of run.json),
    `folder`, `device`.
    """

    def __init__(
        self,
        folder: Path,
        facts: dict[str, Any],
        model: nn.Module,
        preprocessing: Preprocessing,
        schema: Schema | None,
    ) -> None:
        described = facts["model"]
        self.folder, self.facts = folder, facts
        self.model, self.preprocessing, self.schema = model, preprocessing, schema
        task, dtype = described["task"], described["input_dtype"]
        self.task = None if task is None else Task(task)
        self.class_names = _names(described["class_names"], "class_names")
        self.feature_names = _names(described["feature_names"], "feature_names")
        shape = described["input_shape"]
        self.input_shape = None if shape is None else tuple(map(_size, shape))
        shape = self.record_shape
        if schema is not None and shape not in (None, (len(schema.feature_names),)):
            raise ValueError(f"its schema has {len(schema.feature_names)} features, not {shape}")
        self.temperature = float(described["temperature"])
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}")
        self.input_dtype = None if dtype is None else _DTYPES[dtype]

    def __repr__(self) -> str:
        classes = "" if self.class_names is None else f" into {', '.join(self.class_names[:5])}"
        classes += ", …" if len(self.class_names or ()) > 5 else ""
        kind = "unknown task" if self.task is None else str(self.task)
        return (
            f"SavedRun({str(self.folder)!r}: {kind}{classes}, {type(self.model).__name__}, "
            f"epsilon={self.epsilon:.4g} at delta={self.delta:g})"
        )

    @cached_property
    def statement(self) -> dict[str, Any]:
        """Of its privacy: what statement.json holds, with ε computed again from the plan."""
        from tacit.report.saved_facts import stated

        return dict(stated(self.folder, self.facts).content)

    @property
    def epsilon(self) -> float:
        return float(self.statement["guarantee"]["epsilon"])

    @property
    def delta(self) -> float:
        return float(self.statement["guarantee"]["delta"])

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return next(self.model.parameters()).device

    @property
    def record_shape(self) -> tuple[int, ...] | None:
        """The shape of one record before preprocessing; None where that is not known."""
        shape = self.input_shape
        for stage in reversed(self.preprocessing.stages):
            if isinstance(stage, ScatteringMap):
                shape = stage.shape
            elif isinstance(stage, Greyscale) and shape is not None:
                shape = (3, *shape[1:])
        return shape

    # ---- predictions -------------------------------------------------------------------------

    def predict(self, x: Any) -> np.ndarray:
        """One answer per record.

        Classification: names of classes, or their numbers where classes have no names. Multi-label:
        0 or 1 for each label, (N, L). Regression: values in the target's own units.
        """
        return self.decided(self.outputs(x))

    def predict_proba(self, x: Any) -> np.ndarray:
        """Probabilities (N, K) of the classes, or (N, L) of the labels, each by itself.

        They are the softmax (or sigmoid) of the outputs over the loss's temperature. A loss without
        a likelihood, such as a hinge, gives scores that are not calibrated.
        """
        return self.probabilities_of(self.outputs(x))

    def outputs(self, x: Any, batch_size: int = 2048) -> Tensor:
        """What the network returns, on the CPU, computed in batches without gradients."""
        raw = self.inputs_of(x)
        if num_rows(raw) == 0:
            raise ValueError("there is no record to predict; give at least one")
        parts = []
        with torch.no_grad(), evaluating(self.model):
            for piece in pieces_of(Records(raw), batch_size):
                outputs = logits_of(call_model(self.model, self._prepared(piece.inputs)))
                if outputs is None:
                    raise ValueError(
                        "the model returns several tensors, none of them called logits; call "
                        ".model yourself"
                    )
                parts.append(outputs.cpu())
        return torch.cat(parts)

    def decided(self, outputs: Tensor) -> np.ndarray:
        """The answers that outputs of the network stand for, as `predict` gives them."""
        if self.task is None:
            raise ValueError(
                "the run's loss declares no task, so what its outputs mean is not known; use "
                ".outputs(x)"
            )
        if self.task is Task.REGRESSION:
            values = outputs.squeeze(1) if outputs.shape[1:] == (1,) else outputs
            if self.schema is not None and self.schema.target:
                values = self.schema.unscaled(values.double())
            return values.numpy()
        found = decide(outputs, self.task).long().numpy()
        names = self.class_names
        if names is None or self.task in (Task.MULTI_LABEL, Task.TOKENS):
            return found
        if found.max() >= len(names):
            raise ValueError(f"the network has more outputs than the {len(names)} class names")
        whole = all(name.isascii() and name.lstrip("-").isdigit() for name in names)
        return np.array(list(map(int, names)) if whole else names)[found]

    def probabilities_of(self, outputs: Tensor) -> np.ndarray:
        """The probabilities that such outputs stand for, as `predict_proba` gives them."""
        if self.task is None or self.task is Task.REGRESSION:
            raise ValueError(
                f"the run's task is {self.task or 'not known'}, which has no probabilities; use "
                "predict or outputs"
            )
        return probabilities(outputs, self.task, self.temperature).numpy()

    # ---- inputs ------------------------------------------------------------------------------

    def inputs_of(self, x: Any) -> Tree:
        """`x` as the tensors that preprocessing takes."""
        if isinstance(x, str | os.PathLike):
            path = Path(x)
            suffix = path.suffix.lower()
            if suffix == ".npz":
                return self._checked(_inputs_in(path))
            if suffix not in TABLES:
                raise DataError(f"{path} ends in {suffix or 'no suffix'}; give .csv, .tsv, "
                                ".parquet or .npz")  # fmt: skip
            return self._of_table(path)
        if isinstance(x, Records):
            scaled = [s.describe() for s in self.preprocessing.stages if s.describe() in x.notes]
            if scaled:
                raise ValueError(
                    f"these records were scaled already ({scaled[0]}), and load_run scales them "
                    "itself; give them as they are: tacit.load(name, scale=None)"
                )
            return self._checked(x.inputs)
        table = self.schema is not None and isinstance(x, Mapping)
        if table or (hasattr(x, "columns") and not isinstance(x, Tensor)):
            return self._of_table(x)
        if isinstance(x, Mapping):
            return as_tensors(x, "x")
        return self._checked(as_tensors(x, "x"))

    def _of_table(self, table: Any) -> Tensor:
        schema = self.schema
        if schema is None:
            if self.feature_names is None:
                raise ValueError(
                    f"{self.folder} does not name its features, so the columns of a table cannot "
                    "be found; give an array with the columns in the order of training"
                )
            schema = Schema(tuple(Numeric(name) for name in self.feature_names))
        return schema.inputs(table)

    def _checked(self, x: Tree) -> Tree:
        """A tensor in the type that was trained on, and of the right shape."""
        if not isinstance(x, Tensor):
            return x
        wanted = self.record_shape
        if wanted is not None and tuple(x.shape[1:]) != wanted:
            shown = "×".join(map(str, wanted)) or "one number"
            single = tuple(x.shape) == wanted
            way = "a row per record"
            if single:
                way = in_words("x[None]", "an array of one row") + " for a single record"
            if self.schema is not None:
                way = "the table itself, whose columns the run encodes, or schema.inputs(table)"
            raise ValueError(
                f"the array has shape {tuple(x.shape)}, and a record of this run has shape "
                f"{shown}; give {way}"
            )
        if x.is_complex():
            raise ValueError("x holds complex numbers; give real ones")
        own = self.input_dtype
        return x if own is None or x.dtype == own else x.to(own)

    def _prepared(self, raw: Tree) -> Tree:
        device = self.device
        if isinstance(raw, Tensor):
            return self.preprocessing(raw).to(device)
        if self.preprocessing.stages:
            raise ValueError("preprocessing takes one tensor, and x has several; give one")
        return map_tensors(lambda tensor: tensor.to(device), raw)

    # ---- ONNX --------------------------------------------------------------------------------

    def export_onnx(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Write preprocessing and network as an ONNX file, checked with onnxruntime.

        A run with a schema has one input per column: numbers, truth values as 1 and 0, and dates as
        days since 1970-01-01 are float64, NaN where missing; categories are text, empty where
        missing, or float64 where all of them are numbers. A record that the schema refuses gets NaN
        in every output. Any other run has one input, `inputs`.

        Returns what is in the graph, what it takes, and the largest difference to PyTorch. The
        file is written only if that is small. Needs `pip install 'tacit[export]'`.
        """
        from tacit.report.onnx_export import export_onnx

        return export_onnx(self, Path(path))

    def onnx_inputs(self, x: Any) -> dict[str, np.ndarray]:
        """The records as arrays by name, which the exported file takes; `x` is as for `predict`.

        run.export_onnx("model.onnx")
        session = onnxruntime.InferenceSession("model.onnx")
        outputs, probabilities = session.run(None, run.onnx_inputs("new.csv"))
        """
        from tacit.report.onnx_export import onnx_inputs

        return onnx_inputs(self, x)


_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    )
}


def _names(value: Any, what: str) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{what} is {value!r}")
    return tuple(value)


def _size(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"input_shape has {value!r}")
    return value


def _inputs_in(path: Path) -> Tensor:
    for name in ("X", "inputs"):
        try:
            (array,) = read_arrays(path, (name,))
        except DataError:
            continue
        return as_tensors(array, f"{name} of {path}")
    raise DataError(f"{path} has no array X or inputs, or cannot be read; give one of the two")


# ---- predictions as files ------------------------------------------------------------------------


def prediction_columns(run: SavedRun, outputs: Tensor) -> dict[str, np.ndarray]:
    """Predictions, and probabilities where the task has them, as columns of a table."""
    found = run.decided(outputs)
    labels: Sequence[str] = run.class_names or ()
    if run.task is Task.REGRESSION:
        return _columns("prediction", found, ())
    chances = run.probabilities_of(outputs)
    if run.task is Task.MULTI_LABEL:
        return _columns("", found, labels) | _columns("probability", chances, labels)
    if chances.ndim != 2:
        raise ValueError("predictions of tokens are no table; use tacit.load_run in Python")
    return {"prediction": found, **_columns("probability", chances, labels)}


def _columns(title: str, values: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
    if values.ndim == 1:
        return {title: values}
    names = names if len(names) == values.shape[1] else [str(i) for i in range(values.shape[1])]
    return {f"{title} {n}".strip(): values[:, i] for i, n in enumerate(names)}


def columns_as_text(columns: dict[str, np.ndarray]) -> str:
    """The columns as CSV."""
    import csv
    import io

    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))
    return stream.getvalue()
