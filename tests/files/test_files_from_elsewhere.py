"""Whatever stands in a file that a person or another program wrote: it is read, or refused in one sentence.

One sentence is: the reader's own exception, one line that prints, bounded, however much of the file it
quotes. Nothing else ever comes out, nothing is waited for, and nothing recurses as deep as a file is nested.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connector_patch import config
from connector_patch.lab import calibrate_store
from connector_patch.lab.calibrate_tiers import StoreError
from singleflight.files import shown
from singleflight.gate import calibration, verdict
from singleflight.stack import mooncake_json
from singleflight.sweep.parts import Parts
from singleflight.traces import recording
from singleflight.traces.errors import TraceError
from singleflight.traces.reader import Options, read

NOBODY = 65534
LONGEST = 1000
"""Characters of a sentence, the file's own name aside."""

GOOD_TRACE = {"timestamp": 3, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}
GOOD_HEADER = {
    "schema": recording.SCHEMA,
    "block_size_tokens": 16,
    "model": "tiny",
    "load_windows_ms": {"p50": 1},
}
GOOD_MOONCAKE = {
    "metadata_server": "P2PHANDSHAKE",
    "master_server_address": "127.0.0.1:1",
    "protocol": "tcp",
    "local_buffer_size": "64MB",
}
GOOD_CALIBRATION = {
    "schema": calibration.SCHEMA,
    "figures": {"load_latency": {"value": 0.5, "unit": "s", "origin": "given"}},
    "made_at": "",
    "machine": {"cpu": "fast"},
    "notes": ["a note"],
}
GOOD_VERDICT = {
    "schema": verdict.SCHEMA,
    "made_at": "2026-11-29T21:00:00Z",
    "enable": True,
    "reasons": ["It pays."],
    "flips": [],
    "ttft": {
        mode: dict.fromkeys((field.name for field in dataclasses.fields(verdict.Prediction)), 1.0)
        for mode in ("stock", "attach")
    },
    "gain": {
        **{of: {"low": 0.1, "stated": 1, "high": 2} for of in ("mean", "p99")},
        **dict.fromkeys(("least_mean", "least_p99"), 0.1),
    },
    "redundancy": 0.5,
    "scope": {
        **dict.fromkeys(
            (
                "steady_requests",
                "block_size_tokens",
                "instances",
                "capacity_blocks",
                "receive_threads",
                "max_num_seqs",
                "max_num_batched_tokens",
            ),
            1,
        ),
        "traces": [{"name": "x", "sha256": "x", "requests": 1, "steady_requests": 1, "span_s": 1.0}],
        **dict.fromkeys(("routing", "model", "store"), "x"),
        "scale": 1.0,
        "versions": {"a": "1"},
    },
    "figures": {"load_latency": {"value": 0.5, "unit": "s", "origin": "measured"}},
}
GOOD_CONFIG = {
    "mode": "attach",
    "gate": "v.json",
    "max_age_days": 3,
    "record": {"path": "t", "max_mb": 1},
    "on_deadline": "load",
    "deadline_base_s": 1.5,
    "max_handovers": 2,
}


@dataclass(frozen=True)
class Reader:
    """Attributes: `read` what it does with a path; `fault` the one exception it may raise; `good` a document
    that it takes, a JSON object, or what `file` makes of it."""

    read: Callable[[Path], Any]
    fault: type[Exception]
    good: dict[str, Any]
    beside: str = ""
    """What the file is called beside the path that is read."""


def part_of(path: Path) -> None:
    """A sweep's finished parts are no input of a person: what is none is left alone, without a sentence."""
    folder = path.parent / ".parts"
    folder.mkdir(exist_ok=True)
    link = folder / "part.json"
    link.unlink(missing_ok=True)
    link.symlink_to(path)
    assert list(Parts(folder, ["key"], cohorts=False).load()) == []


