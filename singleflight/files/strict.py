"""JSON files of ours: read strictly into frozen dataclasses, written complete or not at all.

A dataclass is the format: its fields are the keys, its annotations what is accepted. Understood are str,
bool, int, float, `Annotated` with `Between`, enums by value, nested dataclasses, `X | None`, `list[X]` and
`dict[str, X]`. Standard library only: the connector reads verdicts inside a server.
"""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import types
import typing
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

from singleflight.files import shown
from singleflight.files.atomic import replaced

T = TypeVar("T")

MAX_BYTES = 16 * 2**20
"""Larger files are none of ours; reading one must not hurt a server."""
MAX_TEXT = 10_000
"""Characters of one text in them."""


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


def read(path: Path, schema: str, kind: type[T], known_keys_only: bool = True, again: str | None = None) -> T:
    """Read a file that `write` wrote, or a person.

    Args:
        kind: the dataclass.
        again: how to have a file of another version made anew.
        known_keys_only: further keys are an error (at the top: others leave room for a newer writer).

    Raises:
        Refused: missing, unreadable, not JSON, another schema, an unknown, missing or repeated key, a wrong
            type or a value out of range.
    """
    document = document_in(path)
    found = document.pop("schema", None)
    if found != schema:
        family = schema.rpartition("/")[0]
        if again is not None and isinstance(found, str) and found.rpartition("/")[0] == family:
            raise Refused(
                f"{shown.path(path)}: schema: {shown.as_json(found)} is of another version; {again}"
            )
        raise Refused(f'{shown.path(path)}: schema: {shown.as_json(found)} is not accepted; give "{schema}"')
    return parse(document, kind, f"{shown.path(path)}: ", known_keys_only)


def document_in(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
        Refused: as `read`, of whatever is not a JSON object.
    """
    where = shown.path(path)
    text = _text(path, where)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise Refused(f"{where}: {shown.text(key)}: is there twice; give each key once")
            found[key] = value
        return found

    def constant(name: str) -> NoReturn:
        raise Refused(f"{where}: {name} is not accepted; give finite numbers")

    try:
        document = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except json.JSONDecodeError as fault:
        raise Refused(f"{where}:{fault.lineno}: {fault.msg}; give one JSON object") from None
    except RecursionError:
        raise Refused(f"{where}: is nested too deeply; give one JSON object") from None
    except Refused:
        raise
    except ValueError:  # int() has a limit on digits
        raise Refused(f"{where}: has a number that is out of all range; give finite numbers") from None
    if not isinstance(document, dict):
        raise Refused(f"{where}: {shown.as_json(document)} is not accepted; give one JSON object")
    return document


def _text(path: Path, where: str) -> str:
    try:
        if not stat.S_ISREG(
            path.stat().st_mode
        ):  # a pipe would hold a server's start-up, a device has no end
            raise Refused(f"{where}: is not a regular file; give a JSON file")
        # Not even a pipe that took its place since then is waited for.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as fault:
        raise Refused(f"{where}: {fault.strerror or fault}; give a file that can be read") from None
    except Refused:
        raise
    except ValueError:  # a NUL or a lone surrogate in the name
        raise Refused(f"'{where}': is not a possible file name; give a JSON file") from None
    if len(data) > MAX_BYTES:
        raise Refused(f"{where}: is larger than {MAX_BYTES >> 20} MiB; give a file this program wrote")
    if data.startswith(b"\xef\xbb\xbf"):
        raise Refused(f"{where}: starts with a byte order mark (BOM); give a JSON file without one")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise Refused(f"{where}: is not UTF-8; give a JSON file") from None


def parse(document: dict[str, Any], kind: type[T], where: str, known_keys_only: bool = True) -> T:
    """A dataclass from a JSON object. `where` stands before a key in every sentence. Raises as `read`."""
    assert dataclasses.is_dataclass(kind)
    hints = typing.get_type_hints(kind, include_extras=True)
    known = {each.name: each for each in dataclasses.fields(kind)}
    for key in document:
        if key not in known and known_keys_only:
            raise Refused(f"{where}{shown.text(key)}: unknown key; accepted are {', '.join(known)}")
    values = {}
    for name, each in known.items():
        if name in document:
            values[name] = _value(document[name], hints[name], f"{where}{name}")
        elif each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
            raise Refused(f"{where}{name}: is missing; give {_accepted(hints[name])}")
    try:
        return typing.cast(T, kind(**values))
    except Refused as fault:  # what only the dataclass itself can judge
        raise Refused(f"{where}{shown.text(fault, 300)}") from None


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
        return {
            _value(key, str, where): _value(each, inner, f"{where}.{shown.text(key)}")
            for key, each in value.items()
        }
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return parse(value, typing.cast("type[Any]", hint), f"{where}.")
    if isinstance(hint, type) and issubclass(hint, Enum):
        if value in [each.value for each in hint]:
            return hint(value)
    elif hint is float and type(value) in (int, float):
        if (bounds or Between()).low <= value <= (bounds or Between()).high:
            return float(value)
    elif hint is str and type(value) is str:
        if len(value) <= MAX_TEXT and is_unicode(value):
            return value
        raise Refused(
            f"{where}: {shown.as_json(value)} is not accepted;"
            f" give a text of at most {MAX_TEXT:,} characters, without lone surrogates"
        )
    elif hint in (bool, int) and type(value) is hint and (not bounds or bounds.low <= value <= bounds.high):
        return value
    raise Refused(f"{where}: {shown.as_json(value)} is not accepted; give {_accepted(hint, bounds)}")


def is_unicode(text: str) -> bool:
    """Whether it can be printed and written: JSON's escapes can spell half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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
