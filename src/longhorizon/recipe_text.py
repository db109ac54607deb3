"""A recipe as the text of a TOML file: a commented one to begin with, and one that writes every setting out."""

import json
from dataclasses import fields
from typing import Any

from longhorizon.recipe import PROTOCOL, Recipe


def template() -> str:
    """A commented recipe with every default, for `longhorizon init`."""
    lines = ["# A recipe for longhorizon. Run it with: longhorizon tune THIS_FILE", "# Every key is optional.", ""]
    tables = []
    for f in fields(Recipe):
        value = getattr(Recipe(), f.name)
        if isinstance(value, dict):
            tables.append((f.name, value, f.metadata["doc"]))
            continue
        unset = value in ("", 0, 0.0) and f.name in ("task", "data_root", "init", "epochs", "test_steps", "threads")
        unset = unset or f.name in PROTOCOL  # depends on the data
        lines.append(f"{'# ' if unset else ''}{f.name} = {_toml(value)}  # {f.metadata['doc']}")
    for name, value, doc in tables:
        lines += ["", f"# {doc}"]
        flat = {k: v for k, v in value.items() if not isinstance(v, dict)}
        if flat:
            lines += [f"[{name}]", *(f"{k} = {_toml(v)}" for k, v in flat.items())]
        for key, entry in value.items():
            if isinstance(entry, dict):
                lines += [f"[{name}.{_toml_key(key)}]", *(f"{k} = {_toml(v)}" for k, v in entry.items()), ""]
    return "\n".join(lines).rstrip() + "\n"


def to_toml(recipe: Recipe) -> str:
    """A recipe as a file, every setting written out."""
    plain = [f"{f.name} = {_toml(getattr(recipe, f.name))}" for f in fields(Recipe) if f.name not in ("rule", "hypers")]
    lines = [*plain, "", "[rule]", *(f"{k} = {_toml(v)}" for k, v in recipe.rule.items())]
    for key, entry in recipe.hypers.items():
        lines += ["", f"[hypers.{_toml_key(key)}]", *(f"{k} = {_toml(v)}" for k, v in entry.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # what JSON escapes, TOML reads
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return repr(value)


def _toml_key(key: str) -> str:
    return key if key.isascii() and key.replace("_", "").isalnum() else _toml(key)
