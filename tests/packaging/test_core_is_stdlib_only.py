"""The core is pure: importing it brings in the standard library and itself, no clock and no thread."""

import ast
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(find_spec("singleflight.core").origin).parent
CORE = sorted(f"singleflight.core.{file.stem}" for file in FOLDER.glob("*.py") if file.stem != "__init__")

IMPURE = {
    "_thread",
    "asyncio",
    "concurrent",
    "datetime",
    "io",
    "logging",
    "multiprocessing",
    "os",
    "queue",
    "random",
    "sched",
    "socket",
    "subprocess",
    "threading",
    "time",
}

# sys.modules before and after, so that what site and .pth files import is not held against the core.
PROBE = """
import importlib, json, sys
before = set(sys.modules)
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def imported_by(*modules: str) -> set[str]:
    command = [sys.executable, "-c", PROBE, *modules]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(done.stdout))


def named_in(module: str) -> set[str]:
    """Top-level names of all that the module's source imports, wherever in the file."""
    source = Path(find_spec(module).origin).read_text(encoding="utf-8")
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def test_brings_in_nothing_but_the_standard_library_and_itself():
    new = imported_by(*CORE)
    assert {name for name in new if name.startswith("singleflight")} == {
        "singleflight",
        "singleflight.core",
        *CORE,
    }
    foreign = {name.partition(".")[0] for name in new} - sys.stdlib_module_names - {"singleflight"}
    assert not foreign


@pytest.mark.parametrize("module", CORE)
def test_has_no_clock_no_thread_and_no_input_or_output(module):
    """Time is injected and effects are returned: that is what makes the tests exact."""
    assert not named_in(module) & IMPURE


def test_the_probe_sees_a_foreign_import():
    assert "pytest" in imported_by("pytest")
