"""From a gate to a verdict, its sentences, and what a person reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from singleflight.console import quantities
from singleflight.gate import LONGEST_MS, SENSITIVITY, Gate, Point, now, versions, window_figure
from singleflight.sim.cost import SATURATED
from singleflight.sim.report import window_label
from singleflight.traces.reader import TraceReader
from singleflight.verdict import Fractions, Margin, Rates, Scope, Verdict


def verdict(gate: Gate, trace: TraceReader, model: str | None, flip_s: float | None) -> Verdict:
    """The verdict of a gate.

    Args:
        trace: read to its end. flip_s: see `Gate.flip_s`.
    """
    point, at = gate.stated, gate.deployment
    counts, costs = point.counts, point.costs
    margins = [each.costs.margin for each in gate.neighbourhood]
    return Verdict(
        made_at=now(),
        enable=gate.enable,
        reasons=_reasons(gate),
        flips=_flips(gate, flip_s),
        fractions=Fractions(
            duplicate_cohorts=_share(counts.dup_cohorts, counts.cohorts),
            # Cohorts count in their leader's phase, attempts in their request's: at the border of the
            # phases this can be over the whole.
            duplicate_attempts=min(1.0, _share(counts.dup_attempts, counts.attempts)),
            removable_attempts=float(counts.redundancy),
        ),
        rates=Rates(
            requests_per_s=point.traffic.requests_per_s,
            cold_loads_per_s=point.traffic.cold_per_s,
            removable_loads_per_s=point.traffic.removable_per_s,
            saving_s_per_s=costs.saving,
            coordination_s_per_s=costs.coordination,
            waits_s_per_s=costs.waits,
            lost_parallelism_s_per_s=costs.lost_parallelism,
        ),
        margin=Margin(min(margins), costs.margin, max(margins)),
        scope=Scope(
            trace=trace.name,
            trace_sha256=trace.sha256,
            requests=trace.requests,
            span_s=(trace.last_ms - trace.first_ms) / 1000,
            block_size_tokens=at.block_tokens,
            model=model,
            instances=at.instances,
            capacity_blocks=at.capacity,
            routing=at.routing,
            scale=at.scale,
            window_ms=gate.load.window_s * 1000,
            w_eff_ms=gate.w_eff_ms(gate.load.window_s),
            versions=versions(),
        ),
        figures={"window": window_figure(gate), **gate.figures.as_dict()},
    )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def seconds(value: float) -> str:
    """A duration as `window_label`, short ones in us."""
    return f"{value * 1e6:.3g} us" if value < 0.001 else window_label(round(value * 1000))


def _reasons(gate: Gate) -> list[str]:
    """The first says it all: it is the one that the connector logs."""
    point, load, figures = gate.stated, gate.load, gate.figures
    counts, costs, traffic = point.counts, point.costs, point.traffic
    margins = [each.costs.margin for each in gate.neighbourhood]
    low, high = min(margins), max(margins)
    verb = "pays"
    if low <= 0:
        verb = "does not pay" if high <= 0 else "pays in some of it only, so the answer is no"
    window = seconds(load.window_s)
    said = [
        f"With loads of {window}, halved and doubled, and both lookups"
        + (", time ties kept and spread" if len(gate.spreads) > 1 else "")
        + f", the margin is {low:+.3g} to {high:+.3g} request-seconds a second: coalescing {verb}.",
        f"{counts.removable:,} of {counts.attempts:,} cold block loads could be removed"
        f" ({float(100 * counts.redundancy):.4f} %): {traffic.removable_per_s:.4g} of"
        f" {traffic.cold_per_s:.4g} a second.",
        f"That saves {costs.saving:.3g} request-seconds a second; coordination costs"
        f" {costs.coordination:.3g}, waits and failures {costs.waits:.3g}.",
    ]
    if gate.deployment.window is not None:
        said.append(f"That a load takes {window} was {gate.deployment.window.origin.value}.")
    else:
        size = traffic.run_blocks * gate.deployment.block_tokens * figures.kv_bytes_per_token.value
        said.append(
            f"That a load takes {window} is the cost model's: {traffic.run_blocks:.1f} blocks,"
            f" {size / 1e6:,.3g} MB, in {seconds(load.service_s)} at"
            f" {figures.load_bandwidth.value / 1e6:,.4g} MB/s ({figures.load_bandwidth.origin.value}), and"
            f" {seconds(load.wait_s)} in the queue."
        )
        if load.utilization > SATURATED:
            said.append(
                f"Loads come at {load.utilization:.3g} times the rate the load path can serve, so the wait"
                " in its queue is cut off and the window a lower bound."
            )
    if names := figures.defaults():
        said.append(f"Not measured but assumed: {', '.join(names)}.")
    return said


def _flips(gate: Gate, flip_s: float | None) -> list[str]:
    per_lookup = gate.figures.coordination_per_lookup.value
    worst = min(gate.neighbourhood, key=lambda point: point.costs.margin).costs
    room = worst.saving - worst.waits
    now = worst.coordination
    if flip_s is None:
        said = [f"No load window up to {window_label(LONGEST_MS)} would make it a yes."]
    else:
        w_eff = window_label(gate.w_eff_ms(flip_s))
        where = f"{seconds(flip_s)} (W_eff {w_eff} of trace time)"
        said = [f"Loads shorter than {where}." if gate.enable else f"Loads of {where} and longer."]
    if room <= 0:
        said.append(
            "No coordination cost, however small: "
            + ("what is saved is less than the waits." if worst.avoidable else "there is nothing to save.")
        )
    elif now:
        verb = "more" if gate.enable else "less"
        said.append(
            f"Coordination at {room / now:.3g} times its cost or {verb}"
            f" ({seconds(per_lookup)} a request now, {gate.figures.coordination_per_lookup.origin.value})."
        )
    return said


def show(console: Console, of: Verdict) -> None:
    """Print it for people."""
    scope, rates, fractions = of.scope, of.rates, of.fractions
    answer = "[bold green]yes[/], coalesce" if of.enable else "[bold red]no[/], do not coalesce"
    console.print(
        f"{scope.trace}, {scope.instances} x {scope.capacity_blocks:,} blocks of {scope.block_size_tokens}"
        f" tokens, {scope.routing}, {scope.scale:g} times as fast: {answer}",
        highlight=False,
    )
    table = Table(show_header=False)
    rows: dict[str, str] = {
        "load window W": seconds(scope.window_ms / 1000) + f" (W_eff {window_label(scope.w_eff_ms)})",
        "duplicate cohorts": f"{100 * fractions.duplicate_cohorts:.4f} %",
        "duplicate attempts": f"{100 * fractions.duplicate_attempts:.4f} %",
        "removable attempts": f"{100 * fractions.removable_attempts:.4f} %",
        "removable block loads": f"{rates.removable_loads_per_s:.4g} of"
        f" {rates.cold_loads_per_s:.4g} a second",
        "saving": f"{rates.saving_s_per_s:.4g} request-seconds a second",
        "  lost parallelism, taken off": f"{rates.lost_parallelism_s_per_s:.4g}",
        "coordination": f"{rates.coordination_s_per_s:.4g}",
        "waits and failures": f"{rates.waits_s_per_s:.4g}",
        "margin": f"{of.margin.stated:+.4g} ({of.margin.low:+.4g} to {of.margin.high:+.4g})",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    for sentence in of.reasons:
        console.print(f"- {sentence}", highlight=False)
    console.print("What would flip it:", style="bold")
    for sentence in of.flips:
        console.print(f"- {sentence}", highlight=False)
    console.print(quantities(of.figures))


def plot(path: Path, gate: Gate, of: Verdict) -> None:
    """Saving and cost against the window.

    Raises:
        OSError: `path` cannot be written.
    """
    from singleflight.sim import plots
    from singleflight.traces.writer import replaced

    curve = gate.curve()

    def band(of_point: Callable[[Point], float]) -> list[tuple[float, float]]:
        return [(min(map(of_point, points)), max(map(of_point, points))) for points in curve]

    bands = {
        "saving": band(lambda at: at.costs.saving),
        "cost: coordination, waits, failures": band(lambda at: at.costs.coordination + at.costs.waits),
    }
    with replaced(path) as raw:
        plots.balance(
            raw,
            f"{of.scope.trace}: {'yes' if of.enable else 'no'}",
            [points[0].window_s for points in curve],
            bands,
            gate.load.window_s,
            (SENSITIVITY[0], SENSITIVITY[-1]),
        )
