"""pytest plugin (`-p tests.faults.force_async`): asynchronous scheduling on CPU, where vLLM turns it off.

On GPUs it is the default: the scheduler is one step ahead of what it knows of the worker. Patched are the
platform hook that turns it off, and the CUDA streams and events of which the CPU needs none: a copy on a
CPU is complete when the call returns.
"""

from __future__ import annotations

import contextlib
from typing import Any

used: set[str] = set()


class _Done:
    """A stream or an event on which nothing is ever outstanding."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...


def pytest_configure() -> None:
    import torch
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.core.sched.scheduler import Scheduler

    stock = CpuPlatform.check_and_update_config

    def hook(cls: Any, vllm_config: Any) -> None:
        stock(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    made = Scheduler.__init__

    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        used.add(type(self).__name__)
        made(self, *args, **kwargs)

    Scheduler.__init__ = note  # type: ignore[method-assign]
    CpuPlatform.check_and_update_config = classmethod(hook)  # type: ignore[method-assign]
    torch.cuda.Event = torch.cuda.Stream = _Done  # type: ignore[misc, assignment]
    torch.cuda.current_stream = lambda *args: _Done()  # type: ignore[assignment, return-value]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say which scheduler has run, so that whoever started us can be sure."""
    terminalreporter.write_line(f"forced: {', '.join(sorted(used))}")
