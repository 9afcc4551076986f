"""`Schema`: what the columns of a table mean, declared in a file that holds nothing private.

A schema fixes which numbers a table becomes, whatever the order of its columns and whoever is in
it. It is public: it holds names, kinds, declared ranges and categories, and is saved with a run.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacit.data.table_cells import Cells, TableCells, no_column, read_chunks
from tacit.data.table_columns import (
    RELEASE,
    Boolean,
    Categorical,
    Column,
    Date,
    Ignored,
    Numeric,
    column_from,
)
from tacit.errors import DataError

FORMAT = 1
TASKS = ("classification", "multi-label", "regression")


@dataclass(frozen=True)
class Schema:
    """The columns of a table in the order of the encoded features, and which are the target.

    The kind of the target says what the task is: classification for a `Categorical` or one
    `Boolean`, multi-label for several `Boolean`, regression for a `Numeric` with a range.

        schema = tacit.data.Schema.read("schema.toml")
        inputs, targets = schema.inputs("patients.csv"), schema.targets("patients.csv")
    """

    columns: tuple[Column, ...]
    target: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        columns = tuple(self.columns)
        target = (self.target,) if isinstance(self.target, str) else tuple(self.target)
        object.__setattr__(self, "columns", columns)
        object.__setattr__(self, "target", target)
        names = [column.name for column in columns]
        for name in (*names, *target):
            if names.count(name) != 1 or target.count(name) > 1:
                times = "more than once" if name in names else "and has no such column"
                raise ValueError(f"the schema names {name!r} {times}; name each column once")
        self._check_target()

    def _check_target(self) -> None:
        columns = self.target_columns
        if len(columns) > 1 and not all(isinstance(c, Boolean) for c in columns):
            raise ValueError(
                f"the target is {', '.join(self.target)}, and several targets are labels, each of "
                "them true or false; give them kind = 'boolean', or give one target"
            )
        for column in columns:
            if isinstance(column, Date | Ignored):
                raise ValueError(
                    f"the target {column.name!r} has kind {column.kind!r}; give categorical, "
                    "boolean or numeric"
                )

    # ---- what it says --------------------------------------------------------------------------

    @cached_property
    def features(self) -> tuple[Column, ...]:
        """The columns that become inputs."""
        return tuple(
            c for c in self.columns if c.name not in self.target and not isinstance(c, Ignored)
        )

    @cached_property
    def target_columns(self) -> tuple[Column, ...]:
        by_name = {column.name: column for column in self.columns}
        return tuple(by_name[name] for name in self.target)

    def named_in(self, text: str) -> tuple[str, ...]:
        """The columns that `text` names: one by its whole name, or several with commas."""
        if any(column.name == text for column in self.columns):
            return (text,)
        return tuple(name.strip() for name in text.split(","))

    def with_target(self, target: str | Sequence[str]) -> Schema:
        """The same columns, with this target."""
        names = (target,) if isinstance(target, str) else tuple(target)
        known = [column.name for column in self.columns]
        missing = [name for name in names if name not in known]
        if missing:
            raise no_column("the schema", missing[0], known, ", which is to be the target")
        return replace(self, target=names)

    @property
    def task(self) -> str:
        """ "classification", "multi-label" or "regression"."""
        columns = self.target_columns
        if not columns:
            raise ValueError("the schema names no target; name it there, or give the target")
        if len(columns) > 1:
            return "multi-label"
        return "regression" if isinstance(columns[0], Numeric) else "classification"

    @cached_property
    def feature_names(self) -> tuple[str, ...]:
        """The names of the D entries of an input."""
        self._require_complete(self.features)
        if not self.features:
            raise ValueError("the schema has no feature; give at least one column that is used")
        return tuple(name for column in self.features for name in column.entry_names)

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The classes 0..K-1, or the labels; None for a regression."""
        if self.task == "multi-label":
            return self.target
        (column,) = self.target_columns
        if isinstance(column, Categorical):
            self._require_complete((column,))
            return column.categories
        return ("false", "true") if isinstance(column, Boolean) else None

    @cached_property
    def released_entries(self) -> tuple[int, ...]:
        """Positions among the D entries of those whose range is to be released."""
        named = [(entry, column) for column in self.features for entry in column.entry_names]
        return tuple(
            i
            for i, (entry, column) in enumerate(named)
            if isinstance(column, Numeric | Date)
            and column.range == RELEASE
            and entry == column.name
        )

    def _require_complete(self, columns: Sequence[Column]) -> None:
        empty = [c.name for c in columns if isinstance(c, Categorical) and not c.categories]
        if empty:
            ignored = "" if set(empty) & set(self.target) else ", or give kind = 'ignored'"
            raise ValueError(
                f"the schema gives no categories for {', '.join(map(repr, empty))}; fill in those "
                f"that are public{ignored}"
            )

    # ---- tables --------------------------------------------------------------------------------

    def inputs(self, table: Any) -> Tensor:
        """The encoded features (N, D) float32: what preprocessing stages and networks take.

        `table` is the path of a .csv, .tsv or .parquet file, a frame of pandas or polars, a pyarrow
        Table, or a mapping of columns. Its columns may be in any order; others are ignored.
        """
        width = len(self.feature_names)
        return torch.cat([self._inputs(chunk, width) for chunk in read_chunks(table)])

    def _inputs(self, cells: TableCells, width: int) -> Tensor:
        found = [self._cells(cells, column) for column in self.features]
        inputs = np.empty((cells.num_rows, width), np.float32)
        start = 0
        for column, own in zip(self.features, found, strict=True):
            end = start + len(column.entry_names)
            inputs[:, start:end] = column.encode(own)
            start = end
        return torch.from_numpy(inputs)

    def encoded(self, table: Any) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a table that is read once; a regression's are not clipped."""
        width, task = len(self.feature_names), self.task
        parts = [
            (self._inputs(chunk, width), self._targets(chunk, task, clip=False))
            for chunk in read_chunks(table)
        ]
        inputs, targets = zip(*parts, strict=True)
        return torch.cat(inputs), torch.cat(targets)

    def targets(self, table: Any, *, clip: bool = True) -> Tensor:
        """Targets as the task has them.

        Classification: int64 (N,), positions in `class_names`. Multi-label: float32 (N, L) of 0
        and 1. Regression: float32 (N,), the declared range mapped onto [-1, 1]; `unscaled` maps
        back. Targets outside of the range are clipped to it, unless `clip` is False: train on
        clipped targets, and measure on those that are not.
        """
        task = self.task
        return torch.cat([self._targets(chunk, task, clip) for chunk in read_chunks(table)])

    def _targets(self, cells: TableCells, task: str, clip: bool) -> Tensor:
        found = [self._cells(cells, column) for column in self.target_columns]
        for column, own in zip(self.target_columns, found, strict=True):
            without = column.missing_in(own)
            if without.any():
                raise DataError(
                    f"{own.place(int(without.argmax()))} has an empty cell in the target "
                    f"{column.name!r}; drop the record"
                )
        rows = np.arange(cells.num_rows)
        if task == "multi-label":
            truths = [
                column.truths(own, rows)
                for column, own in zip(self.target_columns, found, strict=True)
                if isinstance(column, Boolean)
            ]
            return torch.from_numpy(np.stack(truths, axis=1).astype(np.float32))
        (column,), (own,) = self.target_columns, found
        if isinstance(column, Boolean):
            return torch.from_numpy(column.truths(own, rows).astype(np.int64))
        if isinstance(column, Categorical):
            self._require_complete((column,))
            return torch.from_numpy(
                replace(column, unknown="error").positions(own, rows, is_target=True)
            )
        assert isinstance(column, Numeric)
        lower, upper = self.target_range
        values = (column.numbers(own, rows) - (lower + upper) / 2) / ((upper - lower) / 2)
        return torch.from_numpy(values.clip(-1, 1) if clip else values).float()

    @property
    def target_range(self) -> tuple[float, float]:
        """The declared range of a regression's target."""
        (column,) = self.target_columns
        if not isinstance(column, Numeric) or column.range == RELEASE:
            raise ValueError(
                f"the target {column.name!r} has no declared range; give range = [lowest, "
                "highest], or kind = 'categorical' if its values are classes"
            )
        return column.bounds()

    def unscaled(self, targets: Tensor) -> Tensor:
        """Targets or predictions of a regression in the target's own units."""
        lower, upper = self.target_range
        return targets * ((upper - lower) / 2) + (lower + upper) / 2

    def _cells(self, table: TableCells, column: Column) -> Cells:
        if column.name not in table.columns:
            raise no_column(table.source, column.name, list(table.columns))
        return table.columns[column.name]

    # ---- files ---------------------------------------------------------------------------------

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Schema:
        """The schema in a TOML file."""
        try:
            stored = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
        except (OSError, ValueError, RecursionError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise ValueError(
                f"the schema {path} cannot be read ({why}); give a TOML file, as tacit data "
                "describe writes it"
            ) from error
        try:
            return cls.from_dict(stored)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, d: Any) -> Schema:
        """The schema from plain values, as `to_dict` gives them."""
        if not isinstance(d, dict) or not isinstance(d.get("columns"), list):
            raise ValueError("the schema has no columns; give [[columns]]")
        if d.get("format") != FORMAT or isinstance(d["format"], bool):
            raise ValueError(f"the schema has format {d.get('format')!r}; give format = {FORMAT}")
        extra = set(d) - {"format", "target", "columns"}
        if extra:
            raise ValueError(
                f"the schema has {sorted(map(str, extra))[0]!r}; give format, target and columns"
            )
        target = d.get("target", [])
        target = [target] if isinstance(target, str) else target
        if not isinstance(target, list | tuple) or not all(isinstance(t, str) for t in target):
            raise ValueError(f"target of the schema is {target!r}; give names of columns")
        columns = tuple(column_from(column) for column in d["columns"])
        return cls(columns, tuple(name for name in target if name))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, which JSON and TOML can hold, with the version of the format."""
        return {
            "format": FORMAT,
            "target": list(self.target),
            "columns": [column.to_dict() for column in self.columns],
        }

    def to_toml(self) -> str:
        """The text of a file that `read` reads."""
        target = self.target[0] if len(self.target) == 1 else list(self.target)
        lines = [f"format = {FORMAT}", f"target = {toml_value(target)}"]
        for column in self.columns:
            lines += ["", "[[columns]]"]
            lines += [f"{key} = {toml_value(value)}" for key, value in column.to_dict().items()]
        return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """A string, a truth value, a number or a list of them in TOML."""
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(value)
