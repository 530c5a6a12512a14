"""What the twin is fed with: costs of the load path and of the engine, each with unit and origin."""
# ruff: noqa: RUF009 - figure makes a dataclasses.field

from __future__ import annotations

from dataclasses import dataclass

from singleflight.twin.quantity import FigureSet, Quantity, figure


@dataclass(frozen=True)
class Figures(FigureSet):
    """The twin's input. Defaults are of an 8B model in 16 bits on one GPU with 2 TB/s and 300 TFLOPS."""

    load_latency: Quantity = figure(0.005, "s")
    """From the Get to its first byte. A few milliseconds, TCP or RDMA with a master to ask."""

    load_bandwidth: Quantity = figure(5e9, "bytes/s", low=1.0)
    """What one Get then brings. Under half of a 100 Gbit/s link."""

    parallel_loads: Quantity = figure(1.0, "ratio", low=0.01, high=1024)
    """How many times more bytes a second all receive threads bring than one; below 1 where they are
    in each other's way, as on a host with few cores. vLLM's default is one thread."""

    kv_bytes_per_token: Quantity = figure(131_072, "bytes/token", low=1.0)
    """32 layers, 8 KV heads of 128, keys and values in 16 bits (Llama 3.1 8B)."""

    coordination_per_lookup: Quantity = figure(30e-6, "s/request")
    """Scheduler time the layer adds to each request, blocks apart. `singleflight calibrate` measures it; the
    default is over three times what it found on a 2-core cloud machine."""

    coordination_per_block: Quantity = figure(4e-6, "s/block")
    """And to each block that is loaded from outside; likewise."""

    lookup_latency: Quantity = figure(0.5e-3, "s/lookup")
    """To ask the store what it has of one prompt, blocks apart: to the worker and back, and one call to the
    master. A synchronous lookup holds the scheduler up for as long."""

    lookup_again: Quantity = figure(1.0, "ratio", low=0.0, high=1.0)
    """What share of `lookup_latency` a further lookup of the same step takes: the way there is warm."""

    lookup_per_block: Quantity = figure(1e-6, "s/block")
    """And for each block asked about."""

    prefill_rate: Quantity = figure(10_000, "tokens/s", low=1e-3)
    """Prompt tokens computed a second: 16 GFLOP a token at half of the peak."""

    attention: Quantity = figure(3.5e-9, "s/pair")
    """Added for each pair of a prompt token computed and a token before it: 0.5 MFLOP."""

    prefill_context: Quantity = figure(65e-9, "s/token")
    """And for each token of context before what a step computes of a prompt: its 128 KiB are read once, so a
    short rest of a long prompt costs more than its pairs."""

    step_overhead: Quantity = figure(0.01, "s/step", low=1e-6)
    """What a step takes that computes anything, whatever it computes: 16 GB of weights are read, and vLLM
    schedules and samples."""

    decode_per_request: Quantity = figure(20e-6, "s/request")
    """Added to a step for each request that decodes in it."""

    decode_context: Quantity = figure(65e-9, "s/token")
    """And for each token of context that it decodes on: 128 KiB are read."""

    loading_slowdown: Quantity = figure(1.0, "ratio", low=1.0, high=1024)
    """How many times longer a step is while a load's bytes come in. Next to nothing on a GPU; on a CPU, loads
    and the model share cores and memory."""

    computing_slowdown: Quantity = figure(1.0, "ratio", low=1.0, high=1024)
    """And how many times longer bytes take to come in while a step computes; likewise."""

    idle_step: Quantity = figure(1e-3, "s/step", low=1e-6)
    """A step that computes nothing while requests wait for loads: vLLM 0.32 sleeps a millisecond."""

    frontend_per_request: Quantity = figure(0.5e-3, "s/request")
    """From the client's request to the engine, in a process that serves one after another, tokens apart."""

    frontend_per_token: Quantity = figure(1e-6, "s/token")
    """And for each prompt token: it is tokenized."""
