"""Debian's Prometheus on a free loopback port, with the alerts of docs/operate/, and its HTTP API."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from singleflight.stack import embedded

SCRAPE_S = 1


class Missing(RuntimeError):
    """Prometheus is not there, or does not answer as it should; one sentence."""


class Line(NamedTuple):
    """One series of an answer: its labels, and (seconds since the epoch, value) where it has a value."""

    labels: dict[str, str]
    points: list[tuple[float, float]]


def binary(name: str) -> str | None:
    """`prometheus` or `promtool`: beside this Python, where `.ci/prometheus` puts it, or on PATH."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


class Prometheus:
    """Attributes: `url`."""

    def __init__(self, url: str) -> None:
        self.url = url

    def _get(self, path: str, **parameters: str) -> Any:
        address = f"{self.url}{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(address, timeout=30) as answer:
                return json.loads(answer.read())["data"]
        except urllib.error.HTTPError as error:
            raise Missing(f"Prometheus refuses {parameters}: {error.read().decode()}") from None

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=2):
                return True
        except OSError:
            return False

    def now(self, expression: str) -> float | None:
        """The value of an expression that has one series; None if it has none."""
        found = self._get("/api/v1/query", query=expression)["result"]
        return float(found[0]["value"][1]) if found else None

    def between(self, expression: str, start: float, end: float) -> list[Line]:
        """Every series of an expression, a point for each scrape; times in seconds since the epoch."""
        asked = {"query": expression, "start": str(start), "end": str(end), "step": str(SCRAPE_S)}
        found = self._get("/api/v1/query_range", **asked)["result"]
        return [
            Line(series["metric"], [(float(at), float(value)) for at, value in series["values"]])
            for series in found
        ]

    def rules(self) -> list[dict[str, Any]]:
        """Every alerting rule, with `name`, `state`, `health` and `lastError`."""
        return [rule for group in self._get("/api/v1/rules")["groups"] for rule in group["rules"]]


@contextlib.contextmanager
def scraping(targets: Sequence[str], rules: Path, folder: Path) -> Iterator[Prometheus]:
    """A Prometheus that scrapes these `host:port` each second, its data in `folder`.

    Raises Missing, or EmbeddedError, where it cannot be started.
    """
    found = binary("prometheus")
    if found is None:
        raise Missing("prometheus is not installed; `.ci/prometheus .venv` unpacks Debian's into the venv")
    with socket.socket() as sock:
        sock.bind((embedded.LOOPBACK, 0))
        address = f"{embedded.LOOPBACK}:{sock.getsockname()[1]}"
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": [str(rules.resolve())],
        "scrape_configs": [{"job_name": "vllm", "static_configs": [{"targets": list(targets)}]}],
    }
    written = folder / "prometheus.yml"  # JSON is YAML
    written.write_text(json.dumps(config))
    log = folder / "prometheus.log"
    argv = [found, f"--config.file={written}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    argv += [f"--web.listen-address={address}", "--log.level=warn"]
    running = Prometheus(f"http://{address}")
    with embedded.spawned(argv, log=log) as process:
        embedded.wait_until(running.ready, process, "prometheus", log)
        yield running
