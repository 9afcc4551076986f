"""How an option is declared, and what is made of the declaration.

An option is a field of a settings dataclass, declared once by `option`: help, default, range, and
the other options that it goes with. From that come the command line (`command_of`), files of
settings (`read_file`), the checks (`check`), what run.json holds (`to_dict`), and
docs/reference/train.md. Nothing here imports torch: `--help` must not wait for it.
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import typer

Settings = TypeVar("Settings")


class Range(NamedTuple):
    """The numbers that an option takes, in words for an error, and as a test. NaN fails it."""

    words: str
    contains: Callable[[float], bool]


LEAST_NOISE = 1e-3  # of tacit.accounting.pld, which imports SciPy; a test compares the two
POSITIVE = Range("a finite number above 0", lambda v: 0 < v < math.inf)
ZERO_OR_MORE = Range("0 or more", lambda v: v >= 0)
ONE_OR_MORE = Range("at least 1", lambda v: v >= 1)
BELOW_ONE = Range("at least 0 and less than 1", lambda v: 0 <= v < 1)
SHARE = Range("a number between 0 and 1", lambda v: 0 < v < 1)
FACTOR = Range("a number above 0 and at most 1", lambda v: 0 < v <= 1)
LIMIT = Range("a finite number above 0, or 0 for no limit", lambda v: 0 <= v < math.inf)
SEED = Range("0 or more, and less than 2**63", lambda v: 0 <= v < 2**63)
NOISE = Range(
    f"0, or {LEAST_NOISE:g} or more: less noise cannot be accounted for, and protects nobody",
    lambda v: v == 0 or v >= LEAST_NOISE,
)


class Rule(NamedTuple):
    """Another option, and the values for which a rule holds: any that is given if there are none.

    In `goes_with` and `not_with` they are values of the other option, in `needs` one's own.
    """

    option: str
    values: tuple[Any, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Option:
    """One option. `usual` says what is used where the default is None; `parse` reads its text."""

    help: str
    default: Any = None
    range: Range | None = None
    goes_with: tuple[Rule, ...] = ()
    not_with: tuple[Rule, ...] = ()
    needs: tuple[Rule, ...] = ()
    usual: str = ""
    parse: Callable[[str], Any] | None = None
    common: bool = False
    short: str = ""
    # From the field that declares it.
    name: str = ""
    section: str = ""
    kind: type = str
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    def default_text(self) -> str:
        return self.usual if self.default in (None, False) else f"{self.default}"

    def said(self, value: object) -> str:
        return f"{self.flag} is {_text(value)}"

    def read(self, value: Any, where: str) -> Any:
        """A value of the command line or of a file, as the field has it."""
        if self.parse is not None:
            if isinstance(value, list):
                value = ",".join(map(str, value))
            if isinstance(value, str):
                return self.parse(value)
        wanted: tuple[type, ...] = {float: (int, float), Path: (str, Path)}.get(
            self.kind, (self.kind,)
        )
        if not isinstance(value, wanted) or (isinstance(value, bool) and self.kind is not bool):
            raise ValueError(f"{where} is {value!r}; give {_WORDS[self.kind]}")
        return self.kind(value)


_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text in quotes",
    Path: "a path in quotes",
    tuple: "a list, or text with commas",
}


def option(help: str, default: Any = None, **rest: Any) -> Any:
    """Declare an option as a field of a settings dataclass; `rest` are fields of `Option`."""
    return field(default=default, metadata={"option": Option(help, default, **rest)})


def section(kind: Callable[[], Any], title: str, *goes_with: Rule) -> Any:
    """Declare a group of options; `goes_with` holds for each of them."""
    return field(default_factory=kind, metadata={"title": title, "goes_with": goes_with})


def options_of(settings: type) -> dict[str, Option]:
    """Every option, by its name; names are unique over the sections."""
    found = {}
    for part in fields(settings):
        kind = get_type_hints(settings)[part.name]
        hints = get_type_hints(kind)
        for each in fields(kind):
            declared: Option = each.metadata["option"]
            inner = [h for h in get_args(hints[each.name]) if h is not type(None)]
            hint = inner[0] if type(None) in get_args(hints[each.name]) else hints[each.name]
            choices = get_args(hint) if get_origin(hint) is Literal else ()
            found[each.name] = replace(
                declared,
                name=each.name,
                section=part.name,
                kind=str if choices else get_origin(hint) or hint,
                choices=choices or declared.choices,
                goes_with=(*part.metadata["goes_with"], *declared.goes_with),
            )
    return found


def assemble(settings: type[Settings], values: Mapping[str, Any]) -> Settings:
    """Nested settings from values by option name. What is missing or None has its default."""
    options, parts = options_of(settings), {part.name: {} for part in fields(settings)}  # type: ignore[arg-type, var-annotated]
    for name, value in values.items():
        if value is not None:
            parts[options[name].section][name] = value
    kinds = get_type_hints(settings)
    return settings(**{name: kinds[name](**own) for name, own in parts.items()})


def to_dict(settings: Any) -> dict[str, dict[str, Any]]:
    """Section by section what is not None, as JSON and TOML can hold it."""
    plain: dict[str, dict[str, Any]] = {}
    for name, o in options_of(type(settings)).items():
        value = getattr(getattr(settings, o.section), name)
        if value is not None:
            plain.setdefault(o.section, {})[name] = str(value) if o.kind is Path else value
    return plain


def check(settings: Any) -> None:
    """Raise ValueError for the first option that is out of range, or that would be ignored."""
    options = options_of(type(settings))
    values = {n: getattr(getattr(settings, o.section), n) for n, o in options.items()}
    given = {n: v for n, v in values.items() if v is not None and v != options[n].default}
    for name, value in given.items():
        o = options[name]
        if o.choices and value not in o.choices:
            near = _nearest(value, o.choices)
            words = near[0] if near else f"one of {', '.join(o.choices)}"
            raise ValueError(f"{o.said(value)}; give {words}")
        if o.range is not None and not o.range.contains(value):
            raise ValueError(f"{o.said(value)}; give {o.range.words}")
    for name, value in given.items():
        o = options[name]
        for rule in o.goes_with:
            other, held = options[rule.option], values[rule.option]
            if (held in rule.values) if rule.values else (rule.option in given):
                continue
            state = other.said(held) if held is not None else f"{other.flag} is not given"
            why = f", {rule.why}" if rule.why else ""
            raise ValueError(
                f"{o.said(value)}, and {state}{why}; {o.flag} goes with {alternatives(rule)}: "
                f"give that, or leave {o.flag} out"
            )
        for rule in o.not_with:
            if rule.option in given and (not rule.values or given[rule.option] in rule.values):
                both = f"{o.said(value)} and {options[rule.option].said(given[rule.option])}"
                raise ValueError(f"{both}, {rule.why}; leave one of them out")
        for rule in o.needs:
            if (not rule.values or value in rule.values) and rule.option not in given:
                raise ValueError(f"{o.said(value)}, which needs {alternatives(rule, own=True)}")


def alternatives(rule: Rule, own: bool = False) -> str:
    flag = "--" + rule.option.replace("_", "-")
    if own or not rule.values:
        return f"{flag}: {rule.why}" if own else flag
    return f"{flag} {' or '.join(map(_text, rule.values))}"


def read_file(settings: type, path: Path) -> dict[str, Any]:
    """The values in a TOML file, or in the run.json of a run, by option name.

    The output of a run is its own: from run.json nothing of it is read but a shared ledger.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            told = dict(json.loads(text)["config"]["settings"])
            told["output"] = {n: v for n, v in told.get("output", {}).items() if n == "ledger"}
        else:
            told = tomllib.loads(text)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--config is {path}, which cannot be read ({type(error).__name__}: {error}); give a "
            "TOML file, or the run.json of a run of tacit train"
        ) from error
    return read_nested(settings, told, f"{path}: ")


