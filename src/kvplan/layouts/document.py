"""YAML and JSON documents with line numbers, and building nouns from them. No meaning of any field.

1. :func:`load` parses a file into plain values; lines of keys are looked up when an error asks for one.
2. :func:`build` fills a dataclass from a mapping: unknown keys are refused with near matches, missing ones named, each
   value checked against the field's type, whole numbers against their least value.
3. An error names its field as ``cache.block_size``; :meth:`Document.located` adds file and line.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import yaml

from kvplan.errors import DescriptionError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

T = TypeVar("T")

MAX_FILE_BYTES = 16 << 20
"""Descriptions are written by people; a larger file is a mistake."""

MAX_VALUES = 1 << 18
"""Bounds what aliases can unfold to."""

FROM_ZERO = frozenset({"group", "index", "first_token", "num_tokens"})
"""Whole numbers that may be 0; all others begin at 1."""


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed file."""

    file: str
    data: Any
    text: str

    def line(self, field: str) -> int:
        """Return the line (from 1) of a field as ``model.layers.0.name``, or of the nearest thing around it."""
        lines: dict[str, int] = {}
        try:
            _from_yaml(self.text, lines)
        except (yaml.YAMLError, RecursionError, ValueError):
            return 1
        parts = field.split(".") if field else []
        paths = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        return next((lines[path] for path in paths if path in lines), 1)

    def located(self, error: DescriptionError) -> DescriptionError:
        """Return the error with file, line and field in its message; one that has a file already is left alone."""
        if error.file:
            return error
        line = self.line(error.field)
        where = f"{self.file}:{line}: {error.field}: " if error.field else f"{self.file}:{line}: "
        return DescriptionError(f"{where}{error}", field=error.field, file=self.file, line=line)


def load(path: Path) -> Document:
    """Return a YAML file, or a JSON file when it is called so, as plain values."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise DescriptionError(f"{path}:1: the file has more than {MAX_FILE_BYTES} bytes", file=str(path), line=1)
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DescriptionError(f"{path}: cannot be read: {error.strerror}", file=str(path)) from None
    except UnicodeDecodeError:
        raise DescriptionError(f"{path}:1: not UTF-8 text", file=str(path), line=1) from None
    read = _from_json if path.suffix == ".json" else _from_yaml
    try:
        return Document(str(path), read(text, {}), text)
    except yaml.MarkedYAMLError as error:
        line, why = error.problem_mark.line + 1 if error.problem_mark else 1, error.problem or error.context
    except json.JSONDecodeError as error:
        line, why = error.lineno, error.msg
    except RecursionError:
        line, why = 1, "nested too deeply"
    except yaml.reader.ReaderError as error:
        line, why = text.count("\n", 0, error.position) + 1, f"character {error.character!r} is not allowed"
    except (yaml.YAMLError, ValueError) as error:
        line, why = 1, " ".join(str(error).split())
    message = f"{path}:{line}: not {'JSON' if read is _from_json else 'YAML'}: {why}"
    raise DescriptionError(message, file=str(path), line=line)


def _from_json(text: str, _: dict[str, int]) -> Any:
    return json.loads(text, object_pairs_hook=_distinct)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} is given twice")
    return found


def _from_yaml(text: str, lines: dict[str, int]) -> Any:
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        return None if node is None else _value(loader, node, "", lines)
    finally:
        loader.dispose()


def _value(loader: yaml.SafeLoader, node: yaml.Node, path: str, lines: dict[str, int]) -> Any:
    lines.setdefault(path, node.start_mark.line + 1)
    if len(lines) > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES} values, aliases counted as often as they are used")
    if isinstance(node, yaml.MappingNode):
        _merge(loader, node)
        found: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = loader.construct_object(key_node)
            name = f"{path}.{key}" if path else str(key)
            if isinstance(key, (list, dict)) or key in found:
                mark = key_node.start_mark
                raise yaml.MarkedYAMLError(problem=f"key {key!r} is given twice", problem_mark=mark)
            lines[name] = key_node.start_mark.line + 1
            found[key] = _value(loader, value_node, name, lines)
        return found
    if isinstance(node, yaml.SequenceNode):
        return [_value(loader, item, f"{path}.{i}" if path else str(i), lines) for i, item in enumerate(node.value)]
    return loader.construct_object(node)


def _merge(loader: yaml.SafeLoader, node: yaml.MappingNode) -> None:
    """Put what ``<<`` names in its place; the mapping's own keys win."""
    num_own = sum(key.tag != "tag:yaml.org,2002:merge" for key, _ in node.value)
    if num_own == len(node.value):
        return
    loader.flatten_mapping(node)
    merged, own = node.value[: len(node.value) - num_own], node.value[len(node.value) - num_own :]
    names = {key.value for key, _ in own if isinstance(key, yaml.ScalarNode)}
    last = {key.value: (key, value) for key, value in merged if key.value not in names}
    node.value = [*last.values(), *own]


