"""`trace convert --to timed`, through the reader of `vllm bench serve` itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from singleflight.cli.main import app
from singleflight.traces import writer
from singleflight.traces.reader import FORMATS
from singleflight.traces.synth import Synth, generate

BLOCK = 64


class Tokenizer:
    """All that vLLM's reader asks of one."""

    all_special_ids = (0,)

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(50_000)}


def test_vllms_own_reader_gets_the_trace_that_was_converted(tmp_path: Path) -> None:
    from vllm.benchmarks.datasets import datasets
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    trace = list(
        generate(Synth("agents", requests=60, seed=2, own_blocks=3, shared_blocks=2, block_size=BLOCK))
    )
    source, target = str(tmp_path / "s.jsonl"), str(tmp_path / "t.jsonl")
    writer.write(source, trace, FORMATS["mooncake"])
    run = CliRunner().invoke(
        app, ["trace", "convert", source, target, "--to", "timed", "--block-size", str(BLOCK), "--json"]
    )
    assert run.exit_code == 0, run.stderr

    parser = FlexibleArgumentParser()
    datasets.add_dataset_parser(parser)
    told = run.stderr.partition("vllm bench serve ")[2].split()
    arguments: dict[str, Any] = vars(parser.parse_args(told))
    samples = datasets.TimedTrace(**arguments).sample(Tokenizer(), arguments["num_prompts"])

    assert [sample.timestamp for sample in samples] == [r.timestamp_ms / 1000 for r in trace]
    assert [sample.prompt_len for sample in samples] == [r.lengths.input for r in trace]
    assert [sample.expected_output_len for sample in samples] == [r.lengths.output for r in trace]
    # Two prompts have a block of tokens in common exactly where the trace says so.
    chunks: dict[int, set[tuple[int, ...]]] = {}
    for sample, request in zip(samples, trace, strict=True):
        for i, name in enumerate(request.hashes):
            tokens = tuple(sample.prompt[i * BLOCK : (i + 1) * BLOCK])
            if len(tokens) == BLOCK:
                chunks.setdefault(name, set()).add(tokens)
    assert all(len(contents) == 1 for contents in chunks.values())
    assert len(set.union(*chunks.values())) == len(chunks)
