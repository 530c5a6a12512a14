"""The docs site: what is made from code, and that it needs nothing from elsewhere."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

from connector_patch.config import BY_BLOCK, Config, Record
from singleflight.core.policy import Policy
from tests.docs.conftest import ROOT

DOCS = ROOT / "docs"
PAGES = [str(path.relative_to(DOCS).with_suffix("")) for path in sorted(DOCS.rglob("*.md"))]


def text_of(page: Path) -> str:
    return re.sub(r"<[^>]+>", "", page.read_text())


def test_every_page_is_built_without_a_warning(site: Path) -> None:
    assert [page for page in PAGES if not (site / f"{page}.html").exists()] == []


def test_every_page_is_reached_from_the_menu(site: Path) -> None:
    menu = (site / "index.html").read_text()
    assert [page for page in PAGES if page != "index" and f'href="{page}.html"' not in menu] == []


def test_no_page_fetches_anything_from_elsewhere(site: Path) -> None:
    fetched = re.compile(r"""<(?:script|img|iframe)[^>]+src="(?:https?:)?//|<link[^>]+href="(?:https?:)?//""")
    assert [path.name for path in site.rglob("*.html") if fetched.search(path.read_text())] == []
    styles = [path.read_text() for path in site.rglob("*.css")]
    assert not any(re.search(r"url\(\s*[\"']?(?:https?:)?//|@import", style) for style in styles)


def test_every_diagram_has_its_picture_and_no_picture_is_left_over() -> None:
    from diagrams import PICTURES, diagrams

    pictures = {path.name for path in (DOCS / PICTURES).iterdir()}
    assert pictures == set(diagrams(DOCS)), "draw them with `make diagrams`"


def test_the_settings_page_has_every_key_with_its_default(site: Path) -> None:
    from settings import settings

    keys = {field.name for field in fields(Config)} - {"policy"} | {field.name for field in fields(Policy)}
    keys |= {f"record.{field.name}" for field in fields(Record)}
    keys -= {BY_BLOCK}  # refused: it follows from deadline_per_token_s
    listed = settings()
    assert {each.key for each in listed} == keys
    page = text_of(site / "settings.html")
    for each in listed:
        assert each.accepts
        default = each.default or "none"
        assert re.search(rf"\b{re.escape(each.key)}\b.*?Default: {re.escape(default)}\.", page, re.DOTALL)


def test_the_table_of_keys_in_the_readme_is_what_the_code_takes() -> None:
    """`record`'s own keys are in its row; words beside a default, such as "(off)", are free."""
    from settings import settings

    readme = (ROOT / "README.md").read_text().partition("| key of `singleflight`")[2].partition("\n\n")[0]
    told: dict[str, str] = {}
    for row in re.findall(r"^\| (`.*?) \| *(.*?) *\|", readme, re.MULTILINE):
        names = re.findall(r"`(\w+)`", row[0])
        defaults = [re.sub(r" \(.*", "", each.strip()).strip("`") for each in row[1].split(",")]
        told |= dict(zip(names, defaults, strict=True))
    taken = {each.key: each.default for each in settings() if "." not in each.key}
    assert told == taken


def test_the_compatibility_page_has_every_row_reason_and_test(site: Path) -> None:
    from connector_patch.matrix import ROWS

    page = text_of(site / "compatibility.html")
    for row in ROWS:
        assert row.name.replace("`", "") in page
        assert row.reason.format("…").replace("`", "") in page
        assert [test for test in row.shown_by if test.rpartition("::")[2] not in page] == []


def test_the_compatibility_page_has_every_release_that_was_run(site: Path) -> None:
    from releases import FILES, RESULTS

    page = text_of(site / "compatibility.html")
    for path in (RESULTS / name for name in FILES):
        found = json.loads(path.read_text()) if path.exists() else {}
        rows = found.get("counts", found)
        assert [row for row in rows if row not in page] == []
