"""The kinds of columns of a table: what their cells mean, and the numbers that they become.

Every cell becomes numbers by itself, with constants that the schema declares. So one record's
numbers never depend on another record, and encoding costs no privacy.
"""

from __future__ import annotations

import abc
import datetime
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, ClassVar

import numpy as np

from tacit.data.table_cells import Cells, decimal_comma, number_of, text_of
from tacit.errors import DataError

RELEASE = "release"
OTHER = "(other)"
NO_VALUE = ("", "na", "nan", "null")  # in any case
TRUE_WORDS, FALSE_WORDS = ("true", "yes", "t", "y", "1"), ("false", "no", "f", "n", "0")
LARGEST = float(np.finfo(np.float32).max)
DAYS_PER_YEAR = 365.25
_YEAR_2000 = np.datetime64("2000-01-01", "us")


@dataclass(frozen=True)
class Column(abc.ABC):
    """A column of a schema: its name in the table, and whether its cells may be missing.

    A column that may be missing has one entry more, which is 1 where the cell is missing; its other
    entries are then 0, the middle of their range. Empty cells, NA, NaN and null are missing.
    """

    name: str
    missing: bool = field(default=False, kw_only=True)
    kind: ClassVar[str]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or self.name != self.name.strip():
            raise ValueError(f"a column is named {self.name!r}; give its name in the header")
        if not isinstance(self.missing, bool):
            raise ValueError(f"{self.where('missing')} is {self.missing!r}; give true or false")

    def where(self, key: str) -> str:
        return f"{key} of column {self.name!r}"

    @property
    def entry_names(self) -> tuple[str, ...]:
        """The names of the entries of an input that the column becomes."""
        return (*self.value_names(), *([f"{self.name} is missing"] if self.missing else []))

    def encode(self, cells: Cells) -> np.ndarray:
        """The cells as (n, number of entries) float32."""
        missing = self.missing_in(cells)
        if missing.any() and not self.missing:
            raise DataError(
                f"{cells.place(int(missing.argmax()))} has an empty cell in column {self.name!r}; "
                "fill it in, drop the record, or, to train with such cells, write missing = true "
                f"below name = {json.dumps(self.name, ensure_ascii=False)} in the schema"
            )
        entries = np.zeros((len(cells), len(self.entry_names)), np.float32)
        there = np.flatnonzero(~missing)
        width = len(self.value_names())
        values = self.values_of(cells, there)
        entries[there, :width] = values.reshape(len(there), width)
        if self.missing:
            entries[:, width] = missing
            entries[missing, :width] = self.neutral
        return entries

    @property
    def neutral(self) -> float:
        """What stands for a missing value."""
        return 0.0

    def missing_in(self, cells: Cells) -> np.ndarray:
        """Which cells are missing."""
        if cells.values.dtype.kind != "O":
            return cells.missing
        told = np.array([text.strip().lower() in NO_VALUE for text in cells.values], bool)
        return cells.missing | told

    @abc.abstractmethod
    def value_names(self) -> tuple[str, ...]:
        """The entries without the indicator of missing cells."""

    @abc.abstractmethod
    def values_of(self, cells: Cells, rows: np.ndarray) -> np.ndarray:
        """The entries of the cells in these rows, none of which is missing."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as a schema's file has them; `column_from` reads them."""
        plain: dict[str, Any] = {"name": self.name, "kind": self.kind}
        for own in fields(self):
            if own.name not in ("name", "missing"):
                value = getattr(self, own.name)
                plain[own.name] = list(value) if isinstance(value, tuple) else value
        return plain | {"missing": self.missing}

    def read_each(
        self, cells: Cells, rows: np.ndarray, read: Callable[[Any], Any], hint: Callable[[Any], str]
    ) -> np.ndarray:
        """read(value) for each of these cells, once per distinct value; errors name the cell."""
        values = cells.values[rows].tolist()
        places: dict[Any, int] = {}
        place_of = (places.setdefault(value, len(places)) for value in values)
        inverse = np.fromiter(place_of, np.int64, len(values))
        found = []
        for place, value in enumerate(places):
            try:
                found.append(read(value))
            except (ValueError, OverflowError):
                first = int(rows[int((inverse == place).argmax())])
                raise self.refuse(cells, first, hint(value)) from None
        return np.array(found)[inverse] if found else np.zeros(0)

    def refuse(self, cells: Cells, row: int, hint: str) -> DataError:
        shown = text_of(cells.values[row])
        shown = shown if len(shown) <= 40 else shown[:40] + "…"
        return DataError(f"{cells.place(row)} has {shown!r} in column {self.name!r}{hint}")


