"""Lines of JSON become records of token rows: by line, by document, by user."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from tacit.data.text import (
    IGNORED,
    TextForm,
    TextLine,
    classes_in,
    grouped,
    read_lines,
    split_groups,
)
from tacit.errors import DataError

END = 99


def letters(texts: list[str]) -> list[list[int]]:
    """A token per letter, a = 1."""
    return [[ord(letter) - 96 for letter in text if letter != " "] for text in texts]


def rows_of(form: TextForm, *groups: list[str], **options) -> list[list[list[int]]]:
    """The counted tokens of each row of each record."""
    lines = [[TextLine(text) for text in group] for group in groups]
    records = form.records(lines, letters, **options)
    found = []
    for ids, targets in zip(records.inputs["input_ids"], records.targets, strict=True):
        assert torch.equal(ids[targets != IGNORED], targets[targets != IGNORED])
        found.append([row[row != IGNORED].tolist() for row in targets])
    return found


def test_a_line_is_one_row_cut_at_its_length() -> None:
    form = TextForm("line", 4, end=END)
    assert rows_of(form, ["ab"], ["abcdef"]) == [[[1, 2, END]], [[1, 2, 3, 4]]]


def test_a_document_is_cut_into_rows_and_is_one_record() -> None:
    form = TextForm("document", 3, 3, end=END)
    assert rows_of(form, ["abcd"], ["abcdefghijkl"]) == [
        [[1, 2, 3], [4, END], []],
        [[1, 2, 3], [4, 5, 6], [7, 8, 9]],
    ]


def test_a_user_is_the_first_lines_and_no_more() -> None:
    form = TextForm("user", 3, 2, end=END)
    assert rows_of(form, ["a", "b", "c"], ["d"]) == [[[1, END], [2, END]], [[4, END], []]]


def test_packed_rows_hold_the_texts_of_one_user_alone() -> None:
    form = TextForm("user", 4, 2, pack=True, end=END)
    assert rows_of(form, ["a", "bc", "defgh"], ["i"]) == [
        [[1, END, 2, 3], [END, 4, 5, 6]],
        [[9, END], []],
    ]


def test_held_out_text_is_never_dropped() -> None:
    form = TextForm("user", 3, 2, end=END)
    found = rows_of(form, ["a", "b", "c"], ["d"], keep_all=True)
    assert found == [[[1, END], [2, END]], [[3, END], []], [[4, END], []]]


def test_every_row_attends_to_something_and_padding_is_not_counted() -> None:
    form = TextForm("document", 3, 3, end=END, pad=7)
    records = form.records([[TextLine("ab")], [TextLine("")]], letters)
    mask = records.inputs["attention_mask"]
    assert mask[:, :, 0].all()  # softmax over nothing is NaN
    assert mask[0].tolist() == [[1, 1, 1], [1, 0, 0], [1, 0, 0]]
    assert (records.targets[:, 1:] == IGNORED).all()
    assert records.privacy_unit.startswith("document")


def test_the_shape_is_public() -> None:
    form = TextForm("user", 5, 3, end=END)
    few = form.records([[TextLine("a")]], letters)
    many = form.records([[TextLine("abcdefghij")] * 10_000], letters)
    assert few.shape == many.shape == {"input_ids": (3, 5), "attention_mask": (3, 5)}


def test_a_user_of_ten_thousand_lines_costs_the_tokens_of_a_few() -> None:
    seen = []

    def counted(texts: list[str]) -> list[list[int]]:
        seen.extend(texts)
        return letters(texts)

    TextForm("user", 5, 3).records([[TextLine("ab")] * 10_000], counted)
    assert len(seen) == 3


def test_labels_are_by_row() -> None:
    form = TextForm("user", 3, 3, classes=("bad", "good"))
    lines = [[TextLine("a", "good"), TextLine("b", "bad")]]
    records = form.records(lines, letters)
    assert records.targets.tolist() == [[1, 0, IGNORED]]
    assert records.class_names == ("bad", "good")
    with pytest.raises(DataError, match="label 'great', and the classes are bad, good"):
        form.records([[TextLine("a", "great")]], letters)


def test_the_order_of_users_in_the_file_changes_no_record() -> None:
    draw = random.Random(0)
    lines = [TextLine(draw.choice("abcdefgh") * 3, user=f"u{i % 7}") for i in range(40)]
    form = TextForm("user", 4, 3, end=END)

    def by_content(groups) -> list:
        targets = form.records(groups, letters).targets
        return sorted(targets.flatten(1).tolist())

    # Users change places; the lines of each keep their order.
    moved = sorted(lines, key=lambda line: line.user, reverse=True)
    assert by_content(grouped(lines, "user")) == by_content(grouped(moved, "user"))


def test_one_record_moves_no_other_to_the_other_side() -> None:
    lines = [TextLine("x", user=f"user {i}") for i in range(400)]
    train, held_out = split_groups(grouped(lines, "user"), 0.25)
    assert 60 < len(held_out) < 140
    fewer, held_out_of_fewer = split_groups(grouped(lines[1:], "user"), 0.25)
    assert [g for g in train if g[0] is not lines[0]] == fewer
    assert [g for g in held_out if g[0] is not lines[0]] == held_out_of_fewer


def test_one_and_its_text_are_one_user_and_spaces_do_not_make_another(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    users = [1, "1", " 1 ", "2"]
    file.write_text("\n".join(json.dumps({"text": "a", "user": u}) for u in users))
    groups = grouped(read_lines(file, user="user"), "user")
    assert [len(group) for group in groups] == [3, 1]


def test_empty_lines_of_the_file_and_its_byte_order_mark_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": ""}\n')
    assert [line.text for line in read_lines(file)] == ["a", ""]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds no lines"),
        (b"\n \n", "holds no lines"),
        (b'{"text": " "}\n{"text": ""}', "every text of .* is blank"),
        (b'{"text": "a"}\n{"body": "b"}', r"line 2 of .* has no field 'text', it has 'body'"),
        (b"{}", "it has nothing"),
        (b'{"text": "a"}\n{"text": "caf\xe9"}', r"line 2 of .* is not UTF-8 \(byte 13 is 0xe9\)"),
        (b'{"text": "a"', "line 1 of .* is not JSON"),
        (b'["text"]', "give one object per line"),
        (b'{"text": 3}', r"'text' in line 1 .* is 3; give text"),
        (b'{"text": null}', "is None; give text"),
        (b'{"text": "\\ud800"}', "half of a surrogate pair"),
        (b"[" * 100_000, "is not JSON"),
    ],
)
def test_a_file_that_is_not_one(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        read_lines(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "says"),
    [("", "is empty; say whose"), (None, "is None"), (1.5, "is 1.5"), (True, "is True")],
)
def test_a_user_that_is_none(tmp_path: Path, value: object, says: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps({"text": "a", "user": value}))
    with pytest.raises(DataError, match=says):
        read_lines(file, user="user")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"unit": "page", "max_length": 4}, "unit is 'page'"),
        ({"unit": "line", "max_length": 1}, "max_length is 1; give a whole number, 2 or more"),
        ({"unit": "user", "max_length": 4, "max_rows": 0}, "max_rows is 0"),
        ({"unit": "line", "max_length": 4, "max_rows": 2}, "a line is one row"),
        ({"unit": "document", "max_length": 4, "max_rows": 2, "pack": True}, "texts of one user"),
    ],
)
def test_a_form_that_makes_no_sense(options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TextForm(**options)


def test_classes_are_in_their_order() -> None:
    assert classes_in(TextLine("", label) for label in ("10", "2", "b", "a", "2")) == (
        *("2", "10"),
        *("a", "b"),
    )
