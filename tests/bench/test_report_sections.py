"""The report's page has one part for each store, whichever was measured last."""

from __future__ import annotations

from bench.ab import report
from bench.ab.results import Results

RUN = Results("python -m bench.ab", "Link: none.", "2026-01-01", {"cpu": "some"}, finished=True)


def test_a_second_run_takes_the_place_of_the_first_and_leaves_the_rest() -> None:
    page = report.page_of("<h1>Mooncake</h1>")
    first = report.with_section(page, report.section("LMCache, first", RUN))
    second = report.with_section(first, report.section("LMCache, second", RUN))
    assert "<h1>Mooncake</h1>" in second
    assert "LMCache, second" in second
    assert "LMCache, first" not in second
    assert second.count("</html>") == 1
    assert second.endswith("</html>\n")


def test_the_part_says_what_stands_between_engines_and_store() -> None:
    assert "<p>Link: none.</p>" in report.section("LMCache", RUN)