READERS = {
    "verdict": Reader(verdict.read, verdict.VerdictError, GOOD_VERDICT),
    "calibration": Reader(calibration.read, calibration.CalibrationError, GOOD_CALIBRATION),
    "recording's header": Reader(
        lambda path: recording.header_of(str(path).removesuffix(".header.json")),
        recording.HeaderError,
        GOOD_HEADER,
        ".header.json",
    ),
    "trace": Reader(lambda path: read(str(path)), TraceError, GOOD_TRACE),
    "trace, leaving out": Reader(
        lambda path: read(str(path), Options(skip_bad=1000, sort=True, unit="ms")), TraceError, GOOD_TRACE
    ),
    "trace of a recorder": Reader(
        lambda path: read(str(path), Options(recording=True, strict=True)), TraceError, GOOD_TRACE
    ),
    "Mooncake's JSON": Reader(mooncake_json.read, mooncake_json.MooncakeJsonError, GOOD_MOONCAKE),
    "Mooncake's JSON, to measure": Reader(calibrate_store.settings_of, StoreError, GOOD_MOONCAKE),
    "a sweep's part": Reader(part_of, AssertionError, {}),
}
SENTENCES = [name for name in READERS if READERS[name].fault is not AssertionError]


def check(name: str, path: Path) -> str | None:
    """Read; the sentence, if it is one."""
    reader = READERS[name]
    try:
        reader.read(path)
    except reader.fault as fault:
        if reader.fault is AssertionError:
            raise
        return sentence(fault, str(path))
    return None


def sentence(fault: Exception, path: str) -> str:
    said = str(fault)
    assert said.isprintable(), said
    assert len(said) <= LONGEST + min(len(path), shown.LONGEST_PATH), said
    assert "; give " in said or "; accepted" in said, "what is accepted is said"
    return said


def file(name: str, folder: Path) -> Path:
    return folder / f"from-elsewhere.json{READERS[name].beside}"


# -- contents that have broken readers before ----------------------------------------------------------------


def nested(depth: int, opening: str = "[", closing: str = "]") -> bytes:
    return (opening * depth + closing * depth).encode()


def with_value(good: dict[str, Any], value: bytes) -> list[bytes]:
    """The good document with each of its values, at every level, replaced by raw JSON."""
    found: list[bytes] = []
    marker = '"\x7freplaced"'

    def walk(at: Any) -> None:
        for key in list(at) if isinstance(at, dict) else range(len(at)):
            kept = at[key]
            at[key] = "\x7freplaced"
            found.append(json.dumps(whole).replace(json.dumps("\x7freplaced"), marker).encode())
            at[key] = kept
            if isinstance(kept, (dict, list)):
                walk(kept)

    whole = json.loads(json.dumps(good))
    walk(whole)
    return [each.replace(marker.encode(), value) for each in found]


VALUES = {
    "lists to the limit of recursion": nested(990),
    "lists, half as deep": nested(480),
    "objects to the limit of recursion": nested(900, '{"a":', "1}").replace(b"{1", b"1"),
    "an integer of 4,000 digits": b"9" * 4000,
    "an integer of 5,000 digits": b"9" * 5000,
    "a float beyond all": b"1e400",
    "minus a float beyond all": b"-1e400",
    "a float of 10,000 digits": b"0." + b"7" * 10_000,
    "an exponent of 20 digits": b"1e99999999999999999999",
    "NaN": b"NaN",
    "Infinity": b"-Infinity",
    "half a surrogate pair": b'"\\ud800"',
    "NUL in a text": b'"a\\u0000b"',
    "a text of a megabyte": b'"' + b"x" * 1_000_000 + b'"',
    "a text with line ends": b'"a\\nb\\r\\u2028 \\u001b[31m"',
    "a key of a megabyte": b'{"' + b"k" * 1_000_000 + b'": 1}',
    "a key that is half a surrogate pair": b'{"\\udfff": 1}',
    "a key with line ends": b'{"a\\nb": 1}',
    "a list of 100,000": b"[" + b"1," * 99_999 + b"1]",
    "true": b"true",
    "null": b"null",
    "a negative zero": b"-0.0",
    "an empty object": b"{}",
}


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", READERS)
def test_every_value_in_every_place(name: str, value: str, tmp_path: Path) -> None:
    path = file(name, tmp_path)
    for content in with_value(READERS[name].good or {"a": 1}, VALUES[value]):
        path.write_bytes(content)
        check(name, path)
    path.write_bytes(VALUES[value])
    said = check(name, path)
    assert (said is not None) is (name in SENTENCES), "by itself it is no document"