def read_nested(settings: type, told: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Values by option name; raise ValueError for an unknown key or a value of the wrong type."""
    options, values = options_of(settings), {}
    titles = [part.name for part in fields(settings)]
    for title, keys in told.items():
        title = title.replace("-", "_")
        if title not in titles:
            known = {} if isinstance(keys, dict) else options  # a table can only be a section
            _refuse_key(f"{where}{title}", title, known, [f"[{name}]" for name in titles])
        if not isinstance(keys, dict):
            raise ValueError(f"{where}{title} is {keys!r}; it is a section: give [{title}]")
        for key, value in keys.items():
            o = options.get(key.replace("-", "_"))
            if o is None or o.section != title:
                own = [other.key for other in options.values()]
                _refuse_key(f"{where}{title}.{key}", key, options, own)
            else:
                values[o.name] = o.read(value, f"{where}{o.key}")
    return values


def _refuse_key(said: str, key: str, options: Mapping[str, Option], others: list[str]) -> None:
    near = _nearest(key.replace("-", "_"), options)
    if near:
        others = [options[name].key for name in near]
    else:
        last = {other.rpartition(".")[2].strip("[]"): other for other in others}
        others = [last[name] for name in _nearest(key, last)] or others
    raise ValueError(f"{said} is no setting; give {' or '.join(others)}")


def _nearest(name: str, names: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return ",".join(map(_text, value)) if isinstance(value, tuple) else str(value)


def command_of(settings: type[Settings], run: Callable[[Settings], None]) -> Callable[..., None]:
    """`run` as a command: its options are those of the settings, common ones first.

    A value is that of the command line, else of the file --config, else the default.
    """
    options = options_of(settings)
    titles = {part.name: part.metadata["title"] for part in fields(settings)}  # type: ignore[arg-type]

    def command(config: Path | None, **given: Any) -> None:
        typed = {n: options[n].read(v, options[n].flag) for n, v in given.items() if v is not None}
        values = {} if config is None else read_file(settings, config)
        for name, o in options.items():  # what is typed also replaces what it excludes
            for rule in o.not_with:
                for one, other in ((name, rule.option), (rule.option, name)):
                    if one in typed and not rule.values:
                        values.pop(other, None)
        merged = assemble(settings, values | typed)
        check(merged)
        run(merged)

    def parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind
        )

    file = "Settings as TOML, or the run.json of a run to repeat. Options given here come first."
    parameters = [parameter("config", Path | None, typer.Option(None, "--config", help=file))]
    for o in sorted(options.values(), key=lambda o: not o.common):
        names = f"{o.flag}/--no-{o.flag[2:]}" if o.kind is bool else o.flag
        declared = typer.Option(
            None,
            *([names, o.short] if o.short else [names]),
            help=help_text(o),
            metavar="NAME" if o.choices else None,
            show_default=False,
            rich_help_panel=None if o.common else titles[o.section],
            autocompletion=_completion(o.choices) if o.choices else None,
        )
        kind = str if o.parse else o.kind
        parameters.append(parameter(o.name, kind | None, declared))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__ = run.__doc__
    return command


def _completion(choices: tuple[str, ...]) -> Callable[[], list[str]]:
    return lambda: list(choices)


def help_text(o: Option) -> str:
    """The help, the choices, and the default."""
    parts = [o.help]
    if o.choices:
        parts.append(f"One of {', '.join(o.choices)}.")
    if o.default_text():
        parts.append(f"Default: {o.default_text()}.")
    return " ".join(parts)
