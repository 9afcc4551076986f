"""A schema turns any form of a table into the same numbers; what does not fit it is named."""

from __future__ import annotations

import json
import string
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal

import numpy as np
import pandas as pd
import polars as pl
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tacit.data import Boolean, Categorical, Date, Ignored, Numeric, Schema, load_file
from tacit.errors import DataError, TacitError

MIXED = """\
id;age;city;when;smoker;score;ill
p1;30;Paris;2020-01-02;yes;1.5;no
p2;;Rome;2021-05-06;no;-2;yes
p3;250;"Berlin";;;1e1;no
p4;70;NA;2030-01-01;TRUE;3;yes
"""
COLUMNS = (
    Ignored("id"),
    Numeric("age", (0, 100), missing=True),
    Categorical("city", ("Paris", "Berlin"), missing=True),
    Date("when", ("2020-01-02", "2040-01-02"), missing=True),
    Boolean("smoker", missing=True),
    Numeric("score", (-5, 5)),
    Boolean("ill"),
)
SCHEMA = Schema(COLUMNS, "ill")
NAMES = (
    *("age", "age is missing", "city=Paris", "city=Berlin", "city=(other)", "city is missing"),
    *("when", "when is missing", "smoker", "smoker is missing", "score"),
)
DAYS = 7305.0  # from 2020-01-02 to 2040-01-02
AFTER = (np.datetime64("2021-05-06") - np.datetime64("2020-01-02")).astype(float)
LATE = (np.datetime64("2030-01-01") - np.datetime64("2020-01-02")).astype(float)
ENCODED = [
    [-0.4, 0, 1, 0, 0, 0, -1, 0, 1, 0, 0.3],
    [0, 1, 0, 0, 1, 0, 2 * AFTER / DAYS - 1, 0, -1, 0, -0.4],
    [1, 0, 0, 1, 0, 0, 0, 1, 0, 1, 1],
    [0.4, 0, 0, 0, 0, 1, 2 * LATE / DAYS - 1, 0, 1, 0, 0.6],
]


@pytest.fixture
def mixed(tmp_path):
    path = tmp_path / "mixed.csv"
    path.write_text(MIXED)
    return path


def test_what_each_kind_of_column_becomes(mixed):
    assert SCHEMA.feature_names == NAMES
    assert SCHEMA.task == "classification"
    assert SCHEMA.class_names == ("false", "true")
    inputs = SCHEMA.inputs(mixed)
    assert inputs.dtype == torch.float32
    assert torch.allclose(inputs, torch.tensor(ENCODED, dtype=torch.float32), atol=1e-6)
    targets = SCHEMA.targets(mixed)
    assert targets.dtype == torch.int64
    assert targets.tolist() == [0, 1, 0, 1]


def test_every_form_of_a_table_gives_the_same_numbers(mixed, tmp_path):
    frame = pd.read_csv(mixed, sep=";", parse_dates=["when"])
    other = pl.read_csv(mixed, separator=";", try_parse_dates=True)
    dtypes = frame.convert_dtypes()
    pq.write_table(other.to_arrow(), tmp_path / "mixed.parquet")
    (tmp_path / "mixed.tsv").write_text(MIXED.replace(";", "\t"))
    (tmp_path / "bom.csv").write_bytes(b"\xef\xbb\xbf" + MIXED.replace("\n", "\r\n\r\n").encode())
    forms = {
        **{"pandas": frame, "nullable": dtypes, "polars": other, "arrow": other.to_arrow()},
        "categories": frame.astype({"city": "category"}),
        "lists": {name: column.tolist() for name, column in frame.items()},
        **{n: tmp_path / n for n in ("mixed.parquet", "mixed.tsv", "bom.csv")},
        "zone": frame.assign(when=frame["when"].dt.tz_localize("UTC")),
    }
    for name, table in forms.items():
        assert torch.equal(SCHEMA.inputs(table), SCHEMA.inputs(mixed)), name
        assert torch.equal(SCHEMA.targets(table), SCHEMA.targets(mixed)), name


def test_columns_in_any_order_more_of_them_and_no_target(mixed):
    frame = pd.read_csv(mixed, sep=";", dtype=str)
    turned = frame[frame.columns[::-1]].assign(more="x").drop(columns=["ill", "id"])
    assert torch.equal(SCHEMA.inputs(turned), SCHEMA.inputs(mixed))
    with pytest.raises(DataError, match="the frame has no column 'ill'"):
        SCHEMA.targets(turned)
    with pytest.raises(DataError, match="the frame has no column 'city'; its columns are score,"):
        SCHEMA.inputs(turned.drop(columns="city"))


