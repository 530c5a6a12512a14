"""How long the engine's steps take: prefills of several lengths and decodes of several sizes, on an engine of
the model that is served, without a connector."""

from __future__ import annotations

import collections
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from singleflight.files import shown
from singleflight.gate.fit import line

from .. import compat

LENGTHS = (16, 64, 256, 1024, 4096)
"""Tokens of a prompt, as far as a step takes them."""
BATCHES = (1, 4, 16)
"""Requests that decode together."""
DECODED = 16
SHORT = 16
"""Prompt tokens of those."""
ROUNDS = 5
"""Each length and batch is timed once a round, so that what disturbs a while disturbs all of them alike."""
MOST_ROUNDS = 25
"""Where other work on the machine makes the times absurd, further rounds take the place of the oldest."""


class EngineError(RuntimeError):
    """The engine cannot be measured; one sentence."""


@dataclass(frozen=True)
class Measured:
    """Of lone prompts and decoding batches.

    Attributes:
        prefill_s: prompt tokens -> median seconds to its first token. decode_s: requests -> of a step.
        step_overhead_s, per_token_s, per_pair_s, per_request_s: the plane through them.
        kv_bytes_per_token: of KV cache, all layers and ranks.
    """

    prefill_s: dict[int, float]
    decode_s: dict[int, float]
    step_overhead_s: float
    per_token_s: float
    per_pair_s: float
    per_request_s: float
    kv_bytes_per_token: float

    def figures(self) -> dict[str, float]:
        return {
            "step_overhead": self.step_overhead_s,
            "prefill_rate": 1 / self.per_token_s,
            "attention": self.per_pair_s,
            "decode_per_request": self.per_request_s,
            "kv_bytes_per_token": self.kv_bytes_per_token,
        }

    def note(self) -> str:
        prefills = ", ".join(f"{n:,} in {1000 * s:.1f} ms" for n, s in self.prefill_s.items())
        decodes = ", ".join(f"{n} in {1000 * s:.2f} ms" for n, s in self.decode_s.items())
        return f"Engine: prompts of tokens, medians of {ROUNDS}: {prefills}; steps that decode: {decodes}."


def measure(model: str, engine_arguments: Mapping[str, Any], say: Callable[[str], None]) -> Measured:
    """Start an engine, measure it, end it.

    Args:
        engine_arguments: further ones of vLLM's `EngineArgs`.
        say: told what is done now.

    Raises:
        EngineError: it does not start, or its times do not grow with the prompt.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    say("measuring the engine: it starts")
    arguments = {
        "model": model,
        "skip_tokenizer_init": True,
        # A prompt must be computed each time.
        "enable_prefix_caching": False,
        **engine_arguments,
    }
    try:
        engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    except Exception as fault:  # whatever vLLM trips over
        raise EngineError(f"no engine starts with {shown.path(model)}: {shown.text(fault, 300)}") from None
    try:
        say("measuring the engine: prefills and decodes")
        scheduler = engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
        block_bytes = compat.bytes_per_block(engine.vllm_config, scheduler.kv_cache_config)
        return settled(_rounds(engine), block_bytes / scheduler.block_size)
    finally:
        engine.engine_core.shutdown()


@dataclass(frozen=True)
class Round:
    """One look at everything: tokens of a lone prompt, and decoding requests, -> seconds."""

    prefill_s: dict[int, float]
    decode_s: dict[int, float]


def settled(rounds: Iterator[Round], kv_bytes_per_token: float) -> Measured:
    """Medians over the first `ROUNDS` rounds in a row that are credible.

    Raises:
        EngineError: none of `MOST_ROUNDS` are.
    """
    lately = collections.deque(itertools.islice(rounds, ROUNDS), ROUNDS)
    for _ in range(MOST_ROUNDS - ROUNDS):
        with contextlib.suppress(EngineError):
            return fitted(lately, kv_bytes_per_token)
        lately.append(next(rounds))
    return fitted(lately, kv_bytes_per_token)


def fitted(rounds: Sequence[Round], kv_bytes_per_token: float) -> Measured:
    """The plane through medians.

        seconds = overhead + tokens x per token + pairs x per pair + decoding requests x per request

    Raises:
        EngineError: a step costs nothing, or a token does.
    """
    prefill_s = {n: statistics.median(each.prefill_s[n] for each in rounds) for n in rounds[0].prefill_s}
    decode_s = {
        n: max(1e-9, statistics.median(each.decode_s[n] for each in rounds)) for n in rounds[0].decode_s
    }
    rows = [(n, n * (n - 1) / 2, 0, s) for n, s in prefill_s.items()]
    rows += [(0, 0, n, s) for n, s in decode_s.items()]
    tokens, pairs, requests, seconds = zip(*rows, strict=True)
    overhead, per_token, per_pair, per_request = line(seconds, tokens, pairs, requests)
    if overhead <= 0 or per_token <= 0:
        raise EngineError(
            "the engine's times do not grow with the prompt, so this measured something else; try again on a"
            f" quiet machine ({', '.join(f'{n} tokens: {1000 * s:.2f} ms' for n, s in prefill_s.items())})"
        )
    costs = (overhead, per_token, per_pair, per_request)
    return Measured(prefill_s, decode_s, *costs, kv_bytes_per_token)


def _rounds(engine: Any) -> Iterator[Round]:
    """Without end; the first look, which warms up, is not among them."""
    config = engine.vllm_config
    most = min(
        config.scheduler_config.max_num_batched_tokens, config.model_config.max_model_len - DECODED - 1
    )
    numbers = itertools.count()

    def run(requests: int, tokens: int, output: int) -> float:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        started = time.perf_counter()
        for _ in range(requests):
            number = next(numbers)
            prompt = {"prompt_token_ids": [3 + (7 * number + i) % 90 for i in range(tokens)]}
            engine.add_request(f"calibrate-{number}", prompt, sampling)
        while engine.has_unfinished_requests():
            engine.step()
        return time.perf_counter() - started

    lengths = [n for n in LENGTHS if n <= most]
    batches = [n for n in BATCHES if n <= config.scheduler_config.max_num_seqs]

    def look() -> Round:
        return Round(
            {n: run(1, n, 1) for n in lengths},
            {n: (run(n, SHORT, 1 + DECODED) - run(n, SHORT, 1)) / DECODED for n in batches},
        )

    look()
    while True:
        yield look()
