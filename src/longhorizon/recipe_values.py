"""Values of a recipe: from words of a command line, into their table, and of the type that their key asks for."""

import re
import tomllib
from collections.abc import Callable, Mapping
from typing import Any


class RecipeError(ValueError):
    """A recipe that cannot be run, in one sentence."""


def parse_value(text: str) -> Any:
    """A value from the command line: as TOML would read it, with `.1` and `1.` for numbers too, else a string.

    >>> parse_value("[1, 10]"), parse_value(".1"), parse_value("wrn-16-1")
    ([1, 10], 0.1, 'wrn-16-1')
    """
    written_out = re.sub(r"(?<=\d)\.(?!\d)", ".0", re.sub(r"(?<![\w.])\.(?=\d)", "0.", text))
    for candidate in (text, written_out):
        try:
            return tomllib.loads(f"v = {candidate}")["v"]
        except tomllib.TOMLDecodeError:
            continue
    return text


def override(content: dict[str, Any], key: str, value: Any, defaults: Mapping[str, dict[str, Any]]) -> None:
    """Set a dotted key; a table that the file leaves out starts from its default."""
    parts = key.split(".")
    if len(parts) > 1 and parts[0] in defaults:
        content.setdefault(parts[0], defaults[parts[0]])
    table: Any = content
    for part in parts[:-1]:
        table = table.setdefault(_name_in(table, part), {})
        if not isinstance(table, dict):
            raise RecipeError(f"--{key}: {part!r} is no table.")
    table[_name_in(table, parts[-1])] = value


def _name_in(table: Mapping[str, Any], word: str) -> str:
    """A key as the table has it; a new one has no dashes but in its label."""
    name, slash, label = word.partition("/")
    return word if word in table else name.replace("-", "_") + slash + label


def typed(key: str, value: Any, annotation: Any) -> Any:
    """The value as the field's type, or an error that shows both."""
    kind = annotation.__name__ if annotation in (str, int, float, bool) else str(annotation)
    if kind in ("float", "float | str") and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    checks: dict[str, Callable[[Any], bool]] = {
        "str": lambda v: isinstance(v, str),
        "int": lambda v: isinstance(v, int) and not isinstance(v, bool),
        "float": lambda v: isinstance(v, float),
        "bool": lambda v: isinstance(v, bool),
    }
    checks["float | str"] = lambda v: checks["float"](v) or checks["str"](v)
    checks["int | list[int]"] = lambda v: (
        checks["int"](v) or (isinstance(v, list) and bool(v) and all(map(checks["int"], v)))
    )
    checks["float | list[float]"] = lambda v: (
        _is_count(v) or (isinstance(v, list) and bool(v) and all(map(_is_count, v)))
    )
    check = checks.get(kind, lambda v: isinstance(v, dict))
    if not check(value):
        words = {"str": "a text", "int": "a whole number", "float": "a number", "bool": "true or false"}
        words |= {"int | list[int]": "a whole number or a list of them", "float | list[float]": "a number or a list"}
        words["float | str"] = "a number or a text"
        raise RecipeError(f"{key} = {value!r}: expected {words.get(kind, 'a table')}.")
    return value


def _is_count(value: Any) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and value >= 0