def mapping(data: Any, field: str) -> dict[str, Any]:
    """Return the data as a mapping with text keys, lower case and with underscores."""
    if not isinstance(data, dict):
        found = "the file is empty; fields are expected" if data is None and not field else None
        raise DescriptionError(found or f"{shown(data)} is not a mapping of fields", field=field)
    return {
        str(key).strip().lower().replace("-", "_") if isinstance(key, str) else str(key): x for key, x in data.items()
    }


def sequence(data: Any, field: str) -> list[Any]:
    """Return the data as a list."""
    if not isinstance(data, list):
        raise DescriptionError(f"{shown(data)} is not a list", field=field)
    return data


def check_keys(data: Mapping[str, Any], allowed: list[str], field: str) -> None:
    """Refuse keys that nobody reads, with near matches."""
    for key in data:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=2, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise DescriptionError(
                f"{key!r} is not known here; {hint}allowed: {', '.join(allowed)}", field=f"{field}.{key}".lstrip(".")
            )


def build(cls: type[T], data: Mapping[str, Any], field: str, *, aliases: Mapping[str, str] | None = None) -> T:
    """Return an instance of a dataclass, its fields read from a mapping; ``aliases`` maps other names to fields."""
    hints = get_type_hints(cls)
    known = {item.name: item for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
    given: dict[str, Any] = {}
    for key, value in data.items():
        name = (aliases or {}).get(key, key)
        if name in known and name in given:
            raise DescriptionError(f"{key!r} and another key both give {name}", field=f"{field}.{key}".lstrip("."))
        given[name] = _checked(value, hints[name], name, f"{field}.{key}".lstrip(".")) if name in known else value
    check_keys(given, list(known), field)
    missing = [name for name, item in known.items() if name not in given and _required(item)]
    if missing:
        raise DescriptionError(f"{' and '.join(missing)} must be given", field=field)
    return cls(**given)


def _required(item: dataclasses.Field[Any]) -> bool:
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING


def _checked(value: Any, hint: Any, name: str, field: str) -> Any:
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    if choices and isinstance(value, str):
        value = next((choice for choice in choices if choice.lower() == value.strip().lower().replace("-", "_")), value)
    if choices and value not in choices:
        raise DescriptionError(f"{shown(value)} is not allowed; allowed: {', '.join(choices)}", field=field)
    try:
        value = msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise DescriptionError(f"{shown(value)}: {_plain(str(error))}", field=field) from None
    least = 0 if name in FROM_ZERO else 1
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, int) and not isinstance(number, bool) and number < least:
            raise DescriptionError(f"{number} is too small; it is a whole number from {least} on", field=field)
    return value


def _plain(message: str) -> str:
    words = {
        "`int`": "a whole number",
        "`float`": "a number with a fraction",
        "`object`": "a mapping",
        "`str`": "text",
        "`bool`": "true or false",
        "`array`": "a list",
        "`null`": "nothing",
    }
    text = message.split(" - at ", maxsplit=1)[0]
    for word, plain in words.items():
        text = text.replace(word, plain)
    return text[0].lower() + text[1:]


def shown(value: Any) -> str:
    """Return a value as the file would have it, shortened."""
    text = {"None": "null", "True": "true", "False": "false"}.get(repr(value), repr(value))
    return text if len(text) <= 60 else f"{text[:57]}..."
