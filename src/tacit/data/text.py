"""Text for language models: lines of JSON become records of token rows.

A record is what ε protects: one line, one document or one user. It is a stack of rows,
(rows, length), each row a text or a part of one, padded at its end. Rows that a record does not
fill are ignored: the loss counts none of their tokens. All records have the same number of rows, a
public constant, so the shape of a batch says nothing about who is in it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from tacit.errors import DataError, argument, shown
from tacit.records import Records

TextUnit = Literal["line", "document", "user"]
# What one of each is, for statements of privacy.
UNITS: dict[str, str] = {
    "line": "line of the training file",
    "document": "document (all of its text)",
    "user": "user (all of their lines)",
}
IGNORED = -100  # the target of a position that the loss does not count
Tokenize = Callable[[list[str]], list[list[int]]]
_AT_ONCE = 4096  # texts given to a tokenizer


@dataclass(frozen=True)
class TextLine:
    """One line of a file: its text, and its label and user where they were asked for."""

    text: str
    label: str = ""
    user: str = ""


def read_lines(
    path: str | os.PathLike[str],
    text: str = "text",
    *,
    label: str | None = None,
    user: str | None = None,
) -> list[TextLine]:
    """The lines of a .jsonl file, whose fields of these names hold text, label and user.

    Labels and users are text or whole numbers, and 1 and "1" are the same. Empty lines of the file
    are skipped. Raises DataError, which names the line, for anything else.

        lines = read_lines("notes.jsonl", user="author")
    """
    lines = []
    with Path(path).open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                where = f"line {number} of {path}"
                value = _parsed(raw, where)
                lines.append(
                    TextLine(
                        _text(value, text, where),
                        "" if label is None else _name(value, label, where, "label"),
                        "" if user is None else _name(value, user, where, "user"),
                    )
                )
    if not lines:
        raise DataError(f"{path} holds no lines; give a file with one JSON object per line")
    if not any(line.text.strip() for line in lines):
        raise DataError(f"every text of {path} is blank; give lines whose {text!r} holds text")
    return lines


def _parsed(raw: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8 (byte {error.start} is 0x{raw[error.start]:02x}); convert the "
            "file, for example with: iconv -f latin1 -t utf-8"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where} is not JSON ({error}); give one object per line, such as "
            '{"text": "some text"}'
        ) from error
    if not isinstance(value, dict):
        raise DataError(
            f'{where} holds {shown(value)}; give one object per line, such as {{"text": "…"}}'
        )
    return value


def _field(value: dict[str, Any], name: str, where: str, role: str) -> Any:
    if name not in value:
        option = {"text": "--text-field", "label": "--label-field", "user": "--user-field"}[role]
        there = ", ".join(map(repr, list(value)[:8])) or "nothing"
        raise DataError(
            f"{where} has no field {name!r}, it has {there}; name the one that holds the {role} "
            f"with {argument(role, option)}"
        )
    return value[name]


def _text(value: dict[str, Any], name: str, where: str) -> str:
    found = _field(value, name, where, "text")
    if not isinstance(found, str):
        raise DataError(f"{name!r} in {where} is {shown(found)}; give text")
    try:
        found.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{name!r} in {where} has half of a surrogate pair, which is no text; leave the "
            "character out"
        ) from error
    return found


def _name(value: dict[str, Any], name: str, where: str, role: str) -> str:
    """A label or a user as text. Spaces around it do not make another one."""
    found = _field(value, name, where, role)
    if isinstance(found, int) and not isinstance(found, bool):
        return str(found)
    if not isinstance(found, str):
        raise DataError(f"{name!r} in {where} is {shown(found)}; give text or a whole number")
    if not found.strip():
        raise DataError(
            f"{name!r} in {where} is empty; say whose line it is, or leave the line out"
            if role == "user"
            else f"{name!r} in {where} is empty; give its class, or leave the line out"
        )
    return found.strip()


def grouped(lines: Iterable[TextLine], unit: TextUnit) -> list[list[TextLine]]:
    """The lines of each record: every line alone, or all lines of each user, in their order."""
    if unit != "user":
        return [[line] for line in lines]
    of_user: dict[str, list[TextLine]] = {}
    for line in lines:
        of_user.setdefault(line.user, []).append(line)
    return list(of_user.values())


def split_groups(
    groups: Sequence[list[TextLine]], fraction: float
) -> tuple[list[list[TextLine]], list[list[TextLine]]]:
    """(training, held out): a hash of each record alone decides, so no record moves another.

    Of a user it is the hash of the user's name, so that all lines of a user are on one side.
    """
    threshold = round(fraction * 2**64)
    sides: tuple[list[list[TextLine]], list[list[TextLine]]] = ([], [])
    for group in groups:
        key = group[0].user or group[0].text
        digest = hashlib.blake2b(key.encode(), digest_size=8, person=b"tacit-split").digest()
        sides[int.from_bytes(digest, "little") < threshold].append(group)
    return sides


@dataclass(frozen=True)
class TextForm:
    """How the lines of a record become its rows. All of it is public.

    Args:
        unit: "line": one row, cut at `max_length` tokens. "document": one text in up to `max_rows`
            rows. "user": the user's first `max_rows` lines, one row each.
        max_length: tokens in a row.
        max_rows: rows in a record; 1 for lines.
        pack: of a user, join the texts one after the other, and cut that into rows. No row holds
            text of two records.
        end: the token that ends each text, or None for none.
        pad: the token of positions that are ignored.
        classes: the names of the classes, for classification; each row of a record has the label
            of its line.
    """

    unit: TextUnit
    max_length: int
    max_rows: int = 1
    pack: bool = False
    end: int | None = None
    pad: int = 0
    classes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise ValueError(f"unit is {self.unit!r}; give one of {', '.join(UNITS)}")
        # A row of one token has nothing to predict from.
        least = {"max_length": 2 if self.classes is None else 1, "max_rows": 1}
        for name, at_least in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < at_least:
                raise ValueError(
                    f"{argument(name)} is {shown(value)}; give a whole number, {at_least} or more"
                )
        if self.unit == "line" and self.max_rows != 1:
            raise ValueError(f"max_rows is {self.max_rows}, and a line is one row; leave it out")
        if self.pack and (self.unit != "user" or self.classes is not None):
            raise ValueError("pack joins the texts of one user, and these have one each, or labels")

    def records(
        self,
        groups: Sequence[list[TextLine]],
        tokenize: Tokenize,
        *,
        public_size: int | None = None,
        keep_all: bool = False,
        name: str = "text",
    ) -> Records:
        """One record per group. With `keep_all`, for held-out text, what would be dropped at
        `max_rows` continues in further records.

        The inputs are `input_ids` and `attention_mask`, (records, rows, length). The targets are
        the tokens themselves, for a loss that shifts them, or one class per row, (records, rows).
        """
        rows: list[list[_Row]] = []
        for group, tokens in zip(groups, self._tokens(groups, tokenize, keep_all), strict=True):
            of_group = self._rows(group, tokens)
            kept = of_group if keep_all else of_group[: self.max_rows]
            starts = range(0, max(len(kept), 1), self.max_rows)
            rows += [kept[start : start + self.max_rows] for start in starts]
        shape = len(rows), self.max_rows, self.max_length
        ids = torch.full(shape, self.pad, dtype=torch.long)
        mask = torch.zeros(shape, dtype=torch.long)
        labels = torch.full(shape[:2], IGNORED, dtype=torch.long)
        # Softmax over no position at all is NaN, and a record with NaN adds nothing to a gradient.
        mask[:, :, 0] = 1
        counted = torch.zeros(shape, dtype=torch.bool)
        for i, record in enumerate(rows):
            for j, row in enumerate(record):
                size = len(row.tokens)
                ids[i, j, :size] = torch.tensor(row.tokens, dtype=torch.long)
                mask[i, j, :size] = 1
                counted[i, j, :size] = True
                labels[i, j] = row.label
        targets = labels if self.classes is not None else ids.masked_fill(~counted, IGNORED)
        return Records(
            {"input_ids": ids, "attention_mask": mask},
            targets,
            num_classes=None if self.classes is None else len(self.classes),
            class_names=self.classes,
            public_size=public_size,
            privacy_unit=UNITS[self.unit],
            name=name,
        )

    def _tokens(
        self, groups: Sequence[list[TextLine]], tokenize: Tokenize, keep_all: bool
    ) -> Iterator[list[list[int]]]:
        """The tokens of the lines of each group; of a user, of as many lines as can be kept."""

        def needed(group: list[TextLine]) -> list[TextLine]:
            # A packed line may have no token at all, so that any number of them may be needed.
            return group if keep_all or self.pack else group[: self.max_rows]

        texts = (line.text for group in groups for line in needed(group))
        found = _in_pieces(texts, tokenize)
        for group in groups:
            yield [next(found) for _ in needed(group)]

    def _rows(self, group: list[TextLine], texts: list[list[int]]) -> list[_Row]:
        if self.classes is not None:
            labels = [self._class(line.label) for line in group[: len(texts)]]
        else:
            labels = [IGNORED] * len(texts)
            texts = [self._ended(tokens) for tokens in texts]
        if self.pack:
            texts, labels = [[t for tokens in texts for t in tokens]], [IGNORED]
        length = self.max_length
        rows = []
        for tokens, label in zip(texts, labels, strict=True):
            whole = self.pack or self.unit == "document"
            starts = range(0, max(len(tokens), 1), length) if whole else range(1)
            rows += [_Row(tokens[start : start + length], label) for start in starts]
        return rows

    def _ended(self, tokens: list[int]) -> list[int]:
        ended = self.end is None or tokens[-1:] == [self.end]
        return tokens if ended or self.end is None else [*tokens, self.end]

    def _class(self, label: str) -> int:
        assert self.classes is not None
        if label not in self.classes:
            raise DataError(
                f"a line has the label {label!r}, and the classes are "
                f"{', '.join(self.classes[:12])}; correct the line, or declare all classes with "
                f"{argument('classes')}"
            )
        return self.classes.index(label)


@dataclass(frozen=True)
class _Row:
    tokens: list[int]
    label: int


def _in_pieces(texts: Iterator[str], tokenize: Tokenize) -> Iterator[list[int]]:
    piece: list[str] = []
    for text in texts:
        piece.append(text)
        if len(piece) == _AT_ONCE:
            yield from tokenize(piece)
            piece = []
    if piece:
        yield from tokenize(piece)


def classes_in(lines: Iterable[TextLine]) -> tuple[str, ...]:
    """The labels that occur: whole numbers in their order, anything else in that of the alphabet.

    They are read off private lines. Declare the classes instead where that matters.
    """
    return tuple(sorted({line.label for line in lines}, key=_order))


def _order(label: str) -> tuple[float, str]:
    return (int(label), label) if label.lstrip("-").isdecimal() else (math.inf, label)