@dataclass(frozen=True)
class Numeric(Column):
    """A number. With a declared range (lower, upper) it is clipped to it and mapped onto [-1, 1].

    With `range="release"` the entry is the number itself, NaN where missing, until the range is
    released with noise and charged: `tacit.data.release_ranges` returns the stage that maps it.
    """

    range: tuple[float, float] | str = RELEASE
    kind: ClassVar[str] = "numeric"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "range", _range(self.range, self.where("range"), float))

    def value_names(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def neutral(self) -> float:
        return math.nan if self.range == RELEASE else 0.0

    def bounds(self) -> tuple[float, float]:
        assert not isinstance(self.range, str)
        return self.range

    def numbers(self, cells: Cells, rows: np.ndarray) -> np.ndarray:
        """The numbers themselves, as float64; a cell that is none is refused."""
        kind = cells.values.dtype.kind
        if kind == "M" and len(rows):
            raise self.refuse(cells, int(rows[0]), ", a date; give the column kind = 'date'")
        if kind in "bf" and np.isfinite(cells.values[rows]).all():
            return cells.values[rows].astype(np.float64)
        return self.read_each(cells, rows, _number, _number_hint)

    def values_of(self, cells: Cells, rows: np.ndarray) -> np.ndarray:
        return _in_range(self, self.numbers(cells, rows))


@dataclass(frozen=True)
class Date(Column):
    """A date or time: ISO, or in a `format` of `datetime.strptime`. Its range is of ISO dates.

    With `range="release"` the entry is in years since 2000, until the range is released.
    """

    range: tuple[str, str] | str = RELEASE
    format: str = "iso"
    kind: ClassVar[str] = "date"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.format, str) or not self.format:
            raise ValueError(
                f"{self.where('format')} is {self.format!r}; give 'iso', or one such as '%d.%m.%Y'"
            )
        object.__setattr__(self, "range", _range(self.range, self.where("range"), _iso_text))

    def value_names(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def neutral(self) -> float:
        return math.nan if self.range == RELEASE else 0.0

    def bounds(self) -> tuple[float, float]:
        lower, upper = (years(datetime.datetime.fromisoformat(day)) for day in self.range)
        return lower, upper

    def years(self, cells: Cells, rows: np.ndarray) -> np.ndarray:
        """Years since 2000, as float64; a cell that is no date is refused."""
        values = cells.values[rows]
        if values.dtype.kind == "M":
            return (values - _YEAR_2000) / np.timedelta64(1, "D") / DAYS_PER_YEAR
        like = "ISO such as 2024-12-31" if self.format == "iso" else self.format
        hint = f", which is no date in the format {like}; give the column's format"
        return self.read_each(
            cells, rows, lambda value: years(self.read(text_of(value))), lambda _: hint
        )

    def values_of(self, cells: Cells, rows: np.ndarray) -> np.ndarray:
        return _in_range(self, self.years(cells, rows))

    def read(self, text: str) -> datetime.datetime:
        if self.format == "iso":
            return datetime.datetime.fromisoformat(text)
        return datetime.datetime.strptime(text, self.format)


@dataclass(frozen=True)
class Categorical(Column):
    """One of `categories`, which are public: one entry each, 1 for the cell's category and else 0.

    A value that is none of them goes to an entry "(other)", or is refused with `unknown="error"`.
    As a target, the categories are the classes.
    """

    categories: tuple[str, ...] = ()
    unknown: str = "other"
    kind: ClassVar[str] = "categorical"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.categories == RELEASE:
            raise ValueError(
                f"{self.where('categories')} are to be released, which Tacit does not do: names of "
                "categories can only be declared; give the list that is public"
            )
        if not isinstance(self.categories, tuple | list):
            raise ValueError(f"{self.where('categories')} are {self.categories!r}; give a list")
        for category in self.categories:
            if not isinstance(category, str | int | float) or category != category:
                raise ValueError(f"{self.where('categories')} have {category!r}; give text")
        names = tuple(text_of(category).strip() for category in self.categories)
        if len(set(names)) != len(names):
            raise ValueError(f"{self.where('categories')} have one twice; give each once")
        object.__setattr__(self, "categories", names)
        if self.unknown not in ("other", "error"):
            raise ValueError(f"{self.where('unknown')} is {self.unknown!r}; give other or error")

    def value_names(self) -> tuple[str, ...]:
        others = (OTHER,) if self.unknown == "other" else ()
        return tuple(f"{self.name}={category}" for category in (*self.categories, *others))

    def missing_in(self, cells: Cells) -> np.ndarray:
        missing = super().missing_in(cells)
        if cells.values.dtype.kind != "O":
            return missing
        # NA may be a category of its own, such as Namibia.
        named = np.array([text.strip() in self.categories for text in cells.values], bool)
        return missing & (cells.missing | ~named)

    def places(self) -> dict[str, int]:
        """The position of each text that is a category, or the same number as one."""
        place = {_canonical(name): i for i, name in reversed(list(enumerate(self.categories)))}
        return place | {name: i for i, name in enumerate(self.categories)}

    def positions(self, cells: Cells, rows: np.ndarray, is_target: bool = False) -> np.ndarray:
        """The position of each cell in `categories`; unknown ones have that after the last."""
        place = self.places()

        def position(value: Any) -> int:
            text = text_of(value).strip()
            found = place.get(text, place.get(_canonical(text)))
            if found is None and self.unknown == "error":
                raise ValueError
            return len(self.categories) if found is None else found

        known = ", ".join(self.categories[:20]) + (", ..." if len(self.categories) > 20 else "")
        hint = f", which is none of the categories {known}; add it, or unknown = 'other'"
        if is_target:
            hint = f", which is none of the classes {known}; add it, or drop the record"
        return self.read_each(cells, rows, position, lambda _: hint).astype(np.int64)

    def values_of(self, cells: Cells, rows: np.ndarray) -> np.ndarray:
        width = len(self.value_names())
        return np.eye(width, dtype=np.float32)[self.positions(cells, rows)]


@dataclass(frozen=True)
class Boolean(Column):
    """True or false, yes or no, t or f, y or n, 1 or 0, in any case: 1 for true, and -1 for false.

    As one target these are the classes "false" and "true"; several are labels.
    """

    kind: ClassVar[str] = "boolean"

    def value_names(self) -> tuple[str, ...]:
        return (self.name,)

    def truths(self, cells: Cells, rows: np.ndarray) -> np.ndarray:
        hint = "; give true or false, or give the column kind = 'categorical'"
        return self.read_each(cells, rows, _truth, lambda _: hint).astype(bool)

    def values_of(self, cells: Cells, rows: np.ndarray) -> np.ndarray:
        return np.where(self.truths(cells, rows), 1.0, -1.0)


@dataclass(frozen=True)
class Ignored(Column):
    """A column that is not used."""

    kind: ClassVar[str] = "ignored"

    def value_names(self) -> tuple[str, ...]:
        return ()

    def values_of(self, cells: Cells, rows: np.ndarray) -> np.ndarray:
        return np.zeros((len(rows), 0))


KINDS: dict[str, type[Column]] = {
    kind.kind: kind for kind in (Numeric, Categorical, Boolean, Date, Ignored)
}


def column_from(d: Any) -> Column:
    """A column from plain values, as `Column.to_dict` gives them."""
    if not isinstance(d, dict) or not isinstance(d.get("name"), str):
        raise ValueError(
            'a column of the schema has no name; give name = "..." in each [[columns]]'
        )
    name, kind = d["name"], d.get("kind")
    if kind == "text":
        raise ValueError(
            f"column {name!r} has kind 'text', which no network here takes; give kind = 'ignored' "
            "to drop it, or kind = 'categorical' with its categories"
        )
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"kind of column {name!r} is {kind!r}; give one of {', '.join(KINDS)}")
    known = [own.name for own in fields(KINDS[kind])]
    for key in d:
        if key not in (*known, "kind"):
            near = get_close_matches(str(key), known, n=1) or known
            raise ValueError(f"column {name!r} has {key!r}; give {' or '.join(near)}")
    return KINDS[kind](**{key: value for key, value in d.items() if key != "kind"})


