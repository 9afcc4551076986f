"""How an option is declared, and what is made of the declaration.

An option is a field of a settings class, declared once by `option`: help, default, range, and the
other options that it goes with. From that come the command line (`command_of`), files of
settings (`read_file`), the checks (`check`), what run.json holds (`to_dict`), and
docs/reference/train.md. Nothing here imports torch: `--help` must not wait for it.
"""

from __future__ import annotations

import inspect
import json
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import (
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

import typer

T = TypeVar("T")


class Range(NamedTuple):
    """The numbers that an option takes, in words for an error, and as a test. NaN fails it."""

    words: str
    contains: Callable[[float], bool]

    def require(self, flag: str, value: float | None) -> None:
        """Raise ValueError for a value that is given and out of range."""
        if value is not None and not self.contains(value):
            raise ValueError(f"{flag} is {_text(value)}; give {self.words}")


LEAST_NOISE = 1e-3  # of tacit.accounting.pld, which imports SciPy; a test compares the two
POSITIVE = Range("a finite number above 0", lambda v: 0 < v < math.inf)
ZERO_OR_MORE = Range("0 or more", lambda v: v >= 0)
ONE_OR_MORE = Range("at least 1", lambda v: v >= 1)
BELOW_ONE = Range("at least 0 and less than 1", lambda v: 0 <= v < 1)
SHARE = Range("a number between 0 and 1", lambda v: 0 < v < 1)
FACTOR = Range("a number above 0 and at most 1", lambda v: 0 < v <= 1)
NORM = Range("a number above 0, and at most 1e30", lambda v: 0 < v <= 1e30)
LIMIT = Range("a number above 0 and at most 1e30, or 0 for no limit", lambda v: 0 <= v <= 1e30)
SEED = Range("0 or more, and less than 2**63", lambda v: 0 <= v < 2**63)
NOISE = Range(
    f"0, or a finite number from {LEAST_NOISE:g}: less noise cannot be accounted for, and protects "
    "nobody",
    lambda v: v == 0 or LEAST_NOISE <= v < math.inf,
)
RELEASED = Range(f"a finite number from {LEAST_NOISE:g}", lambda v: LEAST_NOISE <= v < math.inf)


class Rule(NamedTuple):
    """Another option, and its values for which a rule holds: any value that is given, if empty."""

    option: str
    values: tuple[Any, ...] = ()
    why: str = ""

    def alternatives(self) -> str:
        """The option and its values as one would type them."""
        values = " or ".join(map(_text, self.values))
        return f"{_flag(self.option)} {values}".rstrip()


class Section(NamedTuple):
    """A group of options: its name in a file, its title in the help, and what it goes with."""

    name: str
    title: str
    goes_with: Rule | None = None


@dataclass(frozen=True)
class Option:
    """One option.

    `usual` says what is used where the default is None, and `form` how a list is written. An option
    with `needed` must be given where it may be; that says what to give.
    """

    help: str
    default: Any = None
    range: Range | None = None
    goes_with: Rule | None = None
    not_with: Rule | None = None
    needed: str = ""
    usual: str = ""
    form: str = ""
    common: bool = False
    short: str = ""
    with_resume: bool = False  # may be given for a run that is resumed: it computes the same
    choices: tuple[str, ...] = ()
    open_choices: bool = False  # a plugin may register more; who uses the value checks it
    # From the field and the class that declare it.
    name: str = ""
    section: Section = Section("", "")
    kind: type = str
    items: tuple[Any, ...] = ()

    @property
    def flag(self) -> str:
        return _flag(self.name)

    @property
    def key(self) -> str:
        return f"{self.section.name}.{self.name}"

    @property
    def conditions(self) -> list[Rule]:
        """What must hold for the option to be given."""
        return [rule for rule in (self.section.goes_with, self.goes_with) if rule is not None]

    def default_text(self) -> str:
        return self.usual if self.default in (None, False) else _text(self.default)

    def help_text(self) -> str:
        """The help, the choices, and the default."""
        choices = f" One of {', '.join(self.choices)}." if self.choices else ""
        default = f" Default: {self.default_text()}." if self.default_text() else ""
        return self.help + choices + default

    def with_value(self, value: object) -> str:
        return f"{self.flag} is {_text(value)}"

    def read(self, value: Any, where: str) -> Any:
        """A value of the command line or of a file, as the field has it."""
        if self.kind is tuple:
            return self._read_items(value, where)
        if self.kind is list:
            if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
                raise ValueError(f"{where} is {value!r}; give {self.form}")
            return list(value)
        taken, words = _TAKEN[self.kind]
        if not isinstance(value, taken) or (isinstance(value, bool) and self.kind is not bool):
            raise ValueError(f"{where} is {value!r}; give {words}")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError(f"{where} is too large a number; give less than 2**63")
        return self.kind(value)

    def _read_items(self, value: Any, where: str) -> tuple[Any, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        try:
            parts = [str(part).strip() for part in parts]
            kinds = self.items[:1] * len(parts) if ... in self.items else self.items
            if all(parts):
                return tuple(kind(part) for kind, part in zip(kinds, parts, strict=True))
        except (TypeError, ValueError):
            pass
        raise ValueError(f"{where} is {value!r}; give {self.form}")

    def require(self, value: Any) -> None:
        """Raise ValueError for a value that is no choice, or out of range."""
        if self.choices and not self.open_choices and value not in self.choices:
            near = get_close_matches(value, self.choices, n=1)
            words = near[0] if near else f"one of {', '.join(self.choices)}"
            raise ValueError(f"{self.with_value(value)}; give {words}")
        if self.range is not None:
            self.range.require(self.flag, value)


# What the command line gives where a field has another type.
_TYPED: dict[type, type] = {tuple: str, list: list[str]}
# What a file may give for a field of each type.
_TAKEN: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "text in quotes"),
    Path: ((str, Path), "a path in quotes"),
}


