"""Worlds for tests. vLLM is imported when the first is made: no test imports it at module level."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from connector_patch import matrix

from .setup import Setup

if TYPE_CHECKING:
    from .world import World


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """vLLM warns of each of the thousands of loads that we have made fail."""
    logger = logging.getLogger("vllm")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """vLLM imports MultiConnector's module only where it is used, and that is how the layer knows."""
    yield
    sys.modules.pop(matrix.MULTI_CONNECTOR, None)


@pytest.fixture
def world() -> Callable[..., World]:
    """`world(mode="attach", blocks=25, ...)`: any field of `Setup`; `beside`: another world, same store."""

    def make(*, beside: World | None = None, **fields: object) -> World:
        from .world import World

        return World(Setup(**fields), beside=beside)  # type: ignore[arg-type]

    return make


def needs_who_is_chosen(mode: str, other: object) -> None:
    """Skip what cannot be on: attach beside another connector, where vLLM does not say who loads."""
    if other and mode == "attach" and not matrix.says_who_is_chosen():
        pytest.skip("this vLLM does not tell children of MultiConnector who is chosen (0.32 does)")


@pytest.fixture
def like(world: Callable[..., World], mode: str, async_scheduling: bool) -> Callable[..., World]:
    """The same, in the mode and with the scheduler that the test is parametrized with."""

    def make(**fields: object) -> World:
        needs_who_is_chosen(mode, fields.get("other"))
        return world(**{"mode": mode, "async_scheduling": async_scheduling, **fields})

    return make
