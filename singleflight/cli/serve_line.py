"""`singleflight doctor --model`: what would our connector come to behind this `vllm serve` line?"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .doctor import Finding, Grade

PATIENCE_S = 900
"""Until vLLM has read the configuration and built the model without its weights. A minute for most; one of
hundreds of billions of parameters has tens of thousands of modules."""


def findings(model: str, arguments: list[str]) -> Iterator[Finding]:
    """One for each mode, after what they follow from; or why there is no answer."""
    told = _preview(model, arguments)
    if "error" in told:
        yield Finding("vllm serve", Grade.BAD, told["error"])
        return
    unseen = told["unseen"]
    yield Finding(
        "KV cache",
        Grade.NOTE if unseen else Grade.OK,
        told["kv_cache"] + (f"; not looked at, and may change the answer: {unseen}" if unseen else ""),
    )
    if told["uses"]:
        yield Finding("rows of the compatibility matrix", Grade.OK, "; ".join(told["uses"]))
    for mode, reason in told["refusals"].items():
        says = "would be on" if reason is None else f"would pass through to the stock connector: {reason}"
        yield Finding(f"{mode} mode", Grade.OK if reason is None else Grade.NOTE, says)
    if told["asked"] == "auto":
        impossible = told["refusals"]["attach"]
        if told["objection"] is None and impossible is None:
            yield Finding("auto mode", Grade.OK, "would choose attach, as the verdict says")
        else:
            but = f"the verdict says yes, but attach mode is not possible here: {impossible}"
            says = f"would choose shadow (counts, changes nothing): {told['objection'] or but}"
            yield Finding("auto mode", Grade.NOTE, says)


def _preview(model: str, arguments: list[str]) -> dict[str, Any]:
    """As `connector_patch.preview` writes it, or {"error": one sentence}."""
    if importlib.util.find_spec("vllm") is None:
        return {"error": "not asked, since vLLM is not installed"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "preview.json"
        argv = [sys.executable, "-m", "connector_patch.preview", str(out), model, *arguments]
        env = {"VLLM_LOGGING_LEVEL": "ERROR", **os.environ}
        try:
            done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            return {"error": f"vLLM had not built the model without its weights after {PATIENCE_S} s"}
        if out.exists():
            told: dict[str, Any] = json.loads(out.read_text())
            return told
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}, without a word"])[-1]
    return {"error": f"no answer from vLLM: {last}"}
