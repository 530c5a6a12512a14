"""Single-flight for async code: asyncio, uvloop and trio, over the same table as the vLLM connector.

    async def fetch(keys):                      # one call for each flight
        return {key: ... for key in keys}

    async with FlightGroup(fetch) as flights:
        async with flights.join(keys, deadline=2.0) as flight:
            prepare()                           # what was missing loads already
            values = await flight               # {key: value}

What is promised when callers, loaders and deadlines misbehave is in docs/aio.md.
"""

try:
    from anyio import Future as _Future  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"singleflight.aio needs anyio 4.15 or later ({error}); `pip install 'kv-singleflight[aio]'`"
    ) from None

from ..core.policy import Policy
from ..core.stats import Outcome, Reason
from .errors import FlightError, FlightReset, FlightTimeout, LoadFailed
from .group import FlightGroup
from .handle import FlightHandle, Loader

__all__ = [
    "FlightError",
    "FlightGroup",
    "FlightHandle",
    "FlightReset",
    "FlightTimeout",
    "LoadFailed",
    "Loader",
    "Outcome",
    "Policy",
    "Reason",
]
