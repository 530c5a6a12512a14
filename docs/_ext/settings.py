"""`{settings}`: every key of `singleflight` in --kv-transfer-config, from the code that reads it.

Which keys there are and what they accept is what `connector_patch.config.parse` itself says when it refuses;
meanings are the docstrings of `Policy`, `Config` and `Record`; defaults are their objects'.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

from connector_patch import config
from singleflight.core import policy

NO_VALUE = object()
"""Of a type that no key takes."""


@dataclass(frozen=True)
class Setting:
    """One key.

    Attributes:
        key: as in the JSON, nested ones with a dot. default: as in JSON, "" where there is none.
        accepts: what the parser accepts, in its words. meaning: paragraphs.
        choices: value -> meaning, for keys that take one of a few words.
    """

    key: str
    default: str
    accepts: str
    meaning: str
    choices: dict[str, str]


def settings() -> list[Setting]:
    """Every key, in the order in which the parser names them."""
    docs = _Docs(_attribute_docs())
    found = []
    for key in _accepted({"?": 0}):
        owner, default = _default(key)
        enum = type(default) if isinstance(default, Enum) else None
        found.append(
            Setting(
                key,
                _as_json(default),
                _refusal({key: NO_VALUE}),
                docs[owner, key],
                {each.value: docs[enum.__name__, each.name] for each in enum} if enum else {},
            )
        )
        if key == "record":
            for inner in _accepted({"record": {"?": 0}}):
                refused = {"record": {"path": "x", inner: NO_VALUE}}
                given = {field.name: field.default for field in fields(config.Record)}[inner]
                default = "" if given is MISSING else _as_json(given)
                found.append(
                    Setting(f"record.{inner}", default, _refusal(refused), docs["Record", inner], {})
                )
    return found


def _accepted(wrong: dict[str, Any]) -> list[str]:
    return re.split(r", ", _said(wrong).partition("accepted are ")[2])


def _refusal(wrong: dict[str, Any]) -> str:
    return _said(wrong).partition("; give ")[2]


def _said(wrong: dict[str, Any]) -> str:
    try:
        config.parse(wrong)
    except ValueError as refused:
        return str(refused)
    raise AssertionError(f"{wrong} was accepted")


def _default(key: str) -> tuple[str, Any]:
    of_policy = key in {field.name for field in fields(policy.Policy)}
    return (
        ("Policy", getattr(policy.Policy(), key)) if of_policy else ("Config", getattr(config.Config(), key))
    )


def _as_json(value: Any) -> str:
    if value is None:
        return ""
    return (
        value.value if isinstance(value, Enum) else f"{value:g}" if isinstance(value, float) else str(value)
    )


class _Docs(dict[tuple[str, str], str]):
    def __missing__(self, name: tuple[str, str]) -> str:
        raise ExtensionError(f"{'.'.join(name)} has no docstring; the settings page needs one below it")


def _attribute_docs() -> dict[tuple[str, str], str]:
    """(class, attribute) -> the docstring below it."""
    found = {}
    for module in (policy, config):
        for name, lines in ModuleAnalyzer.for_module(module.__name__).find_attr_docs().items():
            found[name] = " ".join(lines).strip()
    return found


class Settings(SphinxDirective):
    """One section a key."""

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(policy.__file__)
        self.env.note_dependency(config.__file__)
        text = []
        for each in settings():
            text += [f"## `{each.key}`", "", each.meaning, ""]
            text += [f"- `{value}`: {meaning}" for value, meaning in each.choices.items()] + [""]
            default = f"`{each.default}`" if each.default else "none"
            text += [f"Default: {default}. Accepted: {each.accepts}.", ""]
        return self.parse_text_to_nodes("\n".join(text), allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("settings", Settings)
    return {"parallel_read_safe": True}