def option(help: str, default: Any = None, **rest: Any) -> Any:
    """Declare an option as a field of a section; `rest` are fields of `Option`."""
    return field(default=default, metadata={"option": Option(help, default, **rest)})


def overridden(default: Any = ..., **changes: Any) -> Any:
    """Declare an inherited option again, with another default or other fields of `Option`."""
    return field(
        metadata={"changes": changes if default is ... else {"default": default} | changes}
    )


@dataclass_transform(frozen_default=True, field_specifiers=(option, overridden))
def section(name: str, title: str, goes_with: Rule | None = None) -> Callable[[type[T]], type[T]]:
    """Class decorator: the fields are a group of options, for each of which `goes_with` holds.

    Options of a section that it inherits from come first.
    """

    def declare(cls: type[T]) -> type[T]:
        cls.section = Section(name, title, goes_with)  # type: ignore[attr-defined]
        inherited = {f.name: f.metadata["option"] for f in fields(cls)} if is_dataclass(cls) else {}
        for own, given in list(vars(cls).items()):
            if isinstance(given, Field) and "changes" in given.metadata:
                o = replace(inherited[own], **given.metadata["changes"])
                setattr(cls, own, field(default=o.default, metadata={"option": o}))
        return dataclass(frozen=True)(cls)

    return declare


def sections_of(settings: type) -> list[Section]:
    """The sections that a class of settings inherits from, in their order."""
    return [base.section for base in settings.__bases__]  # type: ignore[attr-defined]


def options_of(settings: type) -> dict[str, Option]:
    """Every option, by its name; names are unique over the sections."""
    options = {}
    for base, part in zip(settings.__bases__, sections_of(settings), strict=True):
        hints = get_type_hints(base)
        for declared in fields(base):
            o: Option = declared.metadata["option"]
            hint = hints[declared.name]
            if type(None) in get_args(hint):
                hint = get_args(hint)[0]
            is_choice = get_origin(hint) is Literal
            options[declared.name] = replace(
                o,
                name=declared.name,
                section=part,
                kind=str if is_choice else get_origin(hint) or hint,
                items=get_args(hint),
                choices=get_args(hint) if is_choice else o.choices,
            )
    return options