def test_a_record_becomes_the_same_numbers_whoever_else_is_in_the_table(mixed):
    frame = pd.read_csv(mixed, sep=";", dtype=str)
    for i in range(len(frame)):
        assert torch.equal(SCHEMA.inputs(frame.iloc[[i]]), SCHEMA.inputs(mixed)[[i]])


@pytest.mark.parametrize(
    "cells",
    [
        [date(2024, 1, 1), date(2024, 1, 2)],
        [datetime(2024, 1, 1, 5, tzinfo=timezone(timedelta(hours=5))), datetime(2024, 1, 2, 3)],
        [2**60 + 1, 2**60 + 3],
        [Decimal("1.50"), 0.1, np.float32(0.1), 3, 3.0],
        [True, False],
    ],
    ids=["dates", "times", "large numbers", "numbers", "truth values"],
)
@pytest.mark.parametrize(
    "added",
    ["text", date(2020, 2, 2), True, 2.5, None, 10**400],
    ids=["text", "date", "truth value", "number", "nothing", "huge"],
)
def test_a_cell_of_another_kind_changes_no_other_record(cells, added):
    """It makes the column one of text, which the other cells must not be able to tell."""
    names = ("2024-01-01", "2024-01-02T03:00:00", str(2**60 + 1), str(2**60 + 3), "1.5", "3", "0.1")
    schema = Schema((Categorical("a", (*names, "true", "1"), missing=True),))
    alone = schema.inputs({"a": cells})
    assert torch.equal(schema.inputs({"a": [*cells, added]})[: len(cells)], alone)


@pytest.mark.parametrize(
    ("column", "cell", "says"),
    [
        (Numeric("a", (0, 1)), "", "line 3 of .* empty cell in column 'a'.*missing = true"),
        (Numeric("a", (0, 1)), "NaN", "line 3 of .* empty cell"),
        (Numeric("a", (0, 1)), "red", "line 3 of .* 'red' in column 'a', which is no number"),
        (Numeric("a", (0, 1)), '"3,14"', "has a decimal comma: write numbers with a point"),
        (Numeric("a", (0, 1)), "1_000", "no number"),
        (Numeric("a", (0, 1)), "-inf", "not finite"),
        (Boolean("a"), "maybe", "line 3 .* 'maybe' .*true or false"),
        (Date("a", ("2000-01-01", "2001-01-01")), "1/2/2000", "no date in the format ISO"),
        (Date("a", format="%d/%m/%Y"), "2000-01-01", "no date in the format %d/%m/%Y"),
        (Categorical("a", ("u", "v"), unknown="error"), "w", "none of the categories u, v"),
    ],
)
def test_a_cell_that_does_not_fit_is_named(tmp_path, column, cell, says):
    good = {"numeric": "1", "boolean": "no", "date": "2000-01-01", "categorical": "u"}[column.kind]
    if getattr(column, "format", "iso") != "iso":
        good = "01/01/2000"
    path = tmp_path / "own.csv"
    path.write_text(f"a,b\n{good},1\n{cell},1\n")
    with pytest.raises(DataError, match=says):
        Schema((column,)).inputs(path)


def test_categories_that_frames_read_as_numbers():
    schema = Schema((Categorical("code", ("01", "2", "NA", "x")),))
    of_text = schema.inputs({"code": ["01", "2", "NA", "y"]})
    assert of_text.argmax(dim=1).tolist() == [0, 1, 2, 4]
    assert torch.equal(schema.inputs({"code": [1.0, 2.0]}), of_text[:2])
    assert torch.equal(schema.inputs({"code": np.array([1, 2])}), of_text[:2])


def test_dates_in_other_formats_and_zones():
    german = Schema((Date("d", ("2020-01-01", "2022-01-01"), "%d.%m.%Y"),))
    iso = Schema((Date("d", ("2020-01-01", "2022-01-01")),))
    same = iso.inputs({"d": ["2021-01-01", "2021-01-01T00:00:00Z", "2021-01-01T01:00:00+01:00"]})
    assert same.unique().numel() == 1
    assert torch.equal(german.inputs({"d": ["01.01.2021"]}), same[:1])
    assert iso.inputs({"d": ["1066-10-14", "2999-01-01"]}).tolist() == [[-1], [1]]


def test_a_class_that_was_not_declared():
    schema = Schema((Numeric("x", (0, 1)), Categorical("y", ("u", "v"))), "y")
    with pytest.raises(DataError, match=r"row 2 of .* 'w' in column 'y', .*classes u, v; add it"):
        schema.targets({"y": ["u", "w"]})


def test_several_labels():
    schema = Schema((Numeric("x", (0, 1)), Boolean("a"), Boolean("b")), ("b", "a"))
    targets = schema.targets({"a": ["yes", "no"], "b": [True, True], "x": [0, 1]})
    assert schema.task == "multi-label"
    assert schema.class_names == ("b", "a")
    assert targets.dtype == torch.float32
    assert targets.tolist() == [[1, 1], [1, 0]]


