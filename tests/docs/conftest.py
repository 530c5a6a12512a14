"""The docs site, built once, and a browser for it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs" / "_ext"))


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with index.html, built as `make docs` does."""
    out = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [
            *(sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "-b", "html"),
            *("-d", str(out / "doctrees"), str(ROOT / "docs"), str(out / "html")),
        ],
        env={**os.environ, "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert built.returncode == 0, built.stderr
    return out / "html"


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path != "/favicon.ico":  # Chromium asks every host for one
            return super().do_GET()
        self.send_response(204)
        return self.end_headers()


@pytest.fixture(scope="session")
def served(site: Path) -> Iterator[str]:
    """The site's address on this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def chromium() -> Iterator[WebDriver]:
    """Debian's Chromium; the test is skipped where there is none, unless REQUIRE_CHROMIUM says otherwise."""
    import browser

    if says := browser.missing():
        if os.environ.get("REQUIRE_CHROMIUM"):
            pytest.fail(says)
        pytest.skip(says)
    with browser.chromium() as driver:
        yield driver
