"""What an instance and a trace may be."""

from __future__ import annotations

from typing import Any

import pytest

from singleflight.files.strict import Refused
from singleflight.traces.request import Lengths, Request
from singleflight.twin.arrivals import Arrivals
from singleflight.twin.figures import Figures
from singleflight.twin.instance import Instance


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"block_tokens": 0}, "block_tokens 0; accepted: 1 to 2147483647"),
        ({"gpu_blocks": 2**31}, "gpu_blocks 2147483648; accepted: 1 to 2147483647"),
        ({"receive_threads": 1025}, "receive_threads 1025; accepted: 1 to 1024"),
        (
            {"max_num_seqs": 100, "max_num_batched_tokens": 99},
            "max_num_batched_tokens 99; accepted: max_num_seqs (100) to 2147483647",
        ),
        ({"store": "cold"}, "store 'cold'; accepted: computed, warm"),
        ({"on_deadline": "wait"}, "on_deadline 'wait'; accepted: recompute, load"),
    ],
)
def test_a_value_out_of_range_is_refused_in_one_sentence(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the sentence is compared as a whole
        Instance(**{"block_tokens": 16, "gpu_blocks": 100, **changed})
    assert str(refused.value) == sentence


def test_the_deadline_of_a_block_grows_with_its_tokens() -> None:
    """As the connector's `deadline_per_token_s` does."""
    assert Instance(512, 100).rules.deadline_per_block_s == 32 * Instance(16, 100).rules.deadline_per_block_s


def test_a_figure_out_of_range_is_refused_by_its_name() -> None:
    with pytest.raises(Refused, match=r"step_overhead\.value: 0 is not accepted; give a number from 1e-06"):
        Figures().given(step_overhead=0.0)


def test_lengths_that_a_trace_does_not_say_count_as_one_token() -> None:
    arrivals = Arrivals.of(
        [Request(500, [1], Lengths(0, None)), Request(2500, [1, 2], Lengths(20, 0))], scale=2
    )
    assert arrivals.prompts.tolist() == [1, 20]
    assert arrivals.outputs.tolist() == [1, 1]
    assert arrivals.times.tolist() == [0.0, 1.0]
