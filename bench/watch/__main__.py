"""`python -m bench.watch`: a real Prometheus scrapes two real servers under load; every panel must have data.

Starts the embedded stack, a server in attach mode (with a verdict) and one in shadow mode, and Prometheus;
sends bursts; evaluates every expression of docs/operate/grafana.json; prints a table; draws the panels. Exit
code 1 if a panel has no data, if a rule of docs/operate/alerts.yaml does not evaluate, or if one fires though
nothing is wrong. Everything it started has ended by then.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.ab import limited, servers
from bench.watch import load, picture
from bench.watch.dashboard import ALERTS, OPERATE, Panel, panels
from bench.watch.prometheus import Line, Missing, Prometheus, scraping
from singleflight.stack.embedded import EmbeddedError, Stack
from singleflight.stack.tiny_model import ModelError

RATE_INTERVAL = "10s"
LATENCY_S = 0.2
"""Of a Get: so long, the requests of a burst can come."""
SCRAPED_S = 30.0
"""How long Prometheus may take to have seen what the servers say."""
ARMS = ("attach", "shadow")

console = Console()
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def settled(prometheus: Prometheus, attach: servers.Server) -> None:
    """Wait until the last burst has been scraped. Missing if it never is."""
    limit, expected = time.monotonic() + SCRAPED_S, attach.counters()["attached"]
    asked = 'sum(vllm:singleflight_requests_total{event="attached"})'
    while prometheus.now(asked) != expected:
        if time.monotonic() > limit:
            raise Missing(f"Prometheus has not scraped {attach.url}/metrics in {SCRAPED_S:.0f} s")
        time.sleep(0.2)


def ask(
    prometheus: Prometheus, shown: list[Panel], start: float, end: float
) -> tuple[dict[str, list[tuple[str, Line]]], list[str]]:
    """What each panel shows, and the panels of which an expression has no value at any time."""
    answers: dict[str, list[tuple[str, Line]]] = {}
    empty: list[str] = []
    table = Table("panel", "expression of", "series", "highest", title="docs/operate/grafana.json")
    for panel in shown:
        answers[panel.title] = []
        for target in panel.targets:
            lines = []
            for labels, points in prometheus.between(target.expression, start, end):
                finite = [(at, value) for at, value in points if math.isfinite(value)]
                if finite:
                    lines.append((target.name(labels), Line(labels, finite)))
            answers[panel.title] += lines
            highest = max((value for _, line in lines for _, value in line.points), default=math.nan)
            table.add_row(panel.title, target.legend, str(len(lines)), f"{highest:.4g}")
            if not lines:
                empty.append(f"{panel.title}: {target.expression}")
    console.print(table)
    return answers, empty


def unwell(prometheus: Prometheus) -> list[str]:
    """Rules that do not evaluate, and alerts that fire though nothing is wrong; `info` may."""
    return [
        f"{rule['name']}: {rule.get('lastError') or rule['state']}"
        for rule in prometheus.rules()
        if rule["health"] != "ok" or (rule["state"] == "firing" and rule["labels"]["severity"] != "info")
    ]


@app.command()
def main(
    seconds: Annotated[float, typer.Option(min=5, help="How long the load runs.")] = 40.0,
    out: Annotated[Path, typer.Option(help="The picture.")] = OPERATE.parent / "img" / "watch.png",
) -> None:
    """Check the dashboard and the alerts against a real Prometheus and real servers under load."""
    signal.signal(signal.SIGTERM, lambda *what: sys.exit(1))  # so that everything is taken down
    try:
        with Stack() as stack:
            limited.write(stack.folder, None, LATENCY_S)
            verdict = stack.folder / "verdict.json"
            load.write_verdict(verdict, stack.model)
            setup = servers.Setup(limited=True, gate=str(verdict))
            console.print("Starting a server in attach mode and one in shadow mode; a minute or two.")
            with servers.serving(stack, ARMS, setup) as running:
                chosen = [running[arm] for arm in ARMS]
                targets = [server.url.removeprefix("http://") for server in chosen]
                with scraping(targets, ALERTS, stack.folder) as prometheus:
                    start = time.time()
                    bursts = load.drive(chosen, seconds)
                    settled(prometheus, chosen[0])
                    console.print(f"{bursts} bursts to each server.")
                    shown = panels(RATE_INTERVAL)
                    answers, empty = ask(prometheus, shown, start, time.time())
                    wrong = unwell(prometheus)
    except (EmbeddedError, Missing, ModelError, TimeoutError, OSError) as error:
        console.print(f"watch: {error}", style="red", highlight=False)
        raise typer.Exit(1) from None
    picture.draw(out, shown, answers, start)
    console.print(f"Picture: {out}")
    for sentence in [*(f"no data: {panel}" for panel in empty), *(f"alert: {alert}" for alert in wrong)]:
        console.print(sentence, style="red", highlight=False, markup=False)
    if empty or wrong:
        raise typer.Exit(1)
    console.print("Every panel has data; every rule evaluates, and none fires.")


if __name__ == "__main__":
    app()
