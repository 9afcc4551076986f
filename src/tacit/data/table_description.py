"""`describe`: a first schema of a table, from the names of its columns and their types alone.

What it says about the cells is the type of each column, and nothing else: no value, count, range or
category, nor whether cells are missing. Types are for the owner of the table to confirm, as is
everything that is to be public.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from tacit.data.table_cells import Cells, decimal_comma, number_of, read_chunks
from tacit.data.table_columns import (
    FALSE_WORDS,
    NO_VALUE,
    RELEASE,
    TRUE_WORDS,
    Boolean,
    Categorical,
    Column,
    Date,
    Ignored,
    Numeric,
)
from tacit.data.table_schema import Schema

_DATE_FORMATS = ("iso", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d")

HEADER = """\
# What the columns of the table mean. Everything in this file is public, and is saved with a run.
# It was made from the names and the types of the columns, and holds no value. Confirm each type:
# 0 and 1 may be classes, and a number may be a code; then give kind = "categorical" with its
# categories, kind = "boolean", or kind = "ignored" to leave the column out.
# missing = false refuses cells that are empty, NA, NaN or null. Which columns may have them is for
# you to say, since whether they do is private: then give missing = true, for one more input.
"""
_RANGE = "  # or what is public, [lowest, highest], which costs no privacy"
_DATES = '  # or what is public, ["2000-01-01", "2030-01-01"], which costs no privacy'
_CATEGORIES = "  # fill in those that are public; others become (other)"
_CLASSES = "  # fill in the classes, which are public"
_CODES = '  # the range that is public, [lowest, highest]; for classes: kind = "categorical"'
_MISSING = "  # true if cells may be empty"
_TARGET = "  # the column to predict, or several columns of true and false"


def describe(table: Any, target: str | Sequence[str] = ()) -> Schema:
    """A schema of the table's columns, for you to confirm and complete.

    Ranges are left to be released, and categories to be filled in. No column may have missing
    cells until you say so. `table` is what `Schema.inputs` takes.

        print(tacit.data.describe("patients.csv", "outcome").to_toml())
    """
    candidates: dict[str, list[Column]] = {}
    empty: set[str] = set()
    for chunk in read_chunks(table):
        for name, cells in chunk.columns.items():
            if (
                not name
            ):  # the row numbers that pandas writes; what a schema does not name is ignored
                continue
            if name not in candidates:
                candidates[name] = _candidates(name)
                empty.add(name)
            given = _given(cells)
            if given:
                empty.discard(name)
            candidates[name] = [c for c in candidates[name] if _takes(c, cells, given)]
    columns: list[Column] = []
    for name, fitting in candidates.items():
        # Cells that are all missing tell no type.
        columns.append(Ignored(name) if name in empty else fitting[0])
    schema = Schema(tuple(columns))
    return to_predict(schema, target) if target else schema


def to_predict(schema: Schema, target: str | Sequence[str]) -> Schema:
    """The schema with this target, whose cells all have a known class."""
    schema = schema.with_target(target)
    return Schema(
        tuple(
            replace(c, unknown="error")
            if c.name in schema.target and isinstance(c, Categorical)
            else c
            for c in schema.columns
        ),
        schema.target,
    )


def commented(schema: Schema) -> str:
    """The text of the schema's file, with what is to be confirmed and filled in."""
    target, *blocks = schema.to_toml().split("\n[[columns]]\n")
    lines = target.splitlines()
    lines[-1] += "" if schema.target else _TARGET
    parts = ["\n".join(lines) + "\n"]
    for column, block in zip(schema.columns, blocks, strict=True):
        is_target = column.name in schema.target
        hint = ""
        if isinstance(column, Categorical) and not column.categories:
            hint = _CLASSES if is_target else _CATEGORIES
        elif isinstance(column, Numeric | Date) and column.range == RELEASE:
            hint = _DATES if isinstance(column, Date) else _CODES if is_target else _RANGE
        hints = dict.fromkeys(('range = "release"', "categories = []"), hint)
        if not is_target and not isinstance(column, Ignored):
            hints["missing = false"] = _MISSING
        lines = block.strip().splitlines()
        parts.append("".join(f"{line}{hints.get(line, '')}\n" for line in lines))
    return HEADER + "\n[[columns]]\n".join(parts)


def _candidates(name: str) -> list[Column]:
    """What a column may be, what is most specific first."""
    return [
        Boolean(name),
        Numeric(name),
        *(Date(name, format=form) for form in _DATE_FORMATS),
        Categorical(name),
    ]


def _given(cells: Cells) -> list[Any]:
    """The cells that are not missing."""
    values = cells.values[~cells.missing].tolist()
    if cells.values.dtype.kind != "O":
        return values[:1]  # all of one type
    return [text for text in values if text.strip().lower() not in NO_VALUE]


def _takes(column: Column, cells: Cells, given: Iterable[Any]) -> bool:
    kind = cells.values.dtype.kind
    if isinstance(column, Categorical):
        return True
    if kind != "O":
        return {"f": Numeric, "b": Boolean, "M": Date}[kind] is type(column) or not len(cells)
    if isinstance(column, Boolean):
        words = {*TRUE_WORDS, *FALSE_WORDS} - {"0", "1"}  # which are numbers first
        return all(text.lower() in words for text in given)
    try:
        for text in given:
            if isinstance(column, Date):
                column.read(text)
            elif not (decimal_comma(text) or math.isfinite(number_of(text))):
                return False  # a decimal comma is refused with a hint when the table is used
    except (ValueError, OverflowError):
        return False
    return True
