"""`kv_connector_extra_config.singleflight`: what is wrong, where, and what is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from connector_patch import config
from singleflight.core.policy import Policy


def test_without_configuration_the_verdict_decides() -> None:
    parsed = config.parse(None)
    assert parsed == config.parse({}) == config.Config()
    assert parsed.mode is config.Mode.AUTO
    assert parsed.gate is None
    assert parsed.record is None


def test_every_key_can_be_given() -> None:
    given = {
        "mode": "attach",
        "gate": "verdict.json",
        "max_age_days": 7,
        "record": {"path": "trace.jsonl", "max_mb": 0.5},
        "on_deadline": "load",
        "load_or_compute": "on",
        "deadline_base_s": 1,
        "max_blocks": 7,
    }
    assert config.parse(given) == config.Config(
        mode=config.Mode.ATTACH,
        gate=Path("verdict.json"),
        max_age_days=7.0,
        record=config.Record(Path("trace.jsonl"), 0.5),
        on_deadline=config.OnDeadline.LOAD,
        load_or_compute=config.LoadOrCompute.ON,
        policy=Policy(deadline_base_s=1, max_blocks=7),
    )


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"mode": "atach"},
            "kv_connector_extra_config.singleflight.mode: 'atach' is not accepted;"
            " give one of auto, off, attach, park, shadow",
        ),
        (
            {"mdoe": "attach"},
            "kv_connector_extra_config.singleflight.mdoe: unknown key; accepted are mode, gate, max_age_days,"
            " record, on_deadline, load_or_compute, deadline_per_token_s, deadline_base_s,"
            " deadline_learned_factor, max_handovers, max_blocks, join_patience, compute_patience,"
            " compute_decode_share, broken_ttl_s, breaker_failures, breaker_pause_s",
        ),
        (
            {"deadline_per_block_s": 0.05},
            "kv_connector_extra_config.singleflight.deadline_per_block_s: is not accepted, since the larger"
            " blocks are, the fewer a load has; give deadline_per_token_s (the seconds of a block, divided by"
            " its tokens)",
        ),
        (
            {"deadline_per_token_s": -1},
            "kv_connector_extra_config.singleflight.deadline_per_token_s: -1 is not accepted;"
            " give a number of seconds >= 0",
        ),
        (
            {"mode": "attach", "deadline_base_s": "10"},
            "kv_connector_extra_config.singleflight.deadline_base_s: '10' is not accepted;"
            " give a number of seconds > 0",
        ),
        (
            {"max_handovers": True},
            "kv_connector_extra_config.singleflight.max_handovers: True is not accepted;"
            " give a whole number >= 0",
        ),
        (
            {"gate": 5},
            "kv_connector_extra_config.singleflight.gate: 5 is not accepted;"
            " give the path of a verdict file, as `singleflight gate` writes it",
        ),
        (
            {"max_age_days": 0},
            "kv_connector_extra_config.singleflight.max_age_days: 0 is not accepted; give a number > 0",
        ),
        (
            {"record": "trace.jsonl"},
            "kv_connector_extra_config.singleflight.record: 'trace.jsonl' is not accepted;"
            ' give an object such as {"path": "trace.jsonl"}',
        ),
        (
            {"record": {"max_mb": 1}},
            "kv_connector_extra_config.singleflight.record.path: is missing; accepted is the path of a file",
        ),
        (
            {"record": {"path": "trace.jsonl", "max_mb": float("nan")}},
            "kv_connector_extra_config.singleflight.record.max_mb: nan is not accepted; give a number > 0",
        ),
        (
            {"record": {"file": "trace.jsonl"}},
            "kv_connector_extra_config.singleflight.record.file: unknown key; accepted are path, max_mb",
        ),
        (
            "attach",
            "kv_connector_extra_config.singleflight: 'attach' is not accepted;"
            ' give an object such as {"mode": "attach"}',
        ),
        (
            {"mode": ["attach"]},
            "kv_connector_extra_config.singleflight.mode: ['attach'] is not accepted;"
            " give one of auto, off, attach, park, shadow",
        ),
    ],
)
def test_bad_configuration_is_one_sentence(given: object, sentence: str) -> None:
    with pytest.raises(ValueError, match="accepted") as error:
        config.parse(given)
    assert str(error.value) == sentence
