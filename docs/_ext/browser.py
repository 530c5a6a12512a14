"""Debian's Chromium without a window, driven by selenium, with nothing that looks for a network."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver

FLAGS = (
    "--headless",
    "--no-sandbox",  # root, as in CI, cannot have one; only our own pages are opened
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",  # a page that needs the network fails here
    "--window-size=1400,1000",
)


def missing() -> str | None:
    """What is not installed, as a sentence; None if nothing."""
    if all(map(shutil.which, ("chromium", "chromedriver"))):
        return None
    return "Chromium is not installed; on Debian: apt-get install chromium chromium-driver"


@contextmanager
def chromium() -> Iterator[WebDriver]:
    """A running browser; ended, and its profile removed, on leaving."""
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = Chrome(options=options, service=ChromeService(shutil.which("chromedriver")))
        try:
            driver.set_page_load_timeout(60)
            yield driver
        finally:
            driver.quit()
