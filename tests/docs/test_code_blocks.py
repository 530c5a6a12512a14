"""What the pages show can be typed: Python runs, commands run or parse, JSON is taken by what reads it."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import tomllib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from connector_patch import child, config
from connector_patch.checks import read_mooncake_config
from singleflight.cli.main import app
from singleflight.gate import calibration
from singleflight.traces.reader import TraceReader
from tests.docs.blocks import ROOT, Block, blocks, inline_code

SHELL = blocks("", "sh", "bash", "console")
COMMANDS = [(block.at, words) for block in SHELL for words in block.commands]
RUN = ("gate", "report", "simulate", "sweep", "trace")
"""Commands that need a trace alone. The others want a store, an engine, or minutes: these are parsed."""


def cases(found: list[tuple[str, Any]]) -> list[Any]:
    return [pytest.param(what, id=at) for at, what in found]


def starting(*words: str) -> list[Any]:
    return cases([(at, given) for at, given in COMMANDS if tuple(given[: len(words)]) == words])


# -- Python -----------------------------------------------------------------------------------------------


async def store_get(key: object) -> str:
    return f"block {key}"


async def fetch(keys: list[object]) -> dict[object, str]:
    return {key: await store_get(key) for key in keys}


PYTHON: dict[str, list[Block]] = {}
for _block in blocks("python"):
    PYTHON.setdefault(_block.at.partition(":")[0], []).append(_block)


@pytest.mark.parametrize("page", PYTHON)
def test_python_runs(page: str) -> None:
    """A page's blocks one after the other, in one namespace. What a page leaves to its reader stands here."""
    given = {
        "fetch": fetch,
        "store_get": store_get,
        "prepare": lambda: None,
        "block_hashes": list(range(1, 9)),
    }

    async def run(code: CodeType) -> None:
        running = eval(code, given)
        if running is not None:
            await running

    for block in PYTHON[page]:
        code = compile(block.text, block.at, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        asyncio.run(asyncio.wait_for(run(code), 60))
    assert given["blocks"] == {key: f"block {key}" for key in range(1, 9)}


# -- commands ---------------------------------------------------------------------------------------------


def parse(words: list[str]) -> None:
    """Parse `singleflight WORDS…` to its end, and do not run it. Raises if a word is not accepted."""
    command: Any = typer.main.get_command(app)
    context, rest = command.context_class(command, info_name="singleflight"), words
    while hasattr(command, "commands"):
        name, command, rest = command.resolve_command(context, list(rest))
        context = command.context_class(command, info_name=name, parent=context)
    command.make_context(context.info_name, list(rest), parent=context.parent)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader would be: traces and a calibration under the names that the pages use."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("trace", "conversation_trace", "synthetic_trace"):
        made = CliRunner().invoke(
            app, ["trace", "synth", str(folder / f"{name}.jsonl"), "--pattern", "agents", "--requests", "200"]
        )
        assert made.exit_code == 0, made.output
    figures = {"load_bandwidth": {"value": 5e9, "unit": "bytes/s", "origin": "given"}}
    (folder / "calibration.json").write_text(json.dumps({"schema": calibration.SCHEMA, "figures": figures}))
    return folder


@pytest.mark.parametrize("words", starting("singleflight"))
def test_a_command_runs_or_parses(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placeholders = [word for word in words[2:] if re.fullmatch(r"[A-Z]{3,}…?", word)]
    if words[1] not in RUN or placeholders:
        parse(words[1:])
        return
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(app, words[1:])
    assert done.exit_code == 0, done.output


def test_every_command_and_option_in_a_sentence_exists() -> None:
    unknown = []
    for block in inline_code():
        words = block.text.split()
        if words[:1] != ["singleflight"] or len(words) < 2:
            continue
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        for names in _alternatives([word for word in words[1:] if not word.startswith("--")]):
            command: Any = typer.main.get_command(app)
            while hasattr(command, "commands") and names:
                command = command.commands.get(names.pop(0))
            known = {option for each in getattr(command, "params", ()) for option in each.opts}
            if command is None or not options <= known:
                unknown.append(f"{block.at}: {block.text}")
    assert unknown == []


def _alternatives(words: list[str]) -> list[list[str]]:
    """[["trace", "inspect"], ["trace", "convert"]] for `trace inspect|convert`."""
    at = next((i for i, word in enumerate(words) if "|" in word), None)
    return [words] if at is None else [[*words[:at], each] for each in words[at].split("|")]


@pytest.mark.parametrize("words", starting("make"))
def test_a_make_target_exists(words: list[str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {word for word in words[1:] if "=" not in word} <= targets


@pytest.mark.parametrize("words", starting("pip", "install"))
def test_an_extra_exists(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words[2:]:
        if ours := re.fullmatch(r"(?:\.|kv-singleflight)\[(.*)\]", word):
            assert set(ours[1].split(",")) <= set(extras)


@pytest.mark.parametrize("words", starting("python") + starting(".venv/bin/python"))
def test_a_python_module_or_script_exists(words: list[str]) -> None:
    if words[1] == "-m":
        assert find_spec(words[2]), words[2]
    else:
        assert (ROOT / words[1]).is_file()
    assert all((ROOT / word).exists() for word in words if re.fullmatch(r"[\w/-]+\.py", word))


# -- JSON -------------------------------------------------------------------------------------------------

TRANSFERS = [
    (at, words[words.index("--kv-transfer-config") + 1])
    for at, words in COMMANDS
    if "--kv-transfer-config" in words
]
FRAGMENTS = [
    (block.at, f"{{{found}}}")
    for block in SHELL
    for found in re.findall(r'^"singleflight": \{.*\}', block.text, re.MULTILINE)
]
DOCUMENTS = [
    *TRANSFERS,
    *FRAGMENTS,
    *((block.at, block.text) for block in blocks("", "json") if block.text.startswith("{")),
]


def _transfer(given: dict[str, Any], _: Path) -> None:
    extra = given["kv_connector_extra_config"]
    if given["kv_connector"] != "SingleFlightMooncakeStoreConnector":
        assert given["kv_connector"] == "SingleFlightConnector"
        child.kind_of(extra)
    config.parse(extra["singleflight"])


def _trace_row(given: dict[str, Any], file: Path) -> None:
    """With as many ids as the row has tokens, whatever the block size of who recorded it."""
    given["hash_ids"] = list(range(-(-given["input_length"] // 512)))
    file.write_text(json.dumps(given) + "\n")
    assert len(list(TraceReader(str(file)))) == 1


READERS: dict[str, Callable[[dict[str, Any], Path], object]] = {
    "kv_connector": _transfer,
    "singleflight": lambda given, _: config.parse(given["singleflight"]),
    calibration.SCHEMA: lambda _, file: calibration.read(file),
    "timestamp": _trace_row,
    "metadata_server": lambda _, file: read_mooncake_config(str(file)),
}
"""By a key, or by the schema."""


@pytest.mark.parametrize("text", cases(DOCUMENTS))
def test_json_is_taken_by_what_reads_it(text: str, tmp_path: Path) -> None:
    given = json.loads(text)
    file = tmp_path / "file.json"
    file.write_text(text)
    named = [read for name, read in READERS.items() if name in (given.get("schema"), *given)]
    assert named, f"no reader is known for {text}"
    named[0](given, file)


def test_nothing_is_left_unseen() -> None:
    """Were blocks no longer found, all of the above would pass."""
    assert len(PYTHON) >= 2
    assert len(starting("singleflight")) >= 8
    assert len(TRANSFERS) >= 3
    assert len(FRAGMENTS) >= 2
    assert len(DOCUMENTS) >= 8
