"""Whatever vLLM calls of a connector reaches the one that is wrapped, and its answer vLLM."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from tests.simulation import engine
from tests.simulation.setup import Setup
from tests.wrapper.fakes import CHILD, CLASS_METHODS, METHODS, FakeChild, FakeStats, config, wrapper

OF_ITSELF = {"has_connector_metadata", "role"}
"""Not about a store: whether metadata is bound, and which side this is."""
CALLED_OTHERWISE = {"get_kv_connector_stats"}
"""Have tests of their own below."""
PROPERTIES = [
    name
    for name in dir(KVConnectorBase_V1)
    if isinstance(inspect.getattr_static(KVConnectorBase_V1, name), property)
]


def parameters(name: str) -> list[Any]:
    """One object for each parameter that vLLM declares."""
    declared = list(inspect.signature(getattr(KVConnectorBase_V1, name)).parameters.values())[1:]
    return [
        7 if each.annotation in (int, "int") else SimpleNamespace(of=each.name)
        for each in declared
        if each.kind is each.POSITIONAL_OR_KEYWORD
    ]


FORWARDED = [name for name in METHODS if name not in CLASS_METHODS | OF_ITSELF | CALLED_OTHERWISE]


@pytest.mark.parametrize("name", FORWARDED)
def test_a_call_reaches_the_child_as_it_came_and_its_answer_comes_back(name: str) -> None:
    made, answer = wrapper(), (SimpleNamespace(answer=name), None)
    says = inspect.signature(getattr(KVConnectorBase_V1, name)).return_annotation
    made.child.answers[name] = answer
    given = parameters(name)
    returned = getattr(made, name)(*given)
    calls = [(list(with_), named) for called, with_, named in made.child.calls if called == name]
    assert calls == [(given, {})]
    assert says in (None, "None", inspect.Signature.empty) or returned is answer


@pytest.mark.parametrize("name", PROPERTIES)
def test_what_vllm_reads_is_the_childs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value = SimpleNamespace(of=name)
    made = wrapper()
    monkeypatch.setattr(FakeChild, name, value, raising=False)
    assert (getattr(made, name) is value) == (name not in OF_ITSELF)


def test_which_side_it_is_and_what_is_bound_it_says_itself() -> None:
    made = wrapper(role=KVConnectorRole.WORKER)
    assert (made.role, made.child.role) == (KVConnectorRole.WORKER,) * 2
    made.bind_connector_metadata(SimpleNamespace())
    assert made.has_connector_metadata()
    made.clear_connector_metadata()
    assert not made.has_connector_metadata()


def test_what_a_later_vllm_adds_to_a_call_reaches_the_child() -> None:
    made = wrapper()
    made.child.answers["get_num_new_matched_tokens"] = (7, True)
    assert made.get_num_new_matched_tokens("request", 32, ranges="from 0 on") == (7, True)
    assert made.child.calls == [("get_num_new_matched_tokens", ("request", 32), {"ranges": "from 0 on"})]


@pytest.mark.parametrize("mode", ["off", "shadow", "attach"])
def test_a_finished_requests_blocks_may_be_kept_by_the_child(mode: str) -> None:
    made = wrapper(mode)
    made.child.answers["request_finished_all_groups"] = (True, {"sent": "later"})
    request: Any = SimpleNamespace(request_id="r1", status=None)
    assert made.request_finished_all_groups(request, ([4, 5],)) == (True, {"sent": "later"})


def test_questions_to_the_class_are_answered_by_the_childs_class() -> None:
    from connector_patch.wrapper import SingleFlightConnector

    extra = {"connector": {**CHILD, "kv_connector_extra_config": {"layerwise": True}}}
    assert SingleFlightConnector.requires_piecewise_for_cudagraph(extra)
    assert not SingleFlightConnector.requires_piecewise_for_cudagraph({"connector": CHILD})
    assert SingleFlightConnector.get_required_kvcache_layout(config(extra)) == "layout of FakeChild"


def test_the_child_is_made_as_multi_connector_makes_its_children() -> None:
    """With its own name and extra configuration; what is not said of it is as for ours."""
    from connector_patch.wrapper import SingleFlightConnector

    extra = {"connector": {**CHILD, "kv_connector_extra_config": {"port": 1}}}
    whole = config(extra, kv_role="kv_consumer", engine_id="seven")
    made = SingleFlightConnector(whole, KVConnectorRole.SCHEDULER, engine._kv_cache_config(Setup()))
    transfer = made.child._vllm_config.kv_transfer_config
    assert (transfer.kv_connector, transfer.kv_connector_extra_config) == ("FakeChild", {"port": 1})
    assert (transfer.kv_role, transfer.engine_id) == ("kv_consumer", "seven")
    assert whole.kv_transfer_config.kv_connector == "SingleFlightConnector"


class TestStatistics:
    """The child's and ours travel together, and are told apart in the front end."""

    def test_both_come_through_from_worker_scheduler_and_back(self) -> None:
        from connector_patch.metrics import KEY
        from connector_patch.wrapper import SingleFlightConnector

        worker, scheduler = wrapper(role=KVConnectorRole.WORKER), wrapper()
        worker.child.answers["get_kv_connector_stats"] = FakeStats({"reads": 2})
        scheduler.child.answers["get_kv_connector_stats"] = FakeStats({"reads": 1})
        scheduler._deltas = scheduler._told()
        both = worker.get_kv_connector_stats().aggregate(scheduler.get_kv_connector_stats())
        heard = SingleFlightConnector.build_kv_connector_stats(both.to_dict())
        assert heard is not None
        assert heard.reduce() == {"reads": 3}
        (record,) = heard.data[KEY]
        assert record["info"]["store"] == "FakeChild"

    def test_a_child_that_counts_nothing_makes_no_line(self) -> None:
        from connector_patch.wrapper import SingleFlightConnector

        made = wrapper()
        assert made.get_kv_connector_stats() is None
        made._deltas = made._told()
        told = made.get_kv_connector_stats()
        assert not told.is_empty(), "or the scheduler would not send what the engine came to"
        heard = SingleFlightConnector.build_kv_connector_stats(told.to_dict())
        assert heard is not None
        assert heard.is_empty()

    def test_the_endpoint_has_the_childs_series_and_ours(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
        from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

        from connector_patch.wrapper import SingleFlightConnector

        seen: list[Any] = []

        class FakeProm(KVConnectorPromMetrics):
            def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
                seen.append((transfer_stats_data, engine_idx))

        monkeypatch.setattr(FakeChild, "build_prom_metrics", FakeProm, raising=False)
        registry = CollectorRegistry()

        def of(kind: Any) -> Any:
            def make(**fields: Any) -> Any:
                return kind(
                    **{k: v for k, v in fields.items() if k != "multiprocess_mode"}, registry=registry
                )

            return make

        kinds: Any = {kind: of(kind) for kind in (Gauge, Counter, Histogram)}
        endpoint = SingleFlightConnector.build_prom_metrics(
            config({"connector": CHILD}), kinds, ["engine"], {0: ["0"]}
        )
        made = wrapper("attach")
        made.child.answers["get_kv_connector_stats"] = FakeStats({"reads": 5})
        made._deltas = made._told()
        endpoint.observe(made.get_kv_connector_stats().to_dict(), 0)
        assert seen == [({"reads": 5}, 0)]
        (info,) = [m for m in registry.collect() if m.name == "vllm:singleflight_info"]
        assert [sample.labels["store"] for sample in info.samples] == ["FakeChild"]
