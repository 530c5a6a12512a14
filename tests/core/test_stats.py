"""Counters as a dashboard or a log reads them."""

import json
from dataclasses import fields

from singleflight.core.stats import Outcome, Reason, Stats


class TestEnums:
    def test_reasons_are_exactly_those_that_the_documentation_lists(self):
        assert {reason.value for reason in Reason} == {
            "leader_failed",
            "deadline",
            "evicted",
            "reset",
            "unsupported",
            "capacity",
        }

    def test_outcomes_are_exactly_three(self):
        assert {outcome.value for outcome in Outcome} == {"ready", "fell_back", "cancelled"}


class TestSnapshot:
    def test_of_a_fresh_server_is_all_zero_and_names_every_counter(self):
        snapshot = Stats().snapshot()
        assert set(snapshot) == {field.name for field in fields(Stats)}
        assert snapshot.pop("fan_in") == {}
        assert snapshot.pop("fell_back") == {reason.value: 0 for reason in Reason}
        assert set(snapshot.values()) == {0}

    def test_survives_json_unchanged(self):
        stats = Stats(flights=3, ready=2)
        stats.fell_back[Reason.DEADLINE] += 2
        stats.fan_in[4] += 1
        snapshot = stats.snapshot()
        assert json.loads(json.dumps(snapshot)) == snapshot
        assert snapshot["flights"] == 3
        assert snapshot["fell_back"]["deadline"] == 2
        assert snapshot["fan_in"] == {"4": 1}

    def test_lists_fan_in_by_size_not_by_spelling(self):
        stats = Stats()
        for members in (10, 2, 1):
            stats.fan_in[members] += 1
        assert list(stats.snapshot()["fan_in"]) == ["1", "2", "10"]

    def test_is_a_copy_that_later_events_do_not_touch(self):
        stats = Stats()
        snapshot = stats.snapshot()
        stats.landed += 1
        stats.fell_back[Reason.RESET] += 1
        stats.fan_in[1] += 1
        assert (snapshot["landed"], snapshot["fell_back"]["reset"], snapshot["fan_in"]) == (0, 0, {})

    def test_asking_changes_nothing(self):
        stats = Stats()
        stats.snapshot()
        assert stats == Stats()
        assert not stats.fell_back
