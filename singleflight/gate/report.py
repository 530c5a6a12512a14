"""From a gate to a verdict, its sentences, and what a person reads."""

from __future__ import annotations

import datetime
import platform
from importlib import metadata
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.table import Table

from singleflight import __version__
from singleflight.files import shown
from singleflight.gate.decide import (
    CROWDED,
    DOUBLINGS,
    LEAST_MEAN,
    LEAST_P99,
    Difference,
    Gate,
    Predicted,
    Traffic,
)
from singleflight.gate.verdict import Gain, Prediction, Range, Scope, Trace, Verdict
from singleflight.sweep.report import window_label
from singleflight.twin.instance import MODES
from singleflight.twin.quantity import quantities


def verdict(gate: Gate, model: str | None) -> Verdict:
    """The verdict of a gate; `model`: as the deployment names it."""
    at, one = gate.deployment, gate.deployment.instance
    modes = {mode: gate.predicted(gate.stated, mode) for mode in MODES}
    return Verdict(
        made_at=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        enable=gate.enable,
        reasons=_reasons(gate),
        flips=_flips(gate),
        ttft={mode: _prediction(each) for mode, each in modes.items()},
        gain=Gain(
            _range([each.mean for each in gate.differences]),
            _range([each.p99 for each in gate.differences]),
            LEAST_MEAN,
            LEAST_P99,
        ),
        redundancy=_share(modes["stock"].removable, modes["stock"].blocks),
        scope=Scope(
            traces=[_trace(each) for each in gate.traffic],
            steady_requests=gate.steady_requests,
            block_size_tokens=one.block_tokens,
            model=model,
            instances=at.instances * len(gate.traffic),
            routing=at.routing,
            capacity_blocks=one.gpu_blocks,
            receive_threads=one.receive_threads,
            max_num_seqs=one.max_num_seqs,
            max_num_batched_tokens=one.max_num_batched_tokens,
            store=one.store,
            scale=at.scale,
            versions=_versions(),
        ),
        figures=gate.figures.as_dict(),
    )


def _prediction(of: Predicted) -> Prediction:
    return Prediction(of.quantile_s(0.5), of.quantile_s(0.99), of.mean_s, of.gets, of.blocks)


def _range(values: list[float]) -> Range:
    """Of values whose first is the stated point's."""
    return Range(min(values), values[0], max(values))


def _trace(of: Traffic) -> Trace:
    return Trace(of.name, of.sha256, of.requests, of.requests - of.first_steady, of.span_s)


def _versions() -> dict[str, str]:
    return {
        "kv-singleflight": __version__,
        "python": platform.python_version(),
        "numba": metadata.version("numba"),
        "numpy": metadata.version("numpy"),
    }


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def seconds(value: float) -> str:
    """A duration as `window_label`, short ones with their fractions."""
    if value < 0.9995:
        return f"{value * 1e6:.3g} us" if value < 0.001 else f"{value * 1e3:.3g} ms"
    return window_label(round(value * 1000))


def percent(share: float) -> str:
    """With a sign; what rounds to nothing has none."""
    return f"{100 * share:+.1f} %".replace("-0.0 %", "0.0 %").replace("+0.0 %", "0.0 %")


def _reasons(gate: Gate) -> list[str]:
    """The first says it all: it is the one that the connector logs."""
    stock, attach, park = (gate.predicted(gate.stated, mode) for mode in MODES)
    means, tails = ([getattr(each, of) for each in gate.differences] for of in ("mean", "p99"))
    verb = "single-flight pays" if gate.enable else f"it does not pay, since {_objection(gate)}"
    said = [
        f"Mean TTFT is predicted at {seconds(stock.mean_s)} in stock and {seconds(attach.mean_s)} with"
        f" single-flight, p99 at {seconds(stock.quantile_s(0.99))} and {seconds(attach.quantile_s(0.99))};"
        f" in the neighbourhood the mean gains {percent(min(means))} to {percent(max(means))}, p99"
        f" {percent(min(tails))} to {percent(max(tails))}: {verb}."
    ]
    if gate.enable and (refused := gate.deployment.attach_refused) is not None:
        said.insert(
            0,
            "It pays, but the server that was recorded could not obey a yes: attach mode would pass through"
            f" there, since {shown.text(refused, 500)}.",
        )
    if gate.crowded:
        seats = gate.deployment.instance.max_num_seqs
        said.insert(
            0,
            f"For {100 * attach.crowded:.0f} % of the requests more than max_num_seqs ({seats}) wait for"
            " their first token when they arrive: a batch handed over at once, or an overload, where TTFT is"
            " a place in the queue and says nothing about loads.",
        )
    said.append(
        f"Of {stock.blocks:,} blocks that stock loads, {stock.removable:,} repeat one in flight"
        f" ({100 * _share(stock.removable, stock.blocks):.2f} %); single-flight does {attach.gets:,} Gets of"
        f" {attach.blocks:,} blocks instead of {stock.gets:,}."
    )
    worst = _worst(gate)
    said.append(
        f"It gains least with {worst.point}: {percent(worst.mean)} of the mean, {percent(worst.p99)} of p99."
    )
    said.append(f"Park mode: mean {seconds(park.mean_s)}, p99 {seconds(park.quantile_s(0.99))} as stated.")
    if attach.fell_back:
        said.append(f"{attach.fell_back:,} followers' deadline passes.")
    if not stock.blocks:
        said.append(
            "Nothing is loaded: every block is found in the local cache or computed. Where the store has more"
            " than this traffic has put there, say --store warm."
        )
    if names := gate.figures.defaults():
        said.append(f"Not measured but assumed: {', '.join(names)}.")
    return said


