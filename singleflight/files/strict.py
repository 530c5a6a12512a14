"""JSON files of ours: read strictly into frozen dataclasses, written complete or not at all.

A dataclass is the format: its fields are the keys, its annotations what is accepted. Understood are str,
bool, int, float, `Annotated` with `Between`, enums by value, nested dataclasses, `X | None`, `list[X]` and
`dict[str, X]`. Standard library only: the connector reads verdicts inside a server.
"""

from __future__ import annotations

import dataclasses
import json
import stat
import types
import typing
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

from singleflight.traces.writer import replaced

T = TypeVar("T")

MAX_BYTES = 16 * 2**20
"""Larger files are none of ours; reading one must not hurt a server."""


@dataclass(frozen=True)
class Between:
    """Bounds of a number, both included."""

    low: float = -1.7e308
    high: float = 1.7e308

    def __str__(self) -> str:
        if self.high < 1.7e308:
            return f" from {self.low:g} to {self.high:g}"
        return f" >= {self.low:g}" if self.low > -1.7e308 else ""


Number = Annotated[float, Between()]
"""Finite."""
Amount = Annotated[float, Between(0)]
Share = Annotated[float, Between(0, 1)]
Positive = Annotated[int, Between(1)]


class Refused(ValueError):
    """One sentence: which file and key, the value, what is accepted."""


def write(path: Path, schema: str, value: Any) -> None:
    """Write a dataclass as JSON under its schema id.

    Raises:
        OSError: it cannot be written; `path` is as it was before.
    """
    document = {"schema": schema, **dataclasses.asdict(value)}
    with replaced(path) as raw:
        raw.write((json.dumps(document, indent=2, default=_plain, allow_nan=False) + "\n").encode())


def _plain(value: Any) -> Any:
    assert isinstance(value, Enum)
    return value.value


def read(path: Path, schema: str, kind: type[T], known_keys_only: bool = True) -> T:
    """Read a file that `write` wrote, or a person.

    Args:
        kind: the dataclass.
        known_keys_only: further keys are an error (at the top: others leave room for a newer writer).

    Raises:
        Refused: missing, unreadable, not JSON, another schema, an unknown, missing or repeated key, a wrong
            type or a value out of range.
    """
    document = _document(path)
    found = document.pop("schema", None)
    if found != schema:
        raise Refused(f'{path}: schema: {_shown(found)} is not accepted; give "{schema}"')
    return parse(document, kind, f"{path}: ", known_keys_only)


def _document(path: Path) -> dict[str, Any]:
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):  # a pipe would hold a server's start up
            raise Refused(f"{path}: is not a regular file; give a JSON file")
        if about.st_size > MAX_BYTES:
            raise Refused(f"{path}: is larger than {MAX_BYTES >> 20} MiB; give a file this program wrote")
        text = path.read_text(encoding="utf-8")
    except OSError as fault:
        raise Refused(f"{path}: {fault.strerror or fault}; give a file that can be read") from None
    except Refused:
        raise
    except UnicodeDecodeError:
        raise Refused(f"{path}: is not UTF-8; give a JSON file") from None
    except ValueError:  # a NUL in the name
        raise Refused(f"{str(path)!r}: is not a possible file name; give a JSON file") from None

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise Refused(f"{path}: {key}: is there twice; give each key once")
            found[key] = value
        return found

    def constant(name: str) -> NoReturn:
        raise Refused(f"{path}: {name} is not accepted; give finite numbers")

    try:
        document = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except json.JSONDecodeError as fault:
        raise Refused(f"{path}:{fault.lineno}: {fault.msg}; give one JSON object") from None
    except RecursionError:
        raise Refused(f"{path}: is nested too deeply; give one JSON object") from None
    except Refused:
        raise
    except ValueError:  # int() has a limit on digits
        raise Refused(f"{path}: has a number that is out of all range; give finite numbers") from None
    if not isinstance(document, dict):
        raise Refused(f"{path}: {_shown(document)} is not accepted; give one JSON object")
    return document


def parse(document: dict[str, Any], kind: type[T], where: str, known_keys_only: bool = True) -> T:
    """A dataclass from a JSON object. `where` stands before a key in every sentence. Raises as `read`."""
    assert dataclasses.is_dataclass(kind)
    hints = typing.get_type_hints(kind, include_extras=True)
    known = {each.name: each for each in dataclasses.fields(kind)}
    for key in document:
        if key not in known and known_keys_only:
            raise Refused(f"{where}{key}: unknown key; accepted are {', '.join(known)}")
    values = {}
    for name, each in known.items():
        if name in document:
            values[name] = _value(document[name], hints[name], f"{where}{name}")
        elif each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
            raise Refused(f"{where}{name}: is missing; give {_accepted(hints[name])}")
    try:
        return typing.cast(T, kind(**values))
    except Refused as fault:  # what only the dataclass itself can judge
        raise Refused(f"{where}{fault}") from None


def _value(value: Any, hint: Any, where: str) -> Any:
    bounds = None
    origin = typing.get_origin(hint)
    if origin is Annotated:
        hint, bounds = typing.get_args(hint)
        origin = None
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _value(value, next(a for a in typing.get_args(hint) if a is not type(None)), where)
    if origin is list and isinstance(value, list):
        (inner,) = typing.get_args(hint)
        return [_value(each, inner, f"{where}[{i}]") for i, each in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        inner = typing.get_args(hint)[1]
        return {key: _value(each, inner, f"{where}.{key}") for key, each in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return parse(value, typing.cast("type[Any]", hint), f"{where}.")
    if isinstance(hint, type) and issubclass(hint, Enum):
        if value in [each.value for each in hint]:
            return hint(value)
    elif hint is float and type(value) in (int, float):
        if (bounds or Between()).low <= value <= (bounds or Between()).high:
            return float(value)
    elif (
        hint in (str, bool, int)
        and type(value) is hint
        and (not bounds or bounds.low <= value <= bounds.high)
    ):
        return value
    raise Refused(f"{where}: {_shown(value)} is not accepted; give {_accepted(hint, bounds)}")


def _accepted(hint: Any, bounds: Between | None = None) -> str:
    origin = typing.get_origin(hint)
    if origin is Annotated:
        hint, bounds = typing.get_args(hint)
        origin = None
    if origin in (typing.Union, types.UnionType):
        return f"{_accepted(typing.get_args(hint)[0])}, or null"
    if origin is list:
        return f"a list, each {_accepted(typing.get_args(hint)[0])}"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(str(each.value) for each in hint)
    names = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}
    return names.get(hint, "an object") + str(bounds or "")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