def years(moment: datetime.datetime) -> float:
    """Years since 2000, of 365.25 days."""
    if moment.tzinfo is not None:
        moment = moment.astimezone(datetime.UTC).replace(tzinfo=None)
    return (moment - datetime.datetime(2000, 1, 1)) / datetime.timedelta(days=DAYS_PER_YEAR)


def _range(given: Any, where: str, read: Any) -> Any:
    if given == RELEASE:
        return RELEASE
    example = "[0, 100]" if read is float else '["2000-01-01", "2030-01-01"]'
    wanted = f"give {example}, or 'release'"
    plain = isinstance(given, tuple | list) and len(given) == 2
    if not plain or any(isinstance(end, bool) for end in given):
        raise ValueError(f"{where} is {given!r}; {wanted}")
    try:
        lower, upper = (read(end) for end in given)
        low, high = (
            end if read is float else years(datetime.datetime.fromisoformat(end))
            for end in (lower, upper)
        )
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{where} is {given!r}; {wanted}") from None
    if not -LARGEST <= low < high <= LARGEST:
        raise ValueError(f"{where} is {given!r}; the lower end must be below the upper: {wanted}")
    return lower, upper


def _iso_text(end: Any) -> str:
    if isinstance(end, datetime.date):  # TOML has dates of its own
        return end.isoformat()
    if not isinstance(end, str):
        raise TypeError
    datetime.datetime.fromisoformat(end)
    return end


