"""The front end's side: what the scheduler side has sent, on vLLM's Prometheus endpoint.

With several API servers (`--api-server-count`) each step's statistics reach one of them. Prometheus'
multiprocess mode then adds up counters and histograms, and of a gauge takes the value set last, as for vLLM's
own. No gauge is set before there is something to say, or a server that starts late would wipe out what
another has been told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.metrics import MooncakeStorePromMetrics

from .catalogue import INFO, INFO_LABELS, INFO_TEXT, METRICS, PREDICTED, PREDICTED_TEXT, Kind, Metric
from .metrics import KEY

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT


class _Series:
    """Ours. Every series of the catalogue exists from here on, for each engine."""

    def __init__(self, beside: KVConnectorPromMetrics, labelnames: list[str]) -> None:
        """`beside`: the connector's own, made of the same classes and for the same engines."""
        self._engines = beside.per_engine_labelvalues
        # Declared as any of three kinds, of which Ray's versions take no other arguments.
        self._kinds: dict[Kind, tuple[Any, dict[str, Any]]] = {
            Kind.COUNTER: (beside._counter_cls, {}),
            Kind.GAUGE: (beside._gauge_cls, {"multiprocess_mode": "mostrecent"}),
            Kind.HISTOGRAM: (beside._histogram_cls, {}),
        }
        self._series: dict[int, dict[str, Any]] = {engine: {} for engine in self._engines}
        for metric in METRICS:
            made = self._made(metric, labelnames)
            for engine, series in self._series.items():
                for figure, value in metric.figures.items():
                    own = [value] if metric.label else []
                    series[figure] = made.labels(*self._engines[engine], *own)
        gauge: Any = beside._gauge_cls
        self._info = gauge(
            name=INFO,
            documentation=INFO_TEXT,
            labelnames=[*labelnames, *INFO_LABELS],
            multiprocess_mode="mostrecent",
        )
        self._predicted = gauge(
            name=PREDICTED,
            documentation=PREDICTED_TEXT,
            labelnames=labelnames,
            multiprocess_mode="mostrecent",
        )

    def _made(self, metric: Metric, labelnames: list[str]) -> Any:
        make, more = self._kinds[metric.kind]
        buckets = {"buckets": metric.buckets} if metric.kind is Kind.HISTOGRAM else {}
        names = [*labelnames, metric.label] if metric.label else labelnames
        return make(name=metric.name, documentation=metric.text, labelnames=names, **more, **buckets)

    def observe(self, records: list[dict[str, Any]], engine_idx: int) -> None:
        series, engine = self._series[engine_idx], self._engines[engine_idx]
        for record in records:
            for figure, n in record.get("add", {}).items():
                series[figure].inc(n)
            for figure, value in record.get("set", {}).items():
                if figure == "predicted":
                    self._predicted.labels(*engine).set(value)
                else:
                    series[figure].set(value)
            for figure, values in record.get("saw", {}).items():
                for value in values:
                    series[figure].observe(value)
            if info := record.get("info"):
                self._info.labels(*engine, *(info[label] for label in INFO_LABELS)).set(1)


class SingleFlightPromMetrics(MooncakeStorePromMetrics):
    """The stock metrics and ours."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._ours = _Series(self, labelnames)

    def observe(self, transfer_stats_data: dict[str, Any] | None, engine_idx: int = 0) -> None:
        data = dict(transfer_stats_data or {})
        records = data.pop(KEY, [])
        super().observe(data, engine_idx)
        self._ours.observe(records, engine_idx)


class WrappedPromMetrics(KVConnectorPromMetrics):
    """Ours, and those of the connector that is wrapped, if it has some."""

    def __init__(
        self,
        child: type[KVConnectorBase_V1],
        child_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(child_config, metric_types, labelnames, per_engine_labelvalues)
        self._childs = child.build_prom_metrics(
            child_config, metric_types, labelnames, per_engine_labelvalues
        )
        self._ours = _Series(self, labelnames)

    def observe(self, transfer_stats_data: dict[str, Any] | None, engine_idx: int = 0) -> None:
        data = dict(transfer_stats_data or {})
        self._ours.observe(data.pop(KEY, []), engine_idx)
        for stats in data.values():
            if self._childs is not None:
                self._childs.observe(stats, engine_idx)
