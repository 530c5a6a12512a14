"""A release of vLLM as it was published: its sdist from the package index, checked and unpacked."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import shutil
import tarfile
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from singleflight.files.atomic import replaced

CACHE = Path(__file__).parents[2] / ".venvs"
INDEX = "https://pypi.org/simple"
"""Where PIP_INDEX_URL does not say otherwise."""


class UnavailableError(Exception):
    """A release cannot be had; one sentence."""


@dataclass(frozen=True)
class Sdist:
    """One release's source archive, on the index."""

    version: Version
    url: str
    sha256: str

    def fetched(self) -> Path:
        """The archive in the cache, downloaded if it is not there. UnavailableError if it cannot be, or is
        not what the index says."""
        path = CACHE / "sdists" / f"vllm-{self.version}.tar.gz"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            body = _read(self.url)
            if hashlib.sha256(body).hexdigest() != self.sha256:
                raise UnavailableError(f"{self.url}: the download has another SHA-256 than the index says")
            with replaced(path) as file:
                file.write(body)
        return path

    def unpacked(self, *folders: str, to: Path) -> None:
        """These folders and files of the archive, complete or not there at all."""
        if to.exists():
            return
        part = to.with_name(f".{to.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        root = f"vllm-{self.version}"
        with tarfile.open(self.fetched()) as archive:
            wanted = tuple(f"{root}/{folder}" for folder in folders)
            members = [m for m in archive if m.name in wanted or m.name.startswith(_below(wanted))]
            archive.extractall(part, members, filter="data")
        to.parent.mkdir(parents=True, exist_ok=True)
        (part / root).rename(to)
        part.rmdir()


def _below(folders: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{folder}/" for folder in folders)


def releases() -> list[Sdist]:
    """Every final release that has an sdist, oldest first. UnavailableError if the index does not answer."""
    index = os.environ.get("PIP_INDEX_URL", INDEX).rstrip("/")
    found = []
    for file in json.loads(_read(f"{index}/vllm/", "application/vnd.pypi.simple.v1+json"))["files"]:
        name = file["filename"]
        if name.startswith("vllm-") and name.endswith(".tar.gz"):
            version = _version(name[len("vllm-") : -len(".tar.gz")])
            if version is not None and not version.is_prerelease:
                found.append(Sdist(version, file["url"], file["hashes"]["sha256"]))
    return sorted(found, key=lambda sdist: sdist.version)


def newest(of: str, among: list[Sdist]) -> Sdist:
    """The newest release that begins with `of`: 0.31 is the last 0.31.x. UnavailableError if none does."""
    found = [s for s in among if f"{s.version}.".startswith(f"{of}.")]
    if not found:
        there = ", ".join(dict.fromkeys(f"{s.version.major}.{s.version.minor}" for s in among[-30:]))
        raise UnavailableError(f"vLLM {of}: no such release has an sdist; there are, among others, {there}")
    return found[-1]


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


def _read(url: str, accept: str = "*/*") -> bytes:
    try:
        request = urllib.request.Request(url, headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=180) as answer:
            body: Any = answer.read()
            return bytes(body)
    except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
        raise UnavailableError(f"{url}: cannot be read ({getattr(error, 'reason', error)})") from None
