"""The defaults and what is accepted in their place."""

from dataclasses import FrozenInstanceError, fields

import pytest

from singleflight.core.policy import Policy


class TestDefaults:
    def test_a_follower_outwaits_a_healthy_load_and_undercuts_the_client(self):
        # hazard C4: clients give up after 30 s; 256 blocks are 4,096 tokens.
        assert 1.0 < Policy().budget_s(256) < 30.0

    def test_one_hand_over(self):
        assert Policy().max_handovers == 1

    def test_cannot_be_changed_under_a_running_table(self):
        with pytest.raises(FrozenInstanceError):
            Policy().max_blocks = 1  # type: ignore[misc]


class TestBudget:
    @pytest.mark.parametrize(("blocks", "seconds"), [(0, 2.0), (1, 2.5), (8, 6.0)])
    def test_base_plus_so_much_a_block(self, blocks, seconds):
        assert Policy(deadline_base_s=2.0, deadline_per_block_s=0.5).budget_s(blocks) == seconds


class TestValidation:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("deadline_base_s", 0.001),
            ("deadline_base_s", 5),
            ("deadline_per_block_s", 0),
            ("max_handovers", 0),
            ("max_blocks", 1),
            ("broken_ttl_s", 0),
            ("breaker_failures", 0),
            ("breaker_pause_s", 0),
        ],
    )
    def test_the_edge_of_what_is_accepted(self, name, value):
        assert getattr(Policy(**{name: value}), name) == value

    @pytest.mark.parametrize("name", [field.name for field in fields(Policy)])
    @pytest.mark.parametrize(
        "value",
        [
            -1,
            float("nan"),
            float("inf"),
            float("-inf"),
            True,
            None,
            "10",
            pytest.param(10**400, id="10**400"),
        ],
    )
    def test_nonsense_is_refused_with_the_field_and_the_value(self, name, value):
        with pytest.raises(ValueError, match=rf"^{name}: .*is not accepted; give") as error:
            Policy(**{name: value})
        assert repr(value) in str(error.value)

    @pytest.mark.parametrize("name", ["deadline_base_s", "max_blocks"])
    def test_zero_is_refused_where_it_would_switch_the_layer_off_silently(self, name):
        with pytest.raises(ValueError, match=f"{name}: 0 is not accepted; give .* > 0"):
            Policy(**{name: 0})

    @pytest.mark.parametrize("name", ["max_handovers", "max_blocks", "breaker_failures"])
    def test_a_count_is_a_whole_number(self, name):
        with pytest.raises(ValueError, match=f"{name}: 1.0 is not accepted; give a whole number"):
            Policy(**{name: 1.0})
