"""The encoding of a table as operators of ONNX: one input per column, as `Schema.inputs` has it.

Numbers, truth values and dates are float64 of shape (N,), NaN where missing; categories are text,
empty where missing, or float64 where every category is a number. What `Schema.inputs` refuses, such
as an empty cell in a column without `missing = true`, a graph cannot refuse: such a record gets NaN
in every output.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tacit.data.table_cells import Cells, TableCells, no_column, read_cells, text_of
from tacit.data.table_columns import (
    DAYS_PER_YEAR,
    LARGEST,
    NO_VALUE,
    RELEASE,
    Boolean,
    Categorical,
    Column,
    Date,
    Numeric,
)
from tacit.data.table_schema import Schema

DAYS_TO_2000 = 10957.0  # from 1970-01-01
_FIRST_DAY, _LAST_DAY = -719_162.0, 2_932_897.0  # of the years 1 and 9999
ML_DOMAIN, ML_VERSION = "ai.onnx.ml", 3
OUTPUTS, PROBABILITIES, PREDICTION = "outputs", "probabilities", "prediction"


def input_names(schema: Schema) -> dict[str, str]:
    """The name of each column's input: its own, unless an output may have that name."""
    own = [column.name for column in schema.features]
    names = dict(zip(own, own, strict=True))
    for name in own:
        while names[name] in (OUTPUTS, PROBABILITIES, PREDICTION):
            names[name] = _unlike_any(f"column {name}", own)
    return names


def is_number(column: Column) -> bool:
    """Whether the column's input is float64: all but categories that are no numbers."""
    return not isinstance(column, Categorical) or all(map(_is_plain, column.categories))


def feed_of(column: Column) -> str:
    """What a column's input takes, in words."""
    blank = ", NaN where missing" if column.missing else ""
    if isinstance(column, Boolean):
        return f"float64: 1 for true, 0 for false{blank}"
    if isinstance(column, Date):
        return f"float64: days since 1970-01-01{blank}"
    if not isinstance(column, Categorical):
        return f"float64: the number{blank}"
    if is_number(column):
        return f"float64: the category, which is a number{blank}"
    blank = ", empty where missing" if column.missing else ""
    return f"text: the category as the schema has it{blank}"


def arrays_of(schema: Schema, table: Any) -> dict[str, np.ndarray]:
    """The inputs that the graph takes for the records of a table, by name."""
    cells, names = read_cells(table), input_names(schema)
    return {names[column.name]: _array(cells, column) for column in schema.features}


def _array(table: TableCells, column: Column) -> np.ndarray:
    if column.name not in table.columns:
        raise no_column(table.source, column.name, list(table.columns))
    cells = table.columns[column.name]
    column.encode(cells)  # refuses what cannot be encoded, and names the cell
    rows = np.flatnonzero(~column.missing_in(cells))
    if isinstance(column, Categorical):
        return _categories(cells, column, rows)
    values = np.full(len(cells), math.nan)
    if isinstance(column, Boolean):
        values[rows] = column.truths(cells, rows)
    elif isinstance(column, Date):
        values[rows] = column.years(cells, rows) * DAYS_PER_YEAR + DAYS_TO_2000
    else:
        assert isinstance(column, Numeric)
        values[rows] = column.numbers(cells, rows)
    return values


def _categories(cells: Cells, column: Categorical, rows: np.ndarray) -> np.ndarray:
    places, known = column.positions(cells, rows), len(column.categories)
    if is_number(column):
        numbers = np.full(len(cells), math.nan)
        # Infinity is no category, and stands for all that are not declared.
        numbers[rows] = np.array([*map(float, column.categories), math.inf])[places]
        return numbers
    texts = np.full(len(cells), "", object)
    for row, place in zip(rows.tolist(), places.tolist(), strict=True):
        own = text_of(cells.values[row]).strip()
        texts[row] = column.categories[place] if place < known else own
    return texts


def _is_plain(category: str) -> bool:
    """Whether the text is how a number is written, so that no other text is the same number."""
    try:
        return math.isfinite(float(category)) and text_of(float(category)) == category
    except (ValueError, OverflowError):
        return False


# ---- the graph -----------------------------------------------------------------------------------


