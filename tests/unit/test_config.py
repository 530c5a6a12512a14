"""`kv_connector_extra_config.singleflight`: what is wrong, where, and what is accepted."""

from __future__ import annotations

import pytest

from connector_patch import config
from singleflight.policy import Policy


def test_without_configuration_it_is_off() -> None:
    assert (
        config.parse(None)
        == config.parse({})
        == config.Config(config.Mode.OFF, config.OnDeadline.RECOMPUTE, Policy())
    )


def test_every_policy_field_can_be_given() -> None:
    parsed = config.parse({"mode": "attach", "on_deadline": "load", "deadline_base_s": 1, "max_blocks": 7})
    policy = Policy(deadline_base_s=1, max_blocks=7)
    assert parsed == config.Config(config.Mode.ATTACH, config.OnDeadline.LOAD, policy)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"mode": "atach"},
            "kv_connector_extra_config.singleflight.mode: 'atach' is not accepted;"
            " give one of off, attach, park",
        ),
        (
            {"mdoe": "attach"},
            "kv_connector_extra_config.singleflight.mdoe: unknown key; accepted are mode, on_deadline,"
            " deadline_base_s, deadline_per_block_s, deadline_learned_factor, max_handovers, max_blocks,"
            " join_patience",
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
            "attach",
            "kv_connector_extra_config.singleflight: 'attach' is not accepted;"
            ' give an object such as {"mode": "attach"}',
        ),
        (
            {"mode": ["attach"]},
            "kv_connector_extra_config.singleflight.mode: ['attach'] is not accepted;"
            " give one of off, attach, park",
        ),
    ],
)
def test_bad_configuration_is_one_sentence(given: object, sentence: str) -> None:
    with pytest.raises(ValueError, match="accepted") as error:
        config.parse(given)
    assert str(error.value) == sentence
