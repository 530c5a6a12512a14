"""KV events: a router that follows the stream knows what is in the prefix cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .campaign import Tally


def stream(mode: str) -> Tally:
    from . import campaign

    return campaign.run(mode, range(120), check_events=True)


@pytest.mark.parametrize("mode", ["stock", "attach", "park"])
def test_stream_makes_sense(mode: str) -> None:
    assert not stream(mode).failures