def _in_range(column: Numeric | Date, values: np.ndarray) -> np.ndarray:
    """Clipped and mapped onto [-1, 1] where a range is declared; else as they are, in float32."""
    if column.range == RELEASE:
        return values.clip(-LARGEST, LARGEST)
    lower, upper = column.bounds()
    # Halves first: the difference of two huge ends need not be finite.
    return ((values.clip(lower, upper) / 2 - lower / 4 - upper / 4) / (upper / 4 - lower / 4)).clip(
        -1, 1
    )


def _number(value: Any) -> float:
    number = number_of(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _number_hint(value: Any) -> str:
    if isinstance(value, float) or (isinstance(value, str) and value.lower().strip("+-") == "inf"):
        return ", which is not finite; fill it in or drop the record"
    return decimal_comma(value) or (
        ", which is no number; drop the column with kind = 'ignored', or give it kind = "
        "'categorical' with its categories"
    )


def _truth(value: Any) -> bool:
    text = text_of(value).strip().lower()
    if text not in TRUE_WORDS + FALSE_WORDS:
        raise ValueError
    return text in TRUE_WORDS


def _canonical(text: str) -> str:
    """3 for 3.0 and 03: frames read such cells as numbers."""
    try:
        return text_of(_number(text))
    except (ValueError, OverflowError):
        return text