def to_dict(settings: Any) -> dict[str, dict[str, Any]]:
    """Section by section what is not None, as JSON and TOML can hold it."""
    plain: dict[str, dict[str, Any]] = {}
    for name, o in options_of(type(settings)).items():
        value = getattr(settings, name)
        if value is not None:
            plain.setdefault(o.section.name, {})[name] = str(value) if o.kind is Path else value
    return plain


def check(settings: Any) -> None:
    """Raise ValueError for the first option that is out of range, or that would be ignored."""
    options = options_of(type(settings))
    values = {name: getattr(settings, name) for name in options}
    given = {n: v for n, v in values.items() if v is not None and v != options[n].default}

    def holds(rule: Rule) -> bool:
        return values[rule.option] in rule.values if rule.values else rule.option in given

    for name, value in given.items():
        options[name].require(value)
    for name, value in given.items():
        o = options[name]
        this = o.with_value(value)
        for rule in o.conditions:
            if holds(rule):
                continue
            other, current = options[rule.option], values[rule.option]
            state = f"{other.flag} is not given" if current is None else other.with_value(current)
            why = f", {rule.why}" if rule.why else ""
            raise ValueError(
                f"{this}, and {state}{why}; {o.flag} goes with {rule.alternatives()}: give that, "
                f"or leave {o.flag} out"
            )
        excluded = o.not_with
        if excluded and excluded.option in given and holds(excluded):
            that = options[excluded.option].with_value(given[excluded.option])
            raise ValueError(f"{this} and {that}, {excluded.why}; leave one of them out")
    for name, o in options.items():
        if o.needed and name not in given and all(map(holds, o.conditions)):
            cause = o.conditions[-1].option
            this = options[cause].with_value(values[cause])
            raise ValueError(f"{this}, which needs {o.flag}: {o.needed}")


def read_file(settings: type, path: Path) -> dict[str, Any]:
    """The values in a TOML file, or in the run.json of a run, by option name.

    The output of a run is its own: from run.json nothing of it is read but a shared ledger.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            stored = dict(json.loads(text)["config"]["settings"])
            output = stored.pop("output", {})
            if "ledger" in output:
                stored["output"] = {"ledger": output["ledger"]}
        else:
            stored = tomllib.loads(text)
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        if isinstance(error, KeyError | TypeError):
            why = "it holds no config.settings"
        raise ValueError(
            f"--config is {path}, which cannot be read ({why}); give a TOML file, or the run.json "
            f"of a run of tacit {settings.command}"  # type: ignore[attr-defined]
        ) from error
    return read_sections(settings, stored, f"{path}: ")


def read_resumed(settings: type, folder: Path, typed: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the run in `folder` that is resumed, by option name, and what may be changed.

    Raises ValueError for an option that would change what is computed.
    """
    from tacit.report.folder_files import RESUME_FILE, unfinished_command

    options = options_of(settings)
    for name in typed:
        if name != "resume" and not options[name].with_resume:
            may = ", ".join(o.flag for o in options.values() if o.with_resume)
            raise ValueError(
                f"{options[name].flag} is given beside --resume, which takes the settings of the "
                f"run; leave it out (beside --resume may be given: {may})"
            )
    file, command = folder / RESUME_FILE, settings.command  # type: ignore[attr-defined]
    if not file.is_file():
        why = f"has no {RESUME_FILE}"
        if (folder / "run.json").is_file():
            why = "holds a run that is complete"
        raise ValueError(
            f"--resume is {folder}, which {why}; give the folder of a run of tacit {command} that "
            "was killed or interrupted"
        )
    own = unfinished_command(folder)
    if own not in (None, command):
        raise ValueError(
            f"--resume is {folder}, which holds a run of tacit {own}; resume it with: tacit {own} "
            f"--resume {folder}"
        )
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))["config"]["settings"]
        values = read_sections(settings, stored, f"{file}: ")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{file} cannot be read ({error}); it is not as tacit {command} wrote it: restore it, "
            "or start another run"
        ) from error
    return values | dict(typed) | {"out": folder}


