"""What a server says by itself: log lines that do not flood, and spans where vLLM traces."""

from __future__ import annotations

import builtins
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from singleflight.core.stats import Outcome, Reason, Wait
from tests.support import Clock, blocks, finish, quiescent, salts, store_prefixes, until_scheduled

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from connector_patch.lab.engine import Engine

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


class TestSparseLines:
    def test_the_first_event_is_said_at_once_and_the_rest_once_a_minute_with_their_number(self) -> None:
        from connector_patch.sparse import Sparse

        clock = Clock()
        sparse = Sparse(clock=clock)
        assert sparse.due("a") == 1
        assert [sparse.due("a") for _ in range(99)] == [0] * 99
        clock.advance(60)
        assert sparse.due("a", 2) == 101
        assert sparse.due("a") == 0

    def test_kinds_do_not_hold_each_other_up(self) -> None:
        from connector_patch.sparse import Sparse

        sparse = Sparse(clock=Clock())
        assert (sparse.due("a"), sparse.due("b"), sparse.due("a")) == (1, 1, 0)

    def test_one_line_for_each_reason_with_the_count_since_the_last(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from connector_patch import sparse

        said: list[tuple[Any, ...]] = []
        log = SimpleNamespace(warning=lambda line, *values: said.append(values))
        monkeypatch.setattr(sparse, "logger", log)
        clock, counts = Clock(), Counter({Reason.DEADLINE: 3})
        fall_backs = sparse.FallBacks(clock)
        for _ in range(100):
            fall_backs.look(counts)
        assert said == [("deadline", 3)]
        counts.update({Reason.DEADLINE: 5, Reason.RESET: 1})
        fall_backs.look(counts)
        assert said[1:] == [("reset", 1)]
        clock.advance(60)
        counts[Reason.DEADLINE] += 1
        fall_backs.look(counts)
        assert said[2:] == [("deadline", 6)]


def test_a_hundred_loads_that_end_in_an_exception_make_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from connector_patch import worker
    from connector_patch.sparse import Sparse

    said: list[tuple[Any, ...]] = []
    monkeypatch.setattr(worker, "_exceptions", Sparse(clock=Clock()))
    monkeypatch.setattr(
        worker, "logger", SimpleNamespace(exception=lambda line, *values: said.append(values))
    )
    reported: list[str] = []

    def broken(request: Any) -> None:
        raise OSError("no route to the store")

    thread: Any = SimpleNamespace(
        store=None,
        _handle_request=broken,
        set_finished_request=reported.append,
        set_failed_request=lambda request_id: None,
        request_queue=SimpleNamespace(task_done=lambda: None),
    )
    monkeypatch.setattr(worker, "blocks_there", lambda *_: 0)
    monkeypatch.setattr(worker, "first_block", lambda *_: None)
    worker.Receiver(thread)
    for i in range(100):
        thread._handle_request(SimpleNamespace(req_id=str(i)))
    assert reported == [str(i) for i in range(100)], "each load is reported all the same"
    assert said == [("0", "OSError", 1)]


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Where vLLM's spans go, instead of to an endpoint."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from vllm.tracing import otel

    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    monkeypatch.setattr(otel.trace, "get_tracer", provider.get_tracer)
    yield memory
    provider.shutdown()


def config(endpoint: str | None) -> Any:
    return SimpleNamespace(observability_config=SimpleNamespace(otlp_traces_endpoint=endpoint))


class TestSpans:
    def test_without_vllms_tracing_nothing_is_even_imported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from connector_patch import tracing

        def refuse(name: str, *more: Any) -> None:
            raise AssertionError(f"imports {name}")

        monkeypatch.setattr(builtins, "__import__", refuse)
        assert tracing.spans(config(None), Clock()) is None

    def test_a_wait_is_a_span_in_the_clients_trace(self, exported: InMemorySpanExporter) -> None:
        from connector_patch import tracing

        clock = Clock()
        spans = tracing.spans(config("http://localhost:4317"), clock)
        assert spans is not None
        spans.joined(cast(Any, SimpleNamespace(request_id="b", trace_headers=HEADERS)))
        spans.joined(cast(Any, SimpleNamespace(request_id="c", trace_headers=None)))
        late = Wait("c", Outcome.FELL_BACK, Reason.DEADLINE, 9.0, clock(), 3)
        spans.ended([Wait("b", Outcome.READY, None, 0.5, clock(), 4), late])
        b, c = cast("tuple[ReadableSpan, ReadableSpan]", exported.get_finished_spans())
        assert b.name == c.name == "kv_singleflight.follower_wait"
        assert b.attributes == {
            "gen_ai.request.id": "b",
            "kv_singleflight.outcome": "ready",
            "kv_singleflight.blocks": 4,
        }
        assert (b.context.trace_id, b.parent and b.parent.span_id) == (int(TRACE, 16), int(PARENT, 16))
        assert b.start_time is not None
        assert b.end_time is not None
        assert round((b.end_time - b.start_time) / 1e6) == 500
        assert c.attributes is not None
        assert c.attributes["kv_singleflight.reason"] == "deadline"
        assert c.parent is None

    def test_headers_of_requests_that_never_end_do_not_pile_up(self) -> None:
        from connector_patch import tracing

        spans = tracing.WaitSpans(None, Clock())
        for i in range(tracing.REMEMBERED + 1):
            spans.joined(cast(Any, SimpleNamespace(request_id=str(i), trace_headers=HEADERS)))
        assert len(spans._headers) == tracing.REMEMBERED
        assert "0" not in spans._headers


@pytest.mark.engine
class TestOnARealEngine:
    @pytest.fixture
    def engine(self, ours: Engine) -> Iterator[Engine]:
        with quiescent(ours) as running:
            yield running

    def test_a_follower_of_a_traced_request_makes_a_span_and_a_leader_none(
        self, engine: Engine, exported: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from connector_patch import tracing

        connector = engine.connector
        spans = tracing.spans(config("http://localhost:4317"), lambda: float(connector.layer._clock()))
        assert spans is not None
        monkeypatch.setattr(connector, "_spans", spans)
        monkeypatch.setattr(connector._source, "_ended", spans.ended)
        add = engine.llm.add_request
        monkeypatch.setattr(
            engine.llm, "add_request", lambda *what, **more: add(*what, **more, trace_headers=HEADERS)
        )
        trunk = blocks(1, 2, 3, 4, salt=next(salts))
        store_prefixes(engine, trunk)
        engine.gate.open.clear()
        burst, steps = until_scheduled(engine, {"leader": [*trunk, 7], "follower": [*trunk, 8]})
        connector.layer._clock.advance(1.5)
        finish(engine, burst, steps)
        (span,) = exported.get_finished_spans()
        assert span.attributes is not None
        assert str(span.attributes["gen_ai.request.id"]).startswith("follower")
        assert span.attributes["kv_singleflight.blocks"] == 4
        assert span.context.trace_id == int(TRACE, 16)
        assert span.start_time is not None
        assert span.end_time is not None
        assert round((span.end_time - span.start_time) / 1e6) == 1500

    def test_the_statistics_of_a_burst_reach_vllm_in_the_steps_that_made_them(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In bytes, too; and steps that only decode say nothing."""
        told: list[Any] = []
        take = engine.connector._deltas.take
        monkeypatch.setattr(engine.connector._deltas, "take", lambda: told.append(take()) or told[-1])
        trunk = blocks(1, 2, 3, 4, salt=next(salts))
        store_prefixes(engine, trunk)
        told.clear()
        prompts = {name: [*trunk, i] for i, name in enumerate("abcd")}
        engine.burst(prompts, max_tokens=16, barrier=True)
        counts = engine.recorder.take()
        from connector_patch.metrics import KEY, total

        records = [record for stats in told if stats is not None for record in stats.data[KEY]]
        sums = total(records)
        assert sums["blocks_led"] == counts.keys == 4
        assert sums["bytes_led"] == counts.bytes
        assert sums["bytes_spared"] == 3 * counts.bytes
        (saw,) = [record["saw"] for record in records if "saw" in record]
        assert (len(saw["wait_ready"]), saw["flight_members"], saw["flight_size"]) == (3, [4], [4])
        gauges = ("now_pending", "now_in_air", "now_waiting", "breaker_open")
        assert records[-1]["set"] == dict.fromkeys(gauges, 0)
        assert len(records) < 8 < len(told)
