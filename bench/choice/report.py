"""One JSON file for each part that was measured, and what is said, tabled and drawn from all of them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.ab.results import rounded
from bench.ab.servers import STOCK, VARIANTS
from bench.choice import picture
from bench.choice.rates import Rates
from bench.choice.rounds import EQUAL, Measured
from bench.choice.workloads import PARTS, PREFIX, WIDE
from bench.page import replaced
from singleflight.stack.demo import replace_file

BEGIN, END = "<!-- bench.choice.report writes from here -->", "<!-- to here -->"
Document = dict[str, Any]


@dataclass
class Run:
    """One command. Attributes: rates, link: known once they are measured."""

    command: str
    environment: dict[str, str]
    link: str = ""
    rates: Rates | None = None
    minutes: float = 0.0
    workloads: dict[str, dict[str, Document]] = field(default_factory=dict)
    missing: dict[str, dict[str, str]] = field(default_factory=dict)

    def take(self, part: str, found: Measured) -> None:
        self.workloads.setdefault(part, {})[found.workload.name] = found.as_json()

    def left_out(self, part: str, name: str, reason: str) -> None:
        self.workloads.setdefault(part, {})
        self.missing.setdefault(part, {})[name] = reason

    def write(self, folder: Path) -> None:
        assert self.rates is not None
        for part, found in self.workloads.items():
            document = {
                "part": part,
                "command": self.command,
                "minutes": self.minutes,
                "link": self.link,
                "environment": self.environment,
                "rates": asdict(self.rates),
                "left_out": self.missing.get(part, {}),
                "workloads": list(found.values()),
            }
            text = json.dumps(rounded(document), separators=(",", ":"))
            # One line for each workload and arm: small, and still a diff that can be read.
            text = re.sub(r'(\{"name":|"\w+":\{"pairs":)', r"\n\1", text) + "\n"
            replace_file(folder / f"{part}.json", lambda scratch, text=text: scratch.write_text(text))


def read(folder: Path) -> list[Document]:
    """What is there, by part."""
    return [json.loads(path.read_text()) for part in PARTS if (path := folder / f"{part}.json").exists()]


def write(folder: Path, documents: Sequence[Document]) -> None:
    """The table and the picture."""
    tables = markdown(documents)
    replace_file(folder / "report.md", lambda scratch: scratch.write_text(tables))
    picture.draw(folder / "report.png", documents)


# -- what is asked ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """Of the arms that may compute: a figure's ratio to another's, or to the bound, and its limit."""

    part: str
    figure: str
    to: str
    most: float


ASKED = (
    Asked("unique", "mean_s", "to_bound", 1.25),
    Asked("unique", "last_s", "to_stock", 1.0),
    Asked("mixed", "mean_s", "to_bound", 1.25),
    Asked("mixed", "last_s", "to_stock", 1.0),
    Asked("mixed", "shared_mean_s", "to_attach", 1.0),
    Asked("decode", "gap_p99_s", "to_stock", 1.1),
    Asked("traces", "mean_s", "to_stock", 1.0),
    Asked("traces", "p99_s", "to_stock", 1.02),
)
COMPUTING = tuple(VARIANTS)


def verdict(low: float | None, high: float | None, most: float) -> str:
    """Of an interval: `met` if all of it is at most that, `missed` if none of it is."""
    if high is not None and high <= most:
        return "met"
    return "missed" if low is not None and low > most else "not settled"


def asked(documents: Sequence[Document]) -> Iterator[tuple[str, str, str]]:
    """(what, its figures, the verdict)."""
    for document in documents:
        for workload in document["workloads"]:
            for arm in (arm for arm in COMPUTING if arm in workload["arms"]):
                yield from _asked(document["part"], workload, arm)
            if workload["equal"]:
                yield from _equal(workload)


def _asked(part: str, workload: Document, arm: str) -> Iterator[tuple[str, str, str]]:
    found = workload["arms"][arm]
    for each in ASKED:
        if each.part != part:
            continue
        ratios = found.get(each.to) or {}
        ratio = ratios if each.to == "to_bound" else ratios.get(each.figure)
        if ratio:
            name = each.figure.removesuffix("_s").replace("_", " ")
            what = f"{workload['name']}: {arm}, {name} {each.to.replace('_', ' ')} at most {each.most:g}"
            yield what, _interval(ratio), verdict(ratio["low"], ratio["high"], each.most)
    if workload["link"] == WIDE:
        computed = sum(found["rounds"]["chose_compute"])
        yield (
            f"{workload['name']}: {arm} loads throughout",
            f"{computed:g} computed in {found['pairs']} rounds",
            "met" if computed == 0 else "missed",
        )


def _equal(workload: Document) -> Iterator[tuple[str, str, str]]:
    for arm, found in workload["arms"].items():
        if arm == STOCK:
            continue
        ratio = found["to_stock"]["mean_s"]
        low, high = _ends(ratio)
        shown = EQUAL[0] < low and high < EQUAL[1]
        differs = high < EQUAL[0] or low > EQUAL[1]
        says = "equal" if shown else "different" if differs else "not settled"
        what = f"{workload['name']}: {arm}, mean to stock within {EQUAL[0]:g} to {EQUAL[1]:g}"
        yield what, f"{_interval(ratio)}, {ratio['pairs']} pairs", says


def _ends(ratio: Document) -> tuple[float, float]:
    """JSON has no word for an infinite end."""
    low, high = ratio["low"], ratio["high"]
    return (-math.inf if low is None else low), (math.inf if high is None else high)


# -- how it is said --------------------------------------------------------------------------------------


def rates_line(rates: Rates) -> str:
    """One line, for the terminal."""
    links = ", ".join(
        f"{name}: {loads[PREFIX]:.3f} s" + (f" at {1000 * gbit_s / 8:.1f} MB/s" if gbit_s else "")
        for name, loads in rates.load_s.items()
        for gbit_s in [rates.gbit_s[name]]
    )
    return (
        f"one prefill of {PREFIX:,} tokens {rates.prefill_s[PREFIX]:.3f} s, a warm request"
        f" {rates.warm_s:.3f} s; one load over link {links}"
    )


def line(workload: Document) -> str:
    """One workload in one line, for the terminal."""
    arms = []
    for arm, found in workload["arms"].items():
        text = f"{arm} {found['medians']['mean_s']:.3f} s"
        if arm != STOCK:
            text += f" (x {_interval(found['to_stock']['mean_s'])})"
        if "to_bound" in found:
            text += f" [{found['to_bound']['value']:.2f} x bound]"
        arms.append(text)
    return f"{workload['name']}, {found['pairs']} pairs, mean TTFT: {', '.join(arms)}"


def text(documents: Sequence[Document]) -> str:
    """What is asked, and whether it is met; for the terminal."""
    lines = [f"{says:12} {what}: {figures}" for what, figures, says in asked(documents)]
    lines += [
        f"left out     {name}: {reason}"
        for document in documents
        for name, reason in document["left_out"].items()
    ]
    return "\n".join(lines)


def markdown(documents: Sequence[Document]) -> str:
    """Three tables: times, what was asked, and CPU time."""
    parts = [_rates_table(documents), _times_table(documents)]
    rows = [f"| {what} | {figures} | {_loud(says)} |" for what, figures, says in asked(documents)]
    if rows:
        parts.append("\n".join(["| asked | measured | |", "|---|---|---|", *rows]))
    parts.append(_cpu_table(documents))
    missing = [f"- Left out: {n} ({why})." for d in documents for n, why in d["left_out"].items()]
    return "\n\n".join([*parts, *(["\n".join(missing)] if missing else [])]) + "\n"


def _loud(says: str) -> str:
    return says if says in ("met", "equal") else f"**{says}**"


def _interval(ratio: Document) -> str:
    low, high = _ends(ratio)
    around = f" ({low:.2f} to {high:.2f})" if math.isfinite(low) and math.isfinite(high) else ""
    return f"{ratio['value']:.2f}{around}"


def _rates_table(documents: Sequence[Document]) -> str:
    """Every command has measured its own."""
    rows = []
    for document in documents:
        rates = document["rates"]
        prefill_s = rates["prefill_s"][str(PREFIX)]
        loads = ", ".join(
            f"{name}: {each[str(PREFIX)]:.3f} s" + (f" at {1000 * gbit_s / 8:.1f} MB/s" if gbit_s else "")
            for name, each in rates["load_s"].items()
            for gbit_s in [rates["gbit_s"][name]]
        )
        rows.append(f"| {document['part']} | {prefill_s:.3f} s | {rates['warm_s']:.3f} s | {loads} |")
    head = f"| part | prefill of {PREFIX:,} tokens | warm request | one load, by link |"
    return "\n".join([head, "|---|---|---|---|", *rows])


def _times_table(documents: Sequence[Document]) -> str:
    arms = _arms(documents)
    ours = [arm for arm in arms if arm != STOCK]
    head = ["workload", "stock, s: mean / last", *(f"{arm}: mean, last to stock" for arm in ours)]
    head += ["times the bound: " + " / ".join(arms), "computed"]
    rows = []
    for workload in _workloads(documents):
        found = workload["arms"]
        stock = found[STOCK]["medians"]
        cells = [workload["name"], f"{stock['mean_s']:.2f} / {stock['last_s']:.2f}"]
        for arm in ours:
            ratios = found.get(arm, {}).get("to_stock")
            cells.append(f"{_interval(ratios['mean_s'])}, {_interval(ratios['last_s'])}" if ratios else "")
        bounds = [f"{each['to_bound']['value']:.2f}" for each in found.values() if "to_bound" in each]
        computed = [
            f"{found[arm]['counts'].get('chose_compute', 0):g} of {workload['requests']}"
            for arm in COMPUTING
            if arm in found
        ]
        rows.append([*cells, " / ".join(bounds), ", ".join(computed)])
    return _table(head, rows)


def _cpu_table(documents: Sequence[Document]) -> str:
    """Microseconds of CPU time of the scheduler's thread."""
    arms = _arms(documents)
    head = ["CPU time, us, " + " / ".join(arms), "a request's steps", "an idle step", "a lookup"]
    rows = []
    for workload in _workloads(documents):
        medians = [each["medians"] for each in workload["arms"].values()]
        figures = ("cpu_request_us", "cpu_idle_step_us", "cpu_lookup_us")
        rows.append([workload["name"], *(" / ".join(f"{m[name]:.0f}" for m in medians) for name in figures)])
    return _table(head, rows)


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def _workloads(documents: Sequence[Document]) -> list[Document]:
    return [workload for document in documents for workload in document["workloads"]]


def _arms(documents: Sequence[Document]) -> list[str]:
    return list(dict.fromkeys(arm for workload in _workloads(documents) for arm in workload["arms"]))


def main() -> None:
    """Put the tables of a folder's results on a page."""
    import argparse

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path, help="of results")
    parser.add_argument("--page", type=Path, default=Path("docs/benchmarks.md"))
    args = parser.parse_args()
    documents = read(args.folder)
    if not documents:
        parser.error(
            f"{args.folder}: has no results; give a folder that `python -m bench.choice` has written"
        )
    write(args.folder, documents)
    text = replaced(args.page.read_text(), BEGIN, END, markdown(documents))
    replace_file(args.page, lambda scratch: scratch.write_text(text))


if __name__ == "__main__":
    main()