def _worst(gate: Gate) -> Difference:
    """The point that is farthest from a yes."""
    return min(gate.differences, key=lambda each: min(each.mean - LEAST_MEAN, each.p99 - LEAST_P99))


def _objection(gate: Gate) -> str:
    """What a yes would have needed, for the reasons of a no."""
    if gate.crowded:
        return f"over {100 * CROWDED:.0f} % of the requests wait behind more than an instance runs at once"
    worst = _worst(gate)
    if worst.mean - LEAST_MEAN <= worst.p99 - LEAST_P99:
        return f"the mean must gain {100 * LEAST_MEAN:.0f} % in all of it"
    return "p99 gets worse in some of it"


def _flips(gate: Gate) -> list[str]:
    if gate.crowded:
        return ["Traffic that an instance can admit: more instances, or the arrivals as they really came."]
    if not gate.predicted(gate.stated, "stock").removable:
        return ["Requests that load the same blocks at the same time: there are none."]
    if (factor := gate.flip()) is None:
        return [f"No load path up to {2**DOUBLINGS} times as slow or as fast."]
    figures = gate.figures
    latency = seconds(figures.load_latency.value * factor)
    bandwidth = f"{figures.load_bandwidth.value / factor / 1e6:,.4g} MB/s"
    times = f"{factor:g} times as slow" if factor > 1 else f"{1 / factor:g} times as fast"
    return [f"A load path {times}: {latency} and {bandwidth}."]


# -- for people ------------------------------------------------------------------------------------------


LABELS = {"stock": "stock", "attach": "single-flight (attach)", "park": "park mode"}


def comparison(of: Verdict) -> list[tuple[str, ...]]:
    """(what, stock, attach, park), as it is shown."""
    modes = [of.ttft[mode] for mode in LABELS if mode in of.ttft]
    rows = [
        (f"TTFT {name}", *(seconds(getattr(each, key)) for each in modes))
        for name, key in (("median", "median_s"), ("p99", "p99_s"), ("mean", "mean_s"))
    ]
    rows += [
        (name, *(f"{getattr(each, key):,.0f}" for each in modes))
        for name, key in (("loads (Gets)", "gets"), ("blocks loaded", "blocks"))
    ]
    size = of.scope.block_size_tokens * of.figures["kv_bytes_per_token"].value
    return [*rows, ("GB loaded", *(f"{each.blocks * size / 1e9:,.4g}" for each in modes))]


def named(of: Verdict) -> str:
    """The traces by name."""
    names = [trace.name for trace in of.scope.traces]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def show(console: Console, of: Verdict) -> None:
    """Print it for people."""
    scope = of.scope
    answer = "[bold green]yes[/], coalesce" if of.enable else "[bold red]no[/], do not coalesce"
    console.print(
        f"{named(of)}, {scope.instances} x {scope.capacity_blocks:,} blocks of {scope.block_size_tokens}"
        f" tokens, {scope.routing}, {scope.scale:g} times as fast: {answer}",
        highlight=False,
    )
    table = Table(
        "", *(LABELS[mode] for mode in of.ttft), title=f"{scope.steady_requests:,} requests after the warm-up"
    )
    for row in comparison(of):
        table.add_row(*row)
    console.print(table)
    for name, range_ in (("mean", of.gain.mean), ("p99", of.gain.p99)):
        console.print(
            f"gain of the {name}: {percent(range_.stated)} ({percent(range_.low)} to {percent(range_.high)})",
            highlight=False,
        )
    for sentence in of.reasons:
        console.print(f"- {sentence}", highlight=False)
    console.print("What would flip it:", style="bold")
    for sentence in of.flips:
        console.print(f"- {sentence}", highlight=False)
    console.print(quantities(of.figures))


def plot(path: Path, gate: Gate, of: Verdict) -> None:
    """The two distributions of TTFT, as a PNG file.

    Raises:
        OSError: `path` cannot be written.
    """
    from singleflight.files.atomic import replaced

    with replaced(path) as raw:
        draw(raw, gate, of)


def draw(target: IO[bytes], gate: Gate, of: Verdict) -> None:
    """The same, wherever it goes.

    Raises:
        OSError: `target` cannot be written.
    """
    from singleflight.sweep import plots

    plots.distributions(
        target,
        f"{named(of)}: {'yes' if of.enable else 'no'}",
        "predicted time to first token",
        {LABELS[mode]: gate.predicted(gate.stated, mode).ttft_s for mode in MODES[:2]},
    )
