"""One OpenTelemetry span for each wait of a follower, where vLLM traces (`--otlp-traces-endpoint`).

Goes through vLLM's own tracing, so to its exporter, and into the trace that the client's headers name.
Without an endpoint nothing of it is imported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from singleflight.core.stats import Wait

logger = init_logger(f"vllm.{__name__}")
SPAN: Final = "kv_singleflight.follower_wait"
REMEMBERED: Final = 8192
"""Waiting requests whose headers are kept; of more, the oldest become spans without a parent."""


class WaitSpans:
    """Called by the scheduler's thread only.

    Args:
        tracing: vLLM's module.
        clock: the clock that `Wait.ended` is on.
    """

    def __init__(self, tracing: Any, clock: Callable[[], float]) -> None:
        self._tracing = tracing
        self._clock = clock
        self._headers: dict[str, Mapping[str, str]] = {}

    def joined(self, request: Request) -> None:
        """The request waits now. May be said more than once."""
        if request.trace_headers:
            if len(self._headers) >= REMEMBERED:
                del self._headers[next(iter(self._headers))]
            self._headers[request.request_id] = request.trace_headers

    def ended(self, waits: Iterable[Wait]) -> None:
        """Make the spans of these."""
        zero = time.time() - self._clock()  # of the driver's clock, in seconds since the epoch
        for wait in waits:
            request_id = str(wait.request)
            attributes: dict[str, Any] = {
                self._tracing.SpanAttributes.GEN_AI_REQUEST_ID: request_id,
                "kv_singleflight.outcome": wait.outcome.value,
                "kv_singleflight.blocks": wait.blocks,
            }
            if wait.reason is not None:
                attributes["kv_singleflight.reason"] = wait.reason.value
            end = zero + wait.ended
            self._tracing.instrument_manual(
                SPAN,
                start_time=int((end - wait.seconds) * 1e9),
                end_time=int(end * 1e9),
                attributes=attributes,
                context=self._tracing.extract_trace_context(self._headers.pop(request_id, None)),
                kind=self._tracing.SpanKind.INTERNAL,
            )


def spans(vllm_config: VllmConfig, clock: Callable[[], float]) -> WaitSpans | None:
    """None where vLLM does not trace."""
    if vllm_config.observability_config.otlp_traces_endpoint is None:
        return None
    from vllm import tracing

    if not hasattr(tracing, "instrument_manual"):
        logger.warning("kv-singleflight: this vLLM has no instrument_manual, so waits make no spans.")
        return None
    return WaitSpans(tracing, clock)
