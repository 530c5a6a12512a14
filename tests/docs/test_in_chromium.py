"""The site as a reader has it: pages open, pictures load, search finds. `make docs-check` has a browser."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from singleflight.cli.main import app
from tests.docs.test_site import PAGES

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver

PICTURES_WITHOUT_PIXELS = """
return [...document.images].filter(each => !each.complete || !each.naturalWidth).map(each => each.src)
"""
SIDEWAYS = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"


def keep(chromium: WebDriver, name: str) -> None:
    """A screenshot, for who wants to look (DOCS_SCREENSHOTS)."""
    if folder := os.environ.get("DOCS_SCREENSHOTS"):
        path = Path(folder) / f"{name.replace('/', '-')}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        chromium.save_screenshot(str(path))


@pytest.mark.parametrize("page", PAGES)
def test_the_page_opens_with_all_its_pictures_and_no_error(
    chromium: WebDriver, served: str, page: str
) -> None:
    chromium.get_log("browser")  # empties it
    chromium.get(f"{served}/{page}.html")
    keep(chromium, page)
    assert chromium.find_element("css selector", "h1").text
    assert chromium.execute_script(PICTURES_WITHOUT_PIXELS) == []
    assert chromium.execute_script(SIDEWAYS) <= 0
    assert [entry["message"] for entry in chromium.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_search_finds_the_deadline(chromium: WebDriver, served: str) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    chromium.get(f"{served}/index.html")
    box = chromium.find_element("css selector", "input[name=q]")
    box.send_keys("deadline")
    box.submit()

    def found(driver: WebDriver) -> set[str] | None:
        if "Search finished" not in driver.find_element("id", "search-results").text:
            return None
        links = driver.find_elements("css selector", "#search-results li a")
        return {(link.get_attribute("href") or "").partition("?")[0].rpartition("/")[2] for link in links}

    pages = WebDriverWait(chromium, 30, ignored_exceptions=(Exception,)).until(found)
    keep(chromium, "search")
    assert {"settings.html", "failure-modes.html", "aio.html"} <= {page.partition("#")[0] for page in pages}


def test_pages_open_without_a_server(chromium: WebDriver, site: Path) -> None:
    chromium.get((site / "index.html").as_uri())
    assert chromium.execute_script(PICTURES_WITHOUT_PIXELS) == []
    chromium.find_element("link text", "Settings").click()
    assert "deadline_base_s" in chromium.find_element("css selector", "article").text


@pytest.mark.parametrize("width", [1000, 420])
def test_a_report_opens_with_its_pictures_on_a_desk_and_on_a_telephone(
    chromium: WebDriver, tmp_path: Path, width: int
) -> None:
    trace, page = tmp_path / "agents.jsonl", tmp_path / "report.html"
    for command in (
        ["trace", "synth", str(trace), "--pattern", "agents", "--requests", "300"],
        ["report", str(trace), "--window-ms", "500", "--out", str(page)],
    ):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    chromium.get_log("browser")  # empties it
    before = chromium.get_window_size()
    chromium.set_window_size(width, 1000)
    try:
        chromium.get(page.as_uri())
        keep(chromium, f"report-{width}")
        assert chromium.find_element("css selector", "h1").text
        assert len(chromium.find_elements("css selector", "img")) == 2
        assert chromium.execute_script(PICTURES_WITHOUT_PIXELS) == []
        assert chromium.execute_script(SIDEWAYS) <= 0
        assert chromium.get_log("browser") == []
    finally:
        chromium.set_window_size(before["width"], before["height"])
