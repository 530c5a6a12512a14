"""Azure and BurstGPT traces: recognised by their header and refused. They have lengths but no content
identity, and "0 % redundancy" would be an answer nobody measured."""

from __future__ import annotations

from singleflight.traces.errors import BadLine

HEADERS = {
    "an Azure LLM inference trace": {"timestamp", "contexttokens", "generatedtokens"},
    "a BurstGPT trace": {"timestamp", "model", "request tokens", "response tokens"},
}


def refuse(first_line: bytes) -> None:
    """Look at the first line of a file.

    Raises:
        BadLine: it is the header of a trace without block hashes.
    """
    columns = {each.strip().strip('"').lower() for each in first_line.decode("latin-1")[:500].split(",")}
    for name, header in HEADERS.items():
        if header <= columns:
            raise BadLine(
                f"{name}: lengths only, no content identity, so there is no answer to give",
                "traces with block hash ids (mooncake, qwen-bailian)",
            )
