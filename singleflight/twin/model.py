"""The twin in plain Python: the specification."""

from __future__ import annotations

import numpy as np

from singleflight.twin.arrivals import Arrivals
from singleflight.twin.engine import Engine
from singleflight.twin.figures import Figures
from singleflight.twin.instance import Instance, Mode
from singleflight.twin.link import Link
from singleflight.twin.modes import RULES, Stock
from singleflight.twin.outcome import Gets, Outcome
from singleflight.twin.pool import Pool
from singleflight.twin.prompts import Prompts, room
from singleflight.twin.store import Clock, Store
from singleflight.twin.threads import Threads


def simulate(arrivals: Arrivals, figures: Figures, instance: Instance, mode: Mode) -> Outcome:
    """One instance's load path over what it is sent, to the end of the last request.

    Raises:
        ValueError: a request that does not fit into the instance's cache; says which, and what is accepted.
    """
    prompts = Prompts.of(arrivals, figures, instance)
    asked = prompts.asked.tolist()
    names = [
        arrivals.blocks[first : first + full].tolist()
        for first, full in zip(arrivals.offsets[:-1].tolist(), prompts.named.tolist(), strict=True)
    ]
    block_bytes = figures.kv_bytes_per_token.value * instance.block_tokens
    clock = Clock()
    pool = Pool(room(prompts, instance))
    store = Store(
        clock,
        [0.0] * len(arrivals.stored_from) if instance.store == "warm" else arrivals.stored_from.tolist(),
        [each[:count] for each, count in zip(names, asked, strict=True)],
        figures.lookup_latency.value,
        figures.lookup_per_block.value,
        figures.lookup_again.value,
        instance.lookup_async,
    )
    link = Link(figures.load_bandwidth.value, figures.parallel_loads.value)
    threads = Threads(instance.receive_threads, figures.load_latency.value, block_bytes, link)
    rules = Stock(store) if mode == "stock" else RULES[mode](store, clock, pool, names, instance, asked)
    engine = Engine(arrivals, prompts, names, figures, instance, clock, pool, store, threads, rules)
    engine.run()
    each, gets = engine.requests, engine.gets
    whole, seconds = np.int64, np.float64
    return Outcome(
        ttft_s=np.array([r.first_token for r in each], seconds) - arrivals.times,
        admitted_s=np.array([r.admitted for r in each], seconds) - arrivals.times,
        local_blocks=np.array([r.local for r in each], whole),
        adopted_blocks=np.array([r.adopted for r in each], whole),
        loaded_blocks=np.array([r.loaded for r in each], whole),
        removable_blocks=np.array([r.removable for r in each], whole),
        computed_tokens=np.array([r.computed_tokens for r in each], whole),
        lookups=np.array(store.lookups, whole),
        gets=Gets(
            np.array([get.request for get in gets], whole),
            np.array([get.blocks for get in gets], whole),
            *(
                np.array([getattr(get, name) for get in gets], seconds)
                for name in ("queued_s", "started_s", "ended_s", "reported_s")
            ),
        ),
        block_bytes=block_bytes,
        steps=engine.steps,
        fell_back=engine.fell_back,
    )