def test_regression_targets_are_scaled_and_back():
    schema = Schema((Numeric("x", (0, 1)), Numeric("y", (10, 30))), "y")
    table = {"x": [0, 0, 1, 1], "y": [10, 15, 30, 50]}
    assert schema.task == "regression"
    assert schema.class_names is None
    assert schema.targets(table).tolist() == [-1, -0.5, 1, 1]
    exact = schema.targets(table, clip=False)
    assert schema.unscaled(exact).tolist() == [10, 15, 30, 50]
    with pytest.raises(ValueError, match=r"'x' has no declared range.*kind = 'categorical'"):
        Schema((Numeric("x"), Numeric("y", (0, 1))), "x").targets(table)


def test_records_of_each_task(mixed):
    train, test = load_file(mixed, schema=SCHEMA, test_fraction=0.4, public_size=4)
    assert train.num_classes == 2
    assert train.class_names == ("false", "true")
    assert train.feature_names == NAMES
    assert len(train) + len(test) == 4
    rows = torch.cat([train.record_ids, test.record_ids])
    assert torch.equal(torch.cat([train.inputs, test.inputs]), SCHEMA.inputs(mixed)[rows])

    scores = Schema((*COLUMNS[:5], Numeric("score", (-1, 4)), COLUMNS[6]), "score")
    train, test = load_file(mixed, schema=scores, test_path=mixed)
    assert train.num_classes is None
    assert train.targets.max() == 1  # clipped for training
    assert scores.unscaled(test.targets).tolist() == [1.5, -2, 10, 3]  # measured as it is
    labels = Schema((*COLUMNS[:4], Boolean("smoker"), *COLUMNS[5:]), ("smoker", "ill"))
    with pytest.raises(DataError, match=r"line 4 .* empty cell in the target 'smoker'"):
        load_file(mixed, schema=labels)
    frame = pd.read_csv(mixed, sep=";").fillna({"smoker": "no"})
    train, _ = load_file(frame, schema=labels, test_fraction=0)
    assert train.num_classes is None
    assert train.targets.tolist() == [[1, 0], [0, 1], [0, 0], [1, 1]]
    with pytest.raises(ValueError, match="leave classes out"):
        load_file(mixed, schema=SCHEMA, classes=2)
    train, _ = load_file(frame, "smoker", schema=Schema(labels.columns), test_fraction=0)
    assert train.targets.tolist() == [1, 0, 0, 1]


def test_what_is_left_to_be_released_comes_as_it_is():
    schema = Schema(
        (Numeric("a", missing=True), Date("d"), Numeric("b", (0, 2)), Boolean("y")), "y"
    )
    table = {"a": [7, None, 1e300], "d": ["2001-01-01"] * 3, "b": [1, 1, 1], "y": [0, 1, 0]}
    assert schema.released_entries == (0, 2)
    inputs = schema.inputs(table)
    assert inputs[0].tolist() == pytest.approx([7, 0, 366 / 365.25, 0])
    assert inputs[1, :2].isnan().tolist() == [True, False]
    assert inputs[2, 0].isfinite()
    notes = " ".join(load_file(table, schema=schema, test_fraction=0)[0].notes)
    assert "the ranges of a, d were not declared" in notes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no columns"),
        ("x = ", "cannot be read"),
        ("format = 2\ncolumns = []", "format 2; give format = 1"),
        ("format = 1\nmore = 1\ncolumns = []", "has 'more'"),
        ("format = 1\ncolumns = [1]", "no name"),
        ("kind = 'text'", "'text', .*'ignored'.*categories"),
        ("kind = 'numbr'", "one of numeric, categorical"),
        ("kind = 'numeric'\nrnge = [0, 1]", "'rnge'; give range"),
        ("kind = 'numeric'\nrange = [1, 0]", "must be below"),
        ("kind = 'numeric'\nrange = [0, inf]", "must be below"),
        ("kind = 'date'\nrange = [1, 2]", "2000-01-01"),
        ("kind = 'categorical'\ncategories = 'release'", "can only be declared"),
        ("kind = 'categorical'\ncategories = ['u', 'u']", "have one twice"),
        ("kind = 'boolean'\n[[columns]]\nname = 'a'\nkind = 'ignored'", "'a' more than once"),
    ],
)
def test_what_is_wrong_with_a_schema(tmp_path, text, says):
    path = tmp_path / "schema.toml"
    column = "format = 1\n[[columns]]\nname = 'a'\n"
    path.write_text(column + text if text.startswith("kind") else text)
    with pytest.raises(ValueError, match=says) as caught:
        Schema.read(path)
    assert str(path) in str(caught.value)