def with_columns(model: Any, schema: Schema) -> Any:
    """The model with the columns in the place of its one input, the encoded (N, D) float32."""
    import onnx
    from onnx import TensorProto, compose, helper

    names, outputs = input_names(schema), [output.name for output in model.graph.output]
    model = compose.add_prefix(model, _unlike_any("network/", [*names.values()]))
    graph = model.graph
    (inner,) = graph.input
    build = _Builder(_unlike_any("table/", [*names.values()]))
    parts, refused = [], []
    for column in schema.features:
        entries, bad = build.column(column, names[column.name])
        parts.append(entries)
        refused += bad
    build.add("Concat", parts, inner.name, axis=1)
    any_refused = _any(build, refused) if refused else ""
    ends, before = [], len(build.nodes)
    for output, name in zip(graph.output, outputs, strict=True):
        if refused:
            mask = any_refused
            for axis in range(1, len(output.type.tensor_type.shape.dim)):
                mask = build.add("Unsqueeze", [mask, build.integers([axis])])
            build.add("Where", [mask, build.constant(np.float32(math.nan)), output.name], name)
        else:
            build.add("Identity", [output.name], name)
        end = onnx.ValueInfoProto()
        end.CopyFrom(output)
        end.name = name
        ends.append(end)
    nodes = [*build.nodes[:before], *graph.node, *build.nodes[before:]]
    del graph.node[:], graph.input[:], graph.output[:]
    graph.node.extend(nodes)
    graph.output.extend(ends)
    graph.initializer.extend(build.constants)
    for column in schema.features:
        kind = TensorProto.DOUBLE if is_number(column) else TensorProto.STRING
        value = helper.make_tensor_value_info(names[column.name], kind, ["batch"])
        value.doc_string = feed_of(column)
        graph.input.append(value)
    if not any(o.domain == ML_DOMAIN for o in model.opset_import):
        model.opset_import.append(helper.make_opsetid(ML_DOMAIN, ML_VERSION))
    return model


def _unlike_any(prefix: str, names: Sequence[str]) -> str:
    """The prefix, or one like it that no name begins with."""
    while any(name.startswith(prefix) for name in names):
        prefix = f"_{prefix}"
    return prefix


def _any(build: _Builder, masks: list[str]) -> str:
    whole = masks[0]
    for mask in masks[1:]:
        whole = build.add("Or", [whole, mask])
    return whole


