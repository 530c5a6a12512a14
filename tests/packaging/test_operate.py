"""docs/operate/: what it says of metrics is what the code has, and Prometheus takes the rules."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.watch.dashboard import ALERTS, DASHBOARD, OPERATE, panels
from bench.watch.prometheus import binary
from connector_patch.catalogue import INFO, INFO_LABELS, METRICS, PREDICTED, Kind, table

OURS = {
    **{metric.name + ("_total" if metric.kind is Kind.COUNTER else ""): metric for metric in METRICS},
    INFO: None,
    PREDICTED: None,
}


def readme() -> str:
    return (OPERATE / "README.md").read_text()


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def expressions() -> list[str]:
    return [target.expression for panel in panels("5m") for target in panel.targets] + [
        rule["expr"] for rule in rules()
    ]


def metric_of(name: str) -> Any:
    """The metric that a series belongs to; KeyError if there is none."""
    return OURS[name] if name in OURS else OURS[re.sub(r"_(bucket|sum|count)$", "", name)]


def test_the_table_of_metrics_is_the_catalogue() -> None:
    """If it is not: paste what `catalogue.table()` returns."""
    assert f"\n{table()}\n<!-- end -->" in readme()


class TestTheExpressions:
    def test_they_name_metrics_that_there_are_with_values_that_there_are(self) -> None:
        """A label's value that nothing has would be an empty panel, or an alert that never fires."""
        selector = re.compile(r"(vllm:singleflight_\w+)(?:\{([^}]*)\})?")
        selectors = [found for text in expressions() for found in selector.findall(text)]
        assert len(selectors) > 40
        for name, inside in selectors:
            metric = metric_of(name)
            for label, operator, value in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', inside):
                if label in ("model_name", "instance"):
                    continue
                if metric is None:
                    assert label in INFO_LABELS
                    continue
                assert label == metric.label
                known = [v for v in metric.figures.values() if re.fullmatch(value, v)]
                assert known, f"{name}{{{label}{operator}{value!r}}} matches nothing"

    def test_every_metric_is_on_the_dashboard(self) -> None:
        shown = {name for text in expressions() for name in re.findall(r"vllm:singleflight_\w+", text)}
        shown |= {re.sub(r"_bucket$", "", name) for name in shown}
        assert OURS.keys() <= shown


class TestTheDashboard:
    def test_panels_have_ids_of_their_own_and_do_not_lie_on_each_other(self) -> None:
        shown = json.loads(DASHBOARD.read_text())["panels"]
        assert max(Counter(panel["id"] for panel in shown).values()) == 1
        for one, other in combinations((panel["gridPos"] for panel in shown), 2):
            apart = (
                one["x"] + one["w"] <= other["x"]
                or other["x"] + other["w"] <= one["x"]
                or one["y"] + one["h"] <= other["y"]
                or other["y"] + other["h"] <= one["y"]
            )
            assert apart

    def test_titles_are_told_apart(self) -> None:
        titles = [panel.title for panel in panels("5m")]
        assert len(titles) == len(set(titles)) > 15

    def test_no_variable_is_left_when_it_is_asked_outside_grafana(self) -> None:
        left = ("$__", "$model", "$instance")
        assert not [text for text in expressions() if any(variable in text for variable in left)]


class TestTheRunbook:
    def test_every_alert_has_its_line_and_every_line_its_alert(self) -> None:
        lines = re.findall(r"^\| (SingleFlight\w+) \|(.*)\|$", readme(), re.MULTILINE)
        assert [name for name, _ in lines] == [rule["alert"] for rule in rules()]
        for _, cells in lines:
            assert all(cell.strip() for cell in cells.split("|"))
            assert cells.count("|") == 2, "means, look at, switch"

    def test_panels_that_it_names_are_on_the_dashboard(self) -> None:
        named = set(re.findall(r"\*([A-Z][^*|]+)\*", readme().partition("## Runbook")[2]))
        assert named
        titles = {panel.title for panel in panels("5m")}
        assert [name for name in named if not any(title.startswith(name) for title in titles)] == []

    def test_every_alert_is_tested_where_it_fires_and_where_it_does_not(self) -> None:
        tests = yaml.safe_load((OPERATE / "alerts_test.yaml").read_text())["tests"]
        cases = [case for test in tests for case in test["alert_rule_test"]]
        told = {(case["alertname"], bool(case["exp_alerts"])) for case in cases}
        assert told == {(rule["alert"], fires) for rule in rules() for fires in (True, False)}


class TestPromtool:
    @pytest.fixture
    def promtool(self) -> str:
        found = binary("promtool")
        if found is None:
            pytest.skip("promtool is missing; `.ci/prometheus .venv` unpacks Debian's into the venv")
        return found

    @pytest.mark.parametrize("what", ["check rules alerts.yaml", "test rules alerts_test.yaml"])
    def test_takes_the_rules(self, promtool: str, what: str) -> None:
        run = subprocess.run([promtool, *what.split()], cwd=OPERATE, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr

    def test_takes_every_expression_of_the_dashboard(self, promtool: str, tmp_path: Path) -> None:
        """As recording rules, which promtool parses."""
        records = [{"record": f"r{i}", "expr": text} for i, text in enumerate(expressions())]
        (tmp_path / "rules.yaml").write_text(json.dumps({"groups": [{"name": "all", "rules": records}]}))
        run = subprocess.run(
            [promtool, "check", "rules", "rules.yaml"], cwd=tmp_path, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stdout + run.stderr