@pytest.mark.parametrize("name", SENTENCES)
def test_the_good_document_is_read(name: str, tmp_path: Path) -> None:
    path = file(name, tmp_path)
    path.write_text(json.dumps(READERS[name].good))
    assert READERS[name].read(path)


@pytest.mark.parametrize("name", SENTENCES)
def test_encodings_and_sizes(name: str, tmp_path: Path) -> None:
    good = json.dumps(READERS[name].good)
    path = file(name, tmp_path)
    for content in (
        b"",
        b"\0",
        bytes(5000),
        good.encode("utf-16"),
        good.encode("utf-16-be"),
        good.encode("utf-32"),
        b"\xef\xbb\xbf" + good.encode(),
        good.encode()[:-1] + b"\xff}",
        good.encode().replace(b"{", b'{"twice": 1, "twice": 2, ', 1),
        good.encode()[: len(good) // 2],
        nested(100_000),
        nested(100_000, '{"a":'),
        b'"' + b"\\ud83d" * 1000 + b'"',
        b" " * (17 << 20),
        b"{" + b" " * (17 << 20),
    ):
        path.write_bytes(content)
        assert check(name, path) is not None, content[:50]


@pytest.mark.parametrize("name", SENTENCES)
def test_what_is_no_file(name: str, tmp_path: Path) -> None:
    path = file(name, tmp_path)
    path.mkdir()
    assert check(name, path) is not None
    path.rmdir()
    path.symlink_to(path)
    assert check(name, path) is not None, "a link loop"
    path.unlink()
    for device in ("/dev/zero", "/dev/full", "/dev/null"):
        path.symlink_to(device)
        assert check(name, path) is not None, device
        path.unlink()
    with socket.socket(socket.AF_UNIX) as listening:
        here = os.getcwd()
        os.chdir(tmp_path)  # its path has a limit
        try:
            listening.bind(path.name)
        finally:
            os.chdir(here)
        assert check(name, path) is not None, "a socket"
        path.unlink()
    if "trace" not in name:  # which may be a pipe, and is waited for as cat would
        os.mkfifo(path)
        assert check(name, path) is not None, "a pipe that nobody writes to"
        path.unlink()
    if not READERS[name].beside:  # one that is not there is no header
        assert check(name, path) is not None
        for other in ("a" * 300, "a/" * 3000 + "b", "nul\0", "half\ud800", "line\nend\x1b[31m"):
            assert check(name, tmp_path / other) is not None


@pytest.mark.parametrize("name", SENTENCES)
def test_what_may_not_be_read(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is closed to everybody else
        Path(folder).chmod(0o755)
        path = file(name, Path(folder))
        path.write_text(json.dumps(READERS[name].good))
        assert check(name, path) is None
        path.chmod(0)
        root = os.geteuid() == 0  # who reads everything
        if root:
            os.seteuid(NOBODY)
        try:
            said = check(name, path)
        finally:
            if root:
                os.seteuid(0)
        assert said is not None
        assert "Permission denied" in said


# -- and contents that nobody has thought of -----------------------------------------------------------------

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**30, -(10**300), 2**64, 2**53 + 1])
    | st.floats()
    | st.text(max_size=20)
    | st.text(st.characters(categories=["Cs", "Cc", "Zl"]), max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=12,
)


@st.composite
def changed(draw: st.DrawFn, good: dict[str, Any]) -> Any:
    """A good document with a few values anywhere in it replaced, dropped or added."""
    whole = json.loads(json.dumps(good))
    for _ in range(draw(st.integers(0, 3))):
        at = whole
        while isinstance(at, dict) and at:
            key = draw(st.sampled_from([*at, "surprise"]))
            if isinstance(at.get(key), dict) and draw(st.booleans()):
                at = at[key]
                continue
            if draw(st.booleans()):
                at.pop(key, None)
            else:
                at[key] = draw(json_values)
            break
    return whole