def test_a_target_that_is_none():
    with pytest.raises(ValueError, match="'b' and has no such column"):
        Schema((Boolean("a"),), "b")
    with pytest.raises(ValueError, match="'a' has kind 'date'; give categorical"):
        Schema((Date("a"),), "a")
    with pytest.raises(ValueError, match="several targets are labels"):
        Schema((Boolean("a"), Numeric("b")), ("a", "b"))


def test_a_schema_that_is_not_complete_says_what_is_missing():
    schema = Schema((Categorical("a"), Categorical("b"), Numeric("y", (0, 1))))
    with pytest.raises(ValueError, match="no categories for 'a', 'b'; fill in"):
        schema.inputs({"a": ["x"], "b": ["x"]})
    with pytest.raises(ValueError, match="names no target"):
        _ = schema.task
    with pytest.raises(ValueError, match="no feature"):
        _ = Schema((Ignored("a"),)).feature_names


# ---- at random -----------------------------------------------------------------------------------

WORDS = st.text(min_size=1, max_size=8).map(str.strip).filter(bool)
FINITE = st.floats(-1e30, 1e30)
RANGES = st.tuples(FINITE, FINITE).filter(lambda r: np.float32(r[0]) < np.float32(r[1]))
DATES = st.tuples(st.dates(), st.dates()).filter(lambda d: d[0] < d[1])


def columns_named(name):
    missing = st.booleans()
    return st.one_of(
        st.builds(Numeric, st.just(name), RANGES | st.just("release"), missing=missing),
        st.builds(
            Categorical,
            st.just(name),
            st.lists(WORDS, max_size=4, unique=True).map(tuple),
            st.sampled_from(["other", "error"]),
            missing=missing,
        ),
        st.builds(
            Date,
            st.just(name),
            DATES.map(lambda d: (d[0].isoformat(), d[1].isoformat())),
            missing=missing,
        ),
        st.builds(Boolean, st.just(name), missing=missing),
        st.builds(Ignored, st.just(name)),
    )


SCHEMAS = st.lists(WORDS, min_size=1, max_size=5, unique=True).flatmap(
    lambda names: st.tuples(*map(columns_named, names)).map(Schema)
)
quick = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@quick
@given(schema=SCHEMAS)
def test_round_trips(schema, tmp_path):
    path = tmp_path / "schema.toml"
    path.write_text(schema.to_toml(), encoding="utf-8")
    assert Schema.read(path) == schema
    assert Schema.from_dict(json.loads(json.dumps(schema.to_dict()))) == schema


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
KEYS = st.sampled_from(
    ("format", "target", "columns", "name", "kind", "range", "categories", "missing", "unknown")
)
KINDS = st.sampled_from(("numeric", "categorical", "boolean", "date", "ignored", "text"))
VALUES = st.recursive(
    LEAVES | KINDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)
COLUMN_LIKE = st.fixed_dictionaries(
    {"name": st.sampled_from("abc") | VALUES, "kind": KINDS},
    optional={key: VALUES for key in ("range", "categories", "missing", "unknown", "format")},
)


@quick
@given(
    stored=VALUES
    | st.fixed_dictionaries(
        {"format": st.just(1) | VALUES, "columns": st.lists(COLUMN_LIKE, max_size=3) | VALUES},
        optional={"target": st.sampled_from("abc") | VALUES},
    )
)
def test_a_malformed_schema_is_a_users_mistake(stored):
    try:
        schema = Schema.from_dict(stored)
    except ValueError:
        return
    assert Schema.from_dict(schema.to_dict()) == schema


CELLS = st.sampled_from(
    ["", "1", "-2.5", "1e400", "nan", "NA", "null", "inf", "3,14", "yes", "no", "2020-01-01", "x"]
) | st.text(string.printable + "é\x00", max_size=6)


@quick
@given(
    rows=st.lists(st.lists(CELLS, min_size=1, max_size=4), max_size=6),
    mark=st.sampled_from(",;\t"),
    more=st.binary(max_size=8),
    columns=st.tuples(*map(columns_named, "abc")),
)
def test_a_malformed_table_is_a_users_mistake(rows, mark, more, columns, tmp_path):
    schema = Schema(columns, () if isinstance(columns[2], Date | Ignored) else "c")
    path = tmp_path / "own.csv"
    text = "\n".join([mark.join("abc"), *(mark.join(row) for row in rows)])
    path.write_bytes(text.encode() + more)
    for read in (schema.inputs, schema.targets):
        try:
            values = read(path)
        except (ValueError, TacitError):
            continue
        if values.ndim == 2:
            values[:, list(schema.released_entries)] = 0
            assert (values.abs() <= 1).all()
