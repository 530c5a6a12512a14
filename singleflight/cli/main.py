"""The command `singleflight`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.table import Table

from ..stack import demo, probe
from ..stack.arms import OURS, STOCK
from ..stack.embedded import EmbeddedError, Ports, Stack
from ..stack.tiny_model import ModelError
from ..terminal import console
from . import doctor, serve_line
from .gate import register as register_gate_commands
from .simulate import register as register_sim_commands

app = typer.Typer(
    help="Single-flight KV loading for vLLM with Mooncake.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

register_sim_commands(app)
register_gate_commands(app)

Result = TypeVar("Result")
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on stdout.")]
RpcPort = Annotated[int, typer.Option(help="Port of the embedded mooncake_master; 0: a free one.", max=65535)]


def _on_stack(rpc_port: int, work: Callable[[Stack, Callable[[str], None]], Result]) -> Result:
    """Run `work(stack, say)` on an embedded stack, with progress; a failure is one sentence."""
    with console.orderly(), console.progress() as bar:
        task = bar.add_task("starting mooncake_master and a store node")
        try:
            with Stack(Ports(rpc=rpc_port)) as stack:
                return work(stack, lambda text: bar.update(task, description=text))
        except (EmbeddedError, ModelError) as error:
            console.stop(str(error), console.FAILED)


@app.command("demo")
def demo_command(
    out: Annotated[Path, typer.Option(help="Folder for demo.json and demo.png.")] = Path("demo-out"),
    rpc_port: RpcPort = 0,
    json: Json = False,
) -> None:
    """Bursts over a cold 4,096-token prefix, stock against ours, on a real stack (about two minutes)."""
    rounds = _on_stack(rpc_port, demo.run)
    cells = demo.summary(rounds, STOCK, OURS)
    demo.write(out / "demo.json", rounds, cells)
    try:
        demo.plot(out / "demo.png", rounds, cells, STOCK, OURS)
    except ImportError:
        console.err.print("no picture: `pip install 'kv-singleflight[plot]'` brings matplotlib")
    if json:
        typer.echo((out / "demo.json").read_text())
    else:
        console.out.print(_demo_table(cells))
        console.out.print(f"Tokens equal in all rounds: {'yes' if demo.tokens_equal(rounds) else 'NO'}")
        console.out.print(f"Written: {out / 'demo.json'}, {out / 'demo.png'}", soft_wrap=True)
    if not demo.tokens_equal(rounds):
        console.stop("the two connectors did not generate the same tokens", console.FAILED)


LABELS = {
    "gets": "Gets",
    "gpu_blocks": "GPU blocks",
    "ttft_p50_s": "TTFT p50 (s)",
    "ttft_p95_s": "TTFT p95 (s)",
    "ttft_max_s": "TTFT max (s)",
    "wall_s": "wall (s)",
}


def _demo_table(cells: list[demo.Cell]) -> Table:
    table = Table(
        title=f"One cold prefix of {demo.PREFIX_TOKENS:,} tokens: stock → single-flight"
        f" (medians of {demo.ROUNDS} rounds)"
    )
    table.add_column("")
    for cell in cells:
        table.add_column(f"{cell.requests} requests\n{cell.link}", justify="right")
    scale = {"bytes": 1e-6}
    for name in (*demo.COUNTED, *demo.TIMED):
        form = "{:,.2f}" if name in demo.TIMED else "{:,.0f}"
        row = []
        for cell in cells:
            before, after = (form.format(f[name] * scale.get(name, 1)) for f in (cell.stock, cell.ours))
            row.append(f"{before} → {after}")
        label = LABELS.get(name, name.replace("_", " "))
        table.add_row(f"{label} (MB)" if name == "bytes" else label, *row)
    return table


@app.command("probe")
def probe_command(
    requests: Annotated[int, typer.Option(help="Requests that arrive together.", min=2, max=128)] = 8,
    rpc_port: RpcPort = 0,
    json: Json = False,
) -> None:
    """Count what N requests for one cold block cost, stock and ours. Exit 0 only if it is N and 1."""
    result = _on_stack(rpc_port, lambda stack, say: probe.run(requests, stack, say))
    if json:
        console.print_json(result.as_json())
    else:
        table = Table("", "stock", "single-flight", title=f"{requests} requests, one cold block")
        for name in probe.COUNTED:
            table.add_row(
                LABELS.get(name, name.replace("_", " ")),
                str(result.stock[name]),
                str(result.singleflight[name]),
            )
        console.out.print(table)
    for problem in result.problems():
        console.err.print(f"[bold red]wrong:[/] {problem}", highlight=False)
    if result.problems():
        raise typer.Exit(console.FAILED)


@app.command("doctor", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def doctor_command(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            help="Also say which modes would be on behind `vllm serve MODEL`, and why not. All further"
            " arguments are those of the serve line; put them after `--` if they look like doctor's own."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Would serving work here? One line a question. Exit 1 if anything is bad; notes are fine."""
    if context.args and model is None:
        console.stop(f"{context.args[0]!r} is not accepted; arguments of `vllm serve` need --model MODEL")
    asked = doctor.findings()
    if model is not None:
        asked = itertools.chain(asked, serve_line.findings(model, context.args))
    colours = {doctor.Grade.OK: "green", doctor.Grade.NOTE: "yellow", doctor.Grade.BAD: "bold red"}
    found = []
    for finding in asked:
        found.append(finding)
        if not json:
            label = f"[{colours[finding.grade]}]{finding.grade.value:>4}[/]  {finding.what}: "
            console.out.print(label, end="", highlight=False)
            console.out.print(finding.says, markup=False, highlight=False, soft_wrap=True)
    if json:
        console.print_json([{"what": f.what, "grade": f.grade.value, "says": f.says} for f in found])
    if any(f.grade is doctor.Grade.BAD for f in found):
        raise typer.Exit(console.FAILED)


def main() -> None:
    """Called by `connector_patch.command`."""
    app()
