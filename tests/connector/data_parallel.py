"""Two data-parallel engines that record, as a server of a dense model starts them.

`python -m tests.connector.data_parallel MODEL TRACE` sends one request to the first and two to the second.
It ends once all three are recorded. The environment is that of `Stack.env`; the engines are processes.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from connector_patch.plugin import NAME, register
from tests.support import BLOCK, STUCK_S

ASKED = {0: [1], 1: [2, 3]}
"""Engine -> the requests it gets, by number."""


async def serve(model: str, trace: str) -> None:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    register()
    transfer = {
        "kv_connector": NAME,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"singleflight": {"mode": "attach", "record": {"path": trace}}},
    }
    arguments = AsyncEngineArgs(
        model=model,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=BLOCK,
        max_model_len=2048,
        data_parallel_size=len(ASKED),
        kv_transfer_config=transfer,  # type: ignore[arg-type]
    )
    engines = AsyncLLM.from_engine_args(arguments)
    try:

        async def ask(number: int, engine: int) -> None:
            parameters = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
            prompt = {"prompt_token_ids": [3 + number] * (BLOCK * number)}
            async for _ in engines.generate(prompt, parameters, f"r{number}", data_parallel_rank=engine):
                pass

        await asyncio.gather(*(ask(n, engine) for engine, numbers in ASKED.items() for n in numbers))
        files = [Path(f"{trace}.dp{engine}") for engine in ASKED]
        async with asyncio.timeout(STUCK_S):
            while sum(file.read_text().count("\n") for file in files if file.exists()) < 3:
                await asyncio.sleep(0.01)
    finally:
        engines.shutdown()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
