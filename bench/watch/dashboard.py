"""docs/operate/grafana.json as a list of panels with expressions that Prometheus itself understands."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

OPERATE = Path(__file__).parents[2] / "docs" / "operate"
DASHBOARD = OPERATE / "grafana.json"
ALERTS = OPERATE / "alerts.yaml"


class Target(NamedTuple):
    """One expression of a panel, and how Grafana names its series, such as `{{event}}`."""

    expression: str
    legend: str

    def name(self, labels: dict[str, str]) -> str:
        return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), self.legend)


class Panel(NamedTuple):
    """Attributes: `row` and `title` as on the dashboard; `unit` as Grafana names it, "" for a table."""

    row: str
    title: str
    unit: str
    targets: list[Target]


def panels(rate_interval: str, path: Path = DASHBOARD) -> list[Panel]:
    """Every panel, in order, with Grafana's variables filled in: all models, all instances."""
    found, row = [], ""
    for panel in json.loads(path.read_text())["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
            continue
        targets = [
            Target(
                target["expr"]
                .replace("$__rate_interval", rate_interval)
                .replace("$model", ".*")
                .replace("$instance", ".*"),
                target["legendFormat"],
            )
            for target in panel["targets"]
        ]
        unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "")
        found.append(Panel(row, panel["title"], unit, targets))
    return found
