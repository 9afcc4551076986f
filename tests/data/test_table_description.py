"""A description holds names and types, and nothing of what is in the cells."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import polars as pl
import pytest
from typer.testing import CliRunner

from tacit.cli import app
from tacit.data import Boolean, Categorical, Date, Ignored, Numeric, Schema, describe
from tacit.errors import DataError

TABLE = """\
id,age,smoker,when,day,city,empty,outcome
q7713,8231,yes,1931-07-19,23.11.1931,Xanadu,,bespoke
q7714,,no,1932-08-21,,NA,NA,usual
"""
KINDS = {
    "id": Categorical("id"),
    "age": Numeric("age"),
    "smoker": Boolean("smoker"),
    "when": Date("when"),
    "day": Date("day", format="%d.%m.%Y"),
    "city": Categorical("city"),
    "empty": Ignored("empty"),
    "outcome": Categorical("outcome", unknown="error"),
}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text(TABLE)
    return path


def test_types_are_recognised(path):
    schema = describe(path, "outcome")
    assert {column.name: column for column in schema.columns} == KINDS
    assert schema.target == ("outcome",)
    frame = pd.DataFrame(
        {"a": [1, 2], "b": [True, False], "c": pd.to_datetime(["2020-01-01"] * 2), "d": ["u", "v"]}
    )
    kinds = ["numeric", "boolean", "date", "categorical"]
    for table in (frame, pl.from_pandas(frame), frame.to_dict("list")):
        assert [column.kind for column in describe(table).columns] == kinds
    with pytest.raises(ValueError, match=r"no column 'b'.*its columns are id, age"):
        describe(path, "b")


def test_the_command_writes_a_file_that_can_be_read(path, tmp_path):
    result = CliRunner().invoke(app, ["data", "describe", str(path), "--target", "outcome"])
    assert result.exit_code == 0, result.output
    (tmp_path / "schema.toml").write_text(result.stdout)
    assert Schema.read(tmp_path / "schema.toml") == describe(path, "outcome")
    assert "fill in the classes, which are public" in result.stdout
    without = CliRunner().invoke(app, ["data", "describe", str(path)])
    assert "target = []  # the column to predict" in without.stdout


def test_missing_cells_are_refused_until_the_schema_allows_them(path, tmp_path):
    """Whether a column has blanks is private, so that a description never says so."""
    text = CliRunner().invoke(app, ["data", "describe", str(path), "--target", "outcome"]).stdout
    assert text.count("missing = false  # true if cells may be empty\n") == 6
    schema = Schema(tuple(describe(path).columns[i] for i in (0, 1)))
    ready = replace(schema, columns=(Ignored("id"), schema.columns[1]))
    with pytest.raises(DataError) as refused:
        ready.inputs(path)
    assert str(refused.value) == (
        f"line 3 of {path} has an empty cell in column 'age'; fill it in, drop the record, or, to "
        'train with such cells, write missing = true below name = "age" in the schema'
    )
    old = 'name = "age"\nkind = "numeric"\nrange = "release"\n'
    text = ready.to_toml().replace(old + "missing = false", old + "missing = true")
    (tmp_path / "schema.toml").write_text(text)
    assert Schema.read(tmp_path / "schema.toml").inputs(path)[:, 1].tolist() == [0.0, 1.0]


def test_no_value_of_a_cell_is_in_the_output(path, tmp_path):
    """Tables of the same types have the same description, to the byte."""

    def output(text: str) -> str:
        path.write_text(text)
        return CliRunner().invoke(app, ["data", "describe", str(path)]).output

    first = output(TABLE)
    for row in TABLE.splitlines()[1:]:
        for cell in row.split(","):
            assert cell in ("", "NA", "yes", "no") or cell not in first, cell
    header, *rows = TABLE.splitlines()
    others = (
        [*rows, *rows],
        rows[:1] * 3,
        ["r1,0.5,TRUE,2001-01-01T10:00:00,01.02.2003,Rome,null,a"],
        [*rows, "q9,-1e9,f,0001-01-01,31.12.9999,,nan,a much longer text"],
    )
    for other in others:
        assert output("\n".join([header, *other])) == first


def test_row_numbers_without_a_name_and_decimal_commas(path):
    path.write_text(";a;b\n0;1,5;x\n1;2;y\n")
    schema = describe(path)
    assert [(column.name, column.kind) for column in schema.columns] == [
        ("a", "numeric"),
        ("b", "categorical"),
    ]
    with pytest.raises(DataError, match=r"line 2 .* '1,5' .*decimal comma"):
        Schema(schema.columns[:1]).inputs(path)


def test_long_tables_are_described_in_pieces(tmp_path):
    path = tmp_path / "long.csv"
    path.write_text("a,b\n" + "\n".join(f"{i},{i}" for i in range(59_999)) + "\n1,x\n")
    assert [column.kind for column in describe(path).columns] == ["numeric", "categorical"]
    with pytest.raises(DataError, match=r"line 60001 .* 'x' in column 'b'"):
        Schema((Numeric("b", (0, 1)),)).inputs(path)
    assert Schema((Numeric("a", (0, 59_998)),)).inputs(path)[-2, 0] == 1