class _Builder:
    """Nodes and constants, with names that begin with one prefix."""

    def __init__(self, prefix: str) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self._prefix, self._count = prefix, 0

    def _name(self) -> str:
        self._count += 1
        return f"{self._prefix}{self._count}"

    def add(
        self, kind: str, inputs: Sequence[str], output: str = "", domain: str = "", **more: Any
    ) -> str:
        from onnx import helper

        output = output or self._name()
        node = helper.make_node(kind, list(inputs), [output], self._name(), domain=domain, **more)
        self.nodes.append(node)
        return output

    def constant(self, value: Any) -> str:
        from onnx import numpy_helper

        name = self._name()
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def integers(self, values: Sequence[int]) -> str:
        return self.constant(np.array(values, np.int64))

    def column(self, column: Column, given: str) -> tuple[str, list[str]]:
        """(N, entries) float32 of a column, and masks (N,) of the records that are refused."""
        if isinstance(column, Categorical):
            return self._categorical(column, given)
        missing = self.add("IsNaN", [given])
        refused = [] if column.missing else [missing]
        if isinstance(column, Boolean):
            values = self._sum(self._scaled(given, 2.0), -1.0)
            true, false = (self.add("Equal", [given, self._double(v)]) for v in (1.0, 0.0))
            known = _any(self, [true, false, missing])
            refused.append(self.add("Not", [known]))
        else:
            assert isinstance(column, Numeric | Date)
            values = given
            if not isinstance(column, Date):
                refused.append(self.add("IsInf", [given]))
            else:
                refused.append(self.add("Less", [given, self._double(_FIRST_DAY)]))
                refused.append(self.add("Greater", [given, self._double(_LAST_DAY)]))
                years = self._sum(given, -DAYS_TO_2000)
                values = self.add("Div", [years, self._double(DAYS_PER_YEAR)])
            values = self._in_range(column, values)
        values = self.add("Where", [missing, self._double(column.neutral), values])
        entries = [self._float(values)]
        if column.missing:
            entries.append(self._float(missing))
        axis = self.integers([1])
        rows = [self.add("Unsqueeze", [entry, axis]) for entry in entries]
        return rows[0] if len(rows) == 1 else self.add("Concat", rows, axis=1), refused

    def _in_range(self, column: Numeric | Date, values: str) -> str:
        """The formula of `tacit.data.table_columns`, in float64 as there."""
        if column.range == RELEASE:
            return self.add("Clip", [values, self._double(-LARGEST), self._double(LARGEST)])
        lower, upper = column.bounds()
        values = self.add("Clip", [values, self._double(lower), self._double(upper)])
        values = self._sum(self._sum(self._scaled(values, 0.5), -lower / 4), -upper / 4)
        values = self.add("Div", [values, self._double(upper / 4 - lower / 4)])
        return self.add("Clip", [values, self._double(-1.0), self._double(1.0)])

    def _categorical(self, column: Categorical, given: str) -> tuple[str, list[str]]:
        """One entry per category, then those that are for other values and for missing cells."""
        count = len(column.categories)
        axis = self.integers([1])
        if is_number(column):
            missing = self.add("IsNaN", [given])
            rows = self.add("Unsqueeze", [given, axis])
            numbers = self.constant(np.array([*map(float, column.categories)])[None])
            hits = self._float(self.add("Equal", [rows, numbers]))
            found = self.add("ReduceMax", [hits, axis], keepdims=0)
            known = self.add("Greater", [found, self.constant(np.float32(0.5))])
            other = self.add("Not", [self.add("Or", [known, missing])])
        else:
            place = self._places(column, given)
            rows = self.add("Unsqueeze", [place, axis])
            hits = self._float(self.add("Equal", [rows, self.integers([*range(count)])]))
            other, missing = (
                self.add("Equal", [place, self.constant(np.int64(count + extra))])
                for extra in (0, 1)
            )
        entries, refused = [hits], []
        for mask, has_entry in ((other, column.unknown == "other"), (missing, column.missing)):
            if has_entry:
                entries.append(self.add("Unsqueeze", [self._float(mask), axis]))
            else:
                refused.append(mask)
        return self.add("Concat", entries, axis=1), refused

    def _places(self, column: Categorical, given: str) -> str:
        """Positions of categories; one more for other values, and two more for missing cells."""
        count, places = len(column.categories), column.places()
        blanks = [
            "".join(letters)
            for word in NO_VALUE  # in any case
            for letters in itertools.product(*((c, c.upper()) for c in word))
        ]
        places = places | {blank: count + 1 for blank in blanks if blank not in places}
        return self.add(
            "LabelEncoder",
            [given],
            domain=ML_DOMAIN,
            keys_strings=list(places),
            values_int64s=list(places.values()),
            default_int64=count,
        )

    def _double(self, value: float) -> str:
        return self.constant(np.float64(value))

    def _sum(self, values: str, summand: float) -> str:
        return self.add("Add", [values, self._double(summand)])

    def _scaled(self, values: str, factor: float) -> str:
        return self.add("Mul", [values, self._double(factor)])

    def _float(self, values: str) -> str:
        from onnx import TensorProto

        return self.add("Cast", [values], to=TensorProto.FLOAT)


# ---- a check -------------------------------------------------------------------------------------


def random_table(
    schema: Schema, ranges: dict[str, tuple[float, float]], count: int, seed: int
) -> dict[str, list[Any]]:
    """Cells of every kind that the schema takes: within and out of range, other, missing.

    `ranges` are those of columns whose range was released, dates in years since 2000.
    """
    generator = np.random.default_rng(seed)
    return {c.name: _random_cells(c, ranges, count, generator) for c in schema.features}


def _random_cells(
    column: Column, ranges: dict[str, tuple[float, float]], count: int, generator: Any
) -> list[Any]:
    cells: list[Any]
    if isinstance(column, Categorical):
        texts = [*column.categories, *(["neither of these"] if column.unknown == "other" else [])]
        cells = [texts[i] for i in generator.integers(0, len(texts), count)]
    elif isinstance(column, Boolean):
        cells = [bool(i) for i in generator.integers(0, 2, count)]
    else:
        assert isinstance(column, Numeric | Date)
        lower, upper = ranges.get(column.name, (-3.0, 3.0))
        if column.range != RELEASE:
            lower, upper = column.bounds()
        cells = (lower + (upper - lower) * generator.uniform(-0.3, 1.3, count)).tolist()
        if isinstance(column, Date):
            days = [year * DAYS_PER_YEAR for year in cells]
            cells = [_moment(min(max(day, -700_000.0), 2_900_000.0)) for day in days]
    if column.missing:
        for row in np.flatnonzero(generator.random(count) < 0.3).tolist():
            cells[row] = None
    return cells


def _moment(days: float) -> Any:
    import datetime

    return datetime.datetime(2000, 1, 1) + datetime.timedelta(days=days)