def read_sections(settings: type, stored: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Values by option name; raise ValueError for an unknown key or a value of the wrong type."""
    options, values = options_of(settings), {}
    keys = {name: o.key for name, o in options.items()}
    sections = {part.name: f"[{part.name}]" for part in sections_of(settings)}
    for title, content in stored.items():
        title = title.replace("-", "_")
        is_table = isinstance(content, dict)
        if title not in sections:
            # A value in the place of a section may be an option whose section is missing.
            _refuse_key(where + title, title, sections if is_table else keys, sections)
        if not is_table:
            raise ValueError(f"{where}{title} is {content!r}; it is a section: give [{title}]")
        own = {name: o.key for name, o in options.items() if o.section.name == title}
        for name, value in content.items():
            name = name.replace("-", "_")
            if name not in own:
                _refuse_key(f"{where}{title}.{name}", name, keys, own)
            values[name] = options[name].read(value, where + keys[name])
    return values


def _refuse_key(
    said: str, typed: str, known: Mapping[str, str], otherwise: Mapping[str, str]
) -> NoReturn:
    """`known` is what may have been meant; `otherwise` is listed where nothing is near it."""
    near = get_close_matches(typed, known, n=1)
    names = [known[near[0]]] if near else otherwise.values()
    raise ValueError(f"{said} is no setting; give {' or '.join(names)}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return ",".join(map(_text, value)) if isinstance(value, tuple) else str(value)


def command_of(
    settings: type[T],
    run: Callable[[T], None],
    is_over: Callable[[Path], bool] = lambda folder: False,
) -> Callable[..., None]:
    """`run` as a command: its options are those of the settings, common ones first.

    A run to resume of which `is_over` holds has ended meanwhile, and there is nothing to do.

    A value is that of the command line, else of the file --config, else the default.
    """
    options = options_of(settings)

    def command(config: Path | None, **given: Any) -> None:
        # An option that may be given several times and is not given is an empty list.
        typed = {
            n: options[n].read(v, options[n].flag) for n, v in given.items() if v not in (None, [])
        }
        if "resume" in typed:
            if config is not None:
                raise ValueError(
                    "--config is given beside --resume, which takes the settings of the run; leave "
                    "one of them out"
                )
            if is_over(typed["resume"]):
                return
            merged = settings(**read_resumed(settings, typed["resume"], typed))
            check(merged)
            run(merged)
            return
        stored = {} if config is None else read_file(settings, config)
        for name, o in options.items():  # what is typed replaces what it excludes in the file
            if o.not_with and not o.not_with.values:
                for one, other in ((name, o.not_with.option), (o.not_with.option, name)):
                    if one in typed:
                        stored.pop(other, None)
        merged = settings(**(stored | typed))
        check(merged)
        run(merged)

    file = (
        "TOML file of settings, or the run.json of a run to repeat. Options on the command line "
        "replace its values."
    )
    declared: dict[str, tuple[type, Any]] = {
        "config": (Path, typer.Option(None, "--config", help=file))
    }
    for o in sorted(options.values(), key=lambda o: not o.common):
        names = f"{o.flag}/--no-{o.flag[2:]}" if o.kind is bool else o.flag
        declared[o.name] = (
            _TYPED.get(o.kind, o.kind),
            typer.Option(
                None,
                *([names, o.short] if o.short else [names]),
                help=o.help_text(),
                metavar="NAME" if o.choices else None,
                show_default=False,
                rich_help_panel=None if o.common else o.section.title,
                autocompletion=_completion(o.choices) if o.choices else None,
            ),
        )
    # Typer reads a command's options from its signature.
    parameters = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind | None
        )
        for name, (kind, default) in declared.items()
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__ = run.__doc__
    return command


def _completion(choices: tuple[str, ...]) -> Callable[[], list[str]]:
    return lambda: list(choices)
