"""One row a cohort, as zstd Parquet: 10^8 rows for the published grid, so one configuration in memory at a
time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from singleflight.files.atomic import replaced
from singleflight.sim.columns import Columns
from singleflight.sim.config import LOOKUPS, PHASES, ROUTINGS, Config
from singleflight.sim.counts import Outcome
from singleflight.sim.kernel import Kernel

_LABEL = pa.dictionary(pa.int8(), pa.string())

SCHEMA = pa.schema(
    [
        ("w_eff_ms", pa.int64()),
        ("instances", pa.int32()),
        ("capacity", pa.int32()),
        ("routing", _LABEL),
        ("lookup", _LABEL),
        ("instance", pa.int32()),
        ("phase", _LABEL),  # the leader's
        ("leader", pa.int64()),  # index in the trace of the request that opened the load
        ("opened_ms", pa.int64()),
        ("hash", pa.uint64()),
        ("fanin", pa.int32()),
    ]
)


def write(path: Path, columns: Columns, engine: Kernel, simulated: Iterator[Outcome]) -> tuple[Outcome, ...]:
    """Write the cohorts of every outcome `simulated` yields, a row group each, as `engine` holds them at
    that moment.

    The file appears complete or not at all.

    Returns:
        The outcomes.

    Raises:
        OSError: it cannot be written.
    """
    outcomes = []
    with replaced(path) as raw, pq.ParquetWriter(raw, SCHEMA, compression="zstd") as writer:
        for outcome in simulated:
            outcomes.append(outcome)
            writer.write_table(_table(outcome.config, columns, engine))
    return tuple(outcomes)


def _table(config: Config, columns: Columns, engine: Kernel) -> pa.Table:
    layout = engine.layout
    leader = np.repeat(np.arange(len(layout.times)), np.diff(engine.load_first))  # in the layout's order
    n = len(leader)
    instance = np.repeat(np.arange(len(layout.sizes), dtype=np.int32), np.diff(layout.starts))[leader]
    first_block = (
        np.cumsum(layout.sizes) - layout.sizes
    )  # where an instance's block ids start in layout.dense
    block = layout.dense[first_block[instance] + engine.load_block[:n]]

    def label(index: Any, names: tuple[str, ...]) -> pa.Array:
        codes = np.ascontiguousarray(np.broadcast_to(np.asarray(index, np.int8), n))
        return pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(names, pa.string()))

    values = [
        pa.array(np.full(n, config.w_eff_ms, np.int64)),
        pa.array(np.full(n, config.instances, np.int32)),
        pa.array(np.full(n, config.capacity, np.int32)),
        label(ROUTINGS.index(config.routing), ROUTINGS),
        label(LOOKUPS.index(config.lookup), LOOKUPS),
        pa.array(instance),
        label(layout.steady[leader], PHASES),
        pa.array(layout.source[leader]),
        pa.array(layout.times[leader]),
        pa.array(columns.hashes[block]),
        pa.array(engine.load_fanin[:n]),
    ]
    return pa.Table.from_arrays(values, schema=SCHEMA)