@st.composite
def contents(draw: st.DrawFn, good: dict[str, Any]) -> bytes:
    """A changed document, encoded in some way, with some bytes changed after that."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=400))
    text = json.dumps(draw(changed(good)), ensure_ascii=draw(st.booleans()))
    encoding = draw(st.sampled_from(["utf-8"] * 8 + ["utf-8-sig", "utf-16", "latin-1"]))
    data = bytearray(text.encode(encoding, "surrogatepass" if encoding != "latin-1" else "replace"))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 3]))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 5))] = draw(st.binary(max_size=8))
    return bytes(data)


@pytest.mark.parametrize("name", SENTENCES)
@settings(max_examples=250, deadline=None, suppress_health_check=[*HealthCheck])
@given(data=st.data())
def test_anything(name: str, data: st.DataObject, tmp_path: Path) -> None:
    path = file(name, tmp_path)
    path.write_bytes(data.draw(contents(READERS[name].good)))
    check(name, path)


@settings(max_examples=150, deadline=None, suppress_health_check=[*HealthCheck])
@given(body=json_values | st.fixed_dictionaries({}, optional={"code": json_values, "trace": json_values}))
def test_a_part_of_a_sweep_whose_digest_is_right_and_nothing_else(body: Any, tmp_path: Path) -> None:
    text = json.dumps(body)
    path = tmp_path / "from-elsewhere.json"
    path.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
    part_of(path)


# -- the connector's settings: a dict, from JSON or from Python ----------------------------------------------


def configured(given: Any) -> None:
    try:
        config.parse(given)
    except ValueError as fault:
        sentence(fault, "")


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@settings(max_examples=400, deadline=None)
@given(given=changed(GOOD_CONFIG) | json_values)
def test_the_connectors_settings(given: Any) -> None:
    configured(given)


def test_settings_that_have_no_repr() -> None:
    for settings_given in (
        deep(100_000),
        {"mode": "off", "deadline_base_s": deep(100_000)},
        {"k" * 10**6: 1},
        {7: 1},
        {"\ud800\n": 1},
        {"record": {"\ud800\n" * 10**5: 1}},
        {"gate": "\ud800\n" * 1000 + "\0"},
        10**5000,
    ):
        with pytest.raises(ValueError, match="accepted") as raised:
            config.parse(settings_given)
        sentence(raised.value, "")


@pytest.mark.parametrize("key", GOOD_CONFIG)
def test_every_setting_with_a_value_that_does_not_print(key: str) -> None:
    for value in (
        deep(100_000),
        10**5000,
        -(10**5000),
        float("nan"),
        "\ud800\n",
        "y" * 10**6,
        {"a": deep(5000)},
    ):
        configured({**GOOD_CONFIG, key: value})
    configured({**GOOD_CONFIG, "record": {"path": deep(100_000)}})


# -- what a good file says is repeated too -------------------------------------------------------------------


def test_what_a_verdict_says_of_itself_is_bounded_where_it_is_logged(tmp_path: Path) -> None:
    import datetime

    from connector_patch import auto

    document = json.loads(json.dumps(GOOD_VERDICT))
    document.update(enable=False, reasons=["no\n2026 ERROR forged " * 400])
    document["scope"].update(model="m\x1b[31m" * 900)
    path = tmp_path / "v.json"
    now = datetime.datetime(2026, 12, 1, tzinfo=datetime.UTC)
    settings_of = config.parse({"gate": str(path)})
    for model in (document["scope"]["model"], "another"):
        path.write_text(json.dumps(document))
        said = auto.objection(settings_of, block_size=1, model=model, now=now)
        assert said is not None
        assert said.isprintable()
        assert len(said) < LONGEST + len(str(path))


def test_another_unit_is_quoted_in_bounds(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    document = json.loads(json.dumps(GOOD_CALIBRATION))
    document["figures"]["load_latency"]["unit"] = "s\n" * 4000
    path.write_text(json.dumps(document))
    assert check("calibration", path) is not None
