"""What KV memory can hold: one number for each token slot, which stands for the token and all before it.

So a slot that holds the right token after a wrong prefix is wrong, as it is in a model.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.request import Request

POISON: Final = 1
"""Written into blocks that are given back or handed out."""
IN_AIR: Final = 2
"""A load may be writing here."""
RUBBISH: Final = 3
"""What a failed load has left."""
STALE: Final = 4
"""From a load that was in the air when the caches were reset."""
SENTINELS: Final = {POISON: "poison", IN_AIR: "in the air", RUBBISH: "rubbish", STALE: "from before a reset"}


def root(salt: str | None) -> int:
    """Before the first token. A tenant's KV is nothing to another tenant, and an adapter's to no other."""
    return 1 << 20 | zlib.crc32((salt or "").encode())


def after(content: int, token: int) -> int:
    """The content of the slot after one with `content`."""
    return hash((content, token))  # of integers: the same in every process


def extend(content: int, tokens: Iterable[int]) -> list[int]:
    contents = []
    for token in tokens:
        content = after(content, token)
        contents.append(content)
    return contents


def in_group(contents: Sequence[int], group: int) -> list[int]:
    """The same slots in the memory of another KV-cache group: other layers, other numbers."""
    return [hash((content, group)) for content in contents] if group else list(contents)


def next_token(content: int) -> int:
    """What the model says after a slot with `content`: any other content, another token."""
    return content % 1_000_003 + 100_000


def session(chunks: Iterable[tuple[Sequence[int], int]], salt: str | None) -> list[int]:
    """What a request says that is fed in chunks and runs alone.

    A chunk is its prompt tokens, and how many tokens are said after them. The last of those is not kept
    before the next chunk, as in vLLM.
    """
    content, said = root(salt), []
    for prompt, tokens in chunks:
        content = extend(content, prompt)[-1]
        for i in range(tokens):
            said.append(next_token(content))
            if i < tokens - 1:
                content = after(content, said[-1])
    return said


class Hashes:
    """vLLM's block hashes, each with the contents of its block. `hasher` is for `Request(block_hasher=)`."""

    def __init__(self, block_size: int) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core import kv_cache_utils

        self._contents: dict[bytes, list[int]] = {}
        self.images: dict[str, list[int]] = {}
        """What stands for each image, one number for each of its placeholders."""
        self.embeds: dict[bytes, list[int]] = {}
        """The digest of a block's prompt embeddings -> a number for each of them."""
        if not hasattr(kv_cache_utils, "NONE_HASH"):
            kv_cache_utils.init_none_hash(sha256)
        self._none: bytes = kv_cache_utils.NONE_HASH
        self.hasher: Callable[[Request], list[BlockHash]] = kv_cache_utils.get_request_block_hasher(
            block_size, self._hash
        )

    def of(self, block_hash: bytes, group: int = 0) -> list[int]:
        """The contents of the block with this hash."""
        return in_group(self._contents[bytes(block_hash)], group)

    def of_prompt(self, tokens: Sequence[int], salt: str | None, block_size: int) -> dict[bytes, list[int]]:
        """Hashes of whole blocks, in order, each with its contents."""
        parent, found = self._none, {}
        for start in range(0, len(tokens) // block_size * block_size, block_size):
            extra = (("cache_salt", salt),) if salt and not start else None
            parent = self._hash((parent, tuple(tokens[start : start + block_size]), extra))
            found[parent] = self._contents[parent]
        return found

    def _hash(self, what: tuple[bytes, tuple[int, ...], tuple[Any, ...] | None]) -> bytes:
        parent, tokens, extra = what
        if parent == self._none:
            salts = [key[1] for key in extra or () if key[0] in ("lora", "cache_salt")]
            before = root(" ".join(salts) or None)
        else:
            before = self._contents[bytes(parent)][-1]
        contents = extend(before, self._seen(tokens, extra or ()))
        block_hash = contents[-1].to_bytes(8, "big", signed=True)
        self._contents[block_hash] = contents
        return block_hash

    def _seen(self, tokens: Sequence[int], extra: Iterable[tuple[Any, ...]]) -> list[int]:
        """The block's tokens, with its images where their placeholders are; or its embeddings."""
        seen = list(tokens)
        for kind, name, *where in extra:
            if kind == "prompt_embeds":
                given = self.embeds[name]
                seen = [*given, *seen[len(given) :]]
            if kind == "mm":
                for i, number in enumerate(self.images[name], where[0]):
                    if 0 <= i < len(seen):
                        seen[i] = number
        return seen


def describe(content: int) -> str:
    return SENTINELS.get(content, f"content {content & 0xFFFF:04x}")
