"""The verdict file: what is written is read, everything else is one sentence."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from singleflight.gate import verdict
from singleflight.gate.verdict import Verdict, VerdictError, misfit

from .conftest import DELETE, Changed

NOW = datetime.datetime(2026, 12, 1, 21, tzinfo=datetime.UTC)


def test_what_is_written_is_read(good: Verdict, tmp_path: Path) -> None:
    good.write(tmp_path / "v.json")
    assert verdict.read(tmp_path / "v.json") == good
    assert [path.name for path in tmp_path.iterdir()] == ["v.json"]


def test_a_failed_write_leaves_the_old_file(good: Verdict, tmp_path: Path) -> None:
    folder = tmp_path / "v.json"
    folder.mkdir()
    with pytest.raises(OSError, match="directory"):
        good.write(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["v.json"]


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        (
            "schema",
            "kv-singleflight/verdict/1",
            'schema: "kv-singleflight/verdict/1" is of another version; run `singleflight gate` again',
        ),
        ("schema", "kv-singleflight/calibration/2", 'give "kv-singleflight/verdict/2"'),
        ("schema", DELETE, 'give "kv-singleflight/verdict/2"'),
        ("enable", "yes", 'enable: "yes" is not accepted; give true or false'),
        ("enable", 1, "enable: 1 is not accepted; give true or false"),
        ("enable", DELETE, "enable: is missing; give true or false"),
        ("reasons", "one", 'reasons: "one" is not accepted; give a list, each a text'),
        ("reasons", ["a", 2], "reasons[1]: 2 is not accepted; give a text"),
        ("surprise", 1, "surprise: unknown key; accepted are made_at, enable"),
        ("scope.surprise", 1, "scope.surprise: unknown key"),
        ("scope.instances", 0, "scope.instances: 0 is not accepted; give a whole number"),
        ("scope.instances", True, "scope.instances: true is not accepted"),
        ("scope.instances", 2.5, "scope.instances: 2.5 is not accepted"),
        ("scope.model", 7, "scope.model: 7 is not accepted; give a text"),
        ("scope.steady_requests", 0, "scope.steady_requests: 0 is not accepted; give a whole number"),
        ("scope.traces", [{"name": "x"}], "scope.traces[0].sha256: is missing"),
        ("redundancy", 1.5, "redundancy: 1.5 is not accepted; give a number from 0"),
        ("ttft.stock", DELETE, "ttft.stock: is missing; give an object"),
        ("ttft.attach.mean_s", -1, "ttft.attach.mean_s: -1 is not accepted; give a number >= 0"),
        ("gain", 3, "gain: 3 is not accepted; give an object"),
        ("made_at", "yesterday", 'made_at: "yesterday" is not accepted; give a UTC time'),
        ("made_at", "2026-11-29T21:00:00", "give a UTC time"),
        ("figures.load_latency.origin", "guess", "give one of measured, given, default"),
        ("figures.load_latency.value", 10**400, "is not accepted; give a number"),
    ],
)
def test_a_bad_file_is_one_sentence(changed: Changed, key: str, value: Any, says: str) -> None:
    path = changed(key, value)
    with pytest.raises(VerdictError) as raised:
        verdict.read(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", ":1: Expecting value"),
        (b'{"schema"', ":1: Expecting"),
        (b"[]", "[] is not accepted; give one JSON object"),
        (b'{"enable": NaN}', "NaN is not accepted; give finite numbers"),
        (b'{"enable": 1, "enable": 2}', "enable: is there twice"),
        (b"\xff\xfe", "is not UTF-8"),
        pytest.param(b"[" * 100_000, "is nested too deeply", id="deep"),
        pytest.param(b" " * (2**24 + 1), "is larger than 16 MiB", id="large"),
        pytest.param(b'{"a": ' + b"9" * 5000 + b"}", "out of all range", id="digits"),
    ],
)
def test_what_is_no_json_object_is_one_sentence(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "v.json").write_bytes(content)
    with pytest.raises(VerdictError) as raised:
        verdict.read(tmp_path / "v.json")
    assert says in str(raised.value)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(VerdictError, match="No such file or directory; give a file that can be read"):
        verdict.read(tmp_path / "v.json")
    os.mkfifo(tmp_path / "pipe")
    for no_file in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(VerdictError, match="is not a regular file; give a JSON file"):
            verdict.read(no_file)
    with pytest.raises(VerdictError, match="not a possible file name"):
        verdict.read(tmp_path / "v\0.json")


class TestMisfit:
    def fits(self, of: Verdict, **changes: Any) -> str | None:
        return misfit(of, **{"block_size": 32, "model": "tiny", "now": NOW, "max_age_days": 7, **changes})

    def test_the_deployment_it_was_made_for(self, good: Verdict) -> None:
        assert self.fits(good) is None

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"block_size": 16}, "made for blocks of 32 tokens, this engine's have 16"),
            ({"model": "huge"}, "made for the model tiny, this engine serves huge"),
            ({"max_age_days": 1.5}, "2.0 days old, older than max_age_days 1.5"),
            ({"now": NOW - datetime.timedelta(days=4)}, "in the future"),
        ],
    )
    def test_another_one(self, good: Verdict, changes: dict[str, Any], says: str) -> None:
        assert says in (self.fits(good, **changes) or "")

    SNAPSHOT = "/cache/hub/models--org--tiny-1.1/snapshots/9f2c"

    @pytest.mark.parametrize(
        ("made_for", "serves"),
        [
            ("org/tiny-1.1", SNAPSHOT),
            (SNAPSHOT, "org/tiny-1.1"),
            (SNAPSHOT, "/elsewhere/models--org--tiny-1.1/snapshots/77aa/"),
        ],
    )
    def test_the_model_is_the_same_with_the_hub_offline(
        self, changed: Changed, made_for: str, serves: str
    ) -> None:
        """vLLM then has a folder for its name, another one for each revision and each machine."""
        of = verdict.read(changed("scope.model", made_for))
        assert self.fits(of, model=serves) is None

    def test_the_advice_for_another_model_names_it_as_people_do(self, good: Verdict) -> None:
        said = self.fits(good, model=self.SNAPSHOT)
        assert said == (
            "the verdict was made for the model tiny, this engine serves org/tiny-1.1; gate with --model"
            " org/tiny-1.1"
        )

    def test_a_folder_of_ones_own_is_another_model(self, good: Verdict) -> None:
        assert "serves /models/tiny; gate with --model /models/tiny" in (
            self.fits(good, model="/models/tiny") or ""
        )

    def test_a_verdict_for_no_stated_model_fits_none(self, changed: Changed) -> None:
        anonymous = verdict.read(changed("scope.model", None))
        assert "no stated model" in (self.fits(anonymous) or "")


def test_reading_one_needs_the_standard_library_alone() -> None:
    code = (
        "import sys; before = set(sys.modules); import singleflight.gate.verdict\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "['singleflight']"
