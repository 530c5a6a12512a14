"""`singleflight report`: one page, complete in itself, that says what `gate` says."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from singleflight.gate import decide, page, verdict

from .conftest import BLOCK, Write, call

WARM = ("--store", "warm", "--block-size", BLOCK)


def text_of(path: Path) -> str:
    body = path.read_text().partition("<body>")[2]
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def test_the_page_says_what_the_gate_says(bursty: Path, slow: Path, tmp_path: Path) -> None:
    asked = (bursty, "--calibration", slow, *WARM, "--model", "tiny")
    assert call("gate", *asked, "--out", tmp_path / "v.json").exit_code == 0
    done = call("report", *asked, "--out", tmp_path / "r.html")
    assert done.exit_code == 0, done.stderr
    found, text = verdict.read(tmp_path / "v.json"), text_of(tmp_path / "r.html")
    assert "Yes. Switch it on." in text
    for sentence in (*found.reasons, *found.flips):
        assert sentence in text
    assert found.scope.traces[0].sha256 in text
    for name, figure in found.figures.items():
        row = re.search(rf"{name.replace('_', ' ')} ([\d.,e+-]+) (\S+) (assumed|given|measured)", text)
        assert row, name
        assert float(row[1].replace(",", "")) == pytest.approx(figure.value, rel=1e-5)
        assert row[2] == figure.unit
    assert "latency doubled, bandwidth halved, asynchronous lookups, time ties spread +" in text
    assert done.stdout.startswith("yes: Mean TTFT is predicted at ")


def test_a_no_is_a_no(bursty: Path, fast: Path, tmp_path: Path) -> None:
    """And the page needs nothing beside it."""
    out = tmp_path / "out" / "r.html"
    out.parent.mkdir()
    assert call("report", bursty, "--calibration", fast, *WARM, "--out", out).exit_code == 0
    assert "No. Leave it off." in text_of(out)
    assert [path.name for path in out.parent.iterdir()] == ["r.html"]
    text = out.read_text()
    (source,) = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert source.startswith("data:image/png;base64,iVBOR")
    assert "http" not in re.sub(r'"data:[^"]*"', "", text)


def test_a_name_cannot_put_markup_into_the_page(bursty: Path, tmp_path: Path) -> None:
    trace = tmp_path / "<script>alert(1)<.jsonl"
    trace.write_bytes(bursty.read_bytes())
    asked = (trace, "--block-size", BLOCK, "--model", "<img src=x onerror=alert(2)>")
    assert call("report", *asked, "--out", tmp_path / "r.html").exit_code == 0
    text = (tmp_path / "r.html").read_text()
    assert "<script" not in text
    assert "<img src=x" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_an_interrupted_report_leaves_nothing(
    bursty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for module, name in ((decide, "simulate"), (page, "_data_uri")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, interrupted)
            done = call("report", bursty, "--block-size", BLOCK, "--out", tmp_path / "r.html")
        assert (done.exit_code, done.stderr.splitlines()[-1]) == (130, "interrupted; nothing was written")
        assert list(tmp_path.iterdir()) == []


def test_a_report_that_is_there_stays_until_the_new_one_is_complete(
    bursty: Path, write: Write, tmp_path: Path
) -> None:
    out = tmp_path / "r.html"
    out.write_text("the old one")
    assert call("report", bursty, *WARM, "--scale", 0, "--out", out).exit_code == 2
    assert call("report", write([(0, [1])]), *WARM, "--out", out).exit_code == 2
    assert out.read_text() == "the old one"
    result = call("report", bursty, "--block-size", BLOCK, "--out", tmp_path / "no" / "r.html")
    assert result.exit_code == 1
    assert "No such file or directory" in result.stderr


def test_traffic_in_which_nothing_is_loaded(write: Write, tmp_path: Path) -> None:
    trace = write([(1000 * i, [1]) for i in range(120)])
    done = call("report", trace, "--block-size", BLOCK, "--out", tmp_path / "r.html")
    assert done.exit_code == 0, done.output
    assert "Nothing is loaded" in text_of(tmp_path / "r.html")
