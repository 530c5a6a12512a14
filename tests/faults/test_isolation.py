"""Who must never share a flight: requests whose blocks differ in anything but their tokens' value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from singleflight.core.table import PendingBlockTable
from tests.support import BLOCK, blocks, expect_equal, finish, store_prefixes, until_scheduled

if TYPE_CHECKING:
    from connector_patch.lab.engine import Engine
    from singleflight.stack.arms import Arm

MakeRequest = Callable[..., Any]


@pytest.fixture
def make(engine: Engine) -> MakeRequest:
    """A real vLLM request, hashed by the engine's own hasher; the engine does not get to see it."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    def request(request_id: str, prompt: list[int], **kwargs: Any) -> Any:
        parameters = SamplingParams(max_tokens=1, **kwargs.pop("sampling", {}))
        return Request(
            request_id, prompt, parameters, None, block_hasher=engine.core.request_block_hasher, **kwargs
        )

    return request


@pytest.fixture
def flight(engine: Engine) -> Iterator[Callable[[Any], None]]:
    """Put a flight into the table that loads all of a request's full blocks."""
    attach, pool = engine.connector.layer, engine.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(4)
    flights = []

    def lead(request: Any) -> None:
        flights.append(attach.table.lead("leader", request.block_hashes[:4], taken, attach._clock()))

    yield lead
    for flight in flights:
        attach.table.fail(flight.generation)
    pool.free_blocks(taken)


def lora(name: str, path: str) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, 1, path)


def image(identifier: str, offset: int) -> list[Any]:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    return [MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, 8))]


DIFFERENCES = {
    "cache salt": ({"cache_salt": "tenant-a"}, {"cache_salt": "tenant-b"}),
    "a salt and none": ({"cache_salt": "tenant-a"}, {}),
    "LoRA adapter": ({"lora": ("sql", "/a")}, {"lora": ("math", "/a")}),
    "LoRA weights under one name": ({"lora": ("sql", "/v1")}, {"lora": ("sql", "/v2")}),
    "an adapter and none": ({"lora": ("sql", "/a")}, {}),
    "image": ({"image": ("cat", 4)}, {"image": ("dog", 4)}),
    "place of the image": ({"image": ("cat", 4)}, {"image": ("cat", 5)}),
}


def arguments(given: dict[str, Any]) -> dict[str, Any]:
    made = dict(given)
    if "lora" in made:
        made["lora_request"] = lora(*made.pop("lora"))
    if "image" in made:
        made["mm_features"] = image(*made.pop("image"))
    return made


@pytest.mark.engine
@pytest.mark.parametrize(("one", "other"), DIFFERENCES.values(), ids=DIFFERENCES.keys())
def test_the_same_tokens_of_another_tenant_adapter_or_image_are_not_pending(
    engine: Engine,
    salt: int,
    make: MakeRequest,
    flight: Callable[[Any], None],
    one: dict[str, Any],
    other: dict[str, Any],
) -> None:
    """Hazard I1; vllm#44250, #45549, vllm#53495, sglang#37160. A flight of one of them is in the air. Another
    like it adopts all of its blocks; the one that differs in one thing adopts none and finds nothing in the
    store: its wait is that of a cold load."""
    prompt = [*blocks(*range(1, 5), salt=salt), 7]
    attach = engine.connector.layer
    flight(make("leader", prompt, **arguments(one)))
    assert attach.match(make("same", prompt, **arguments(one)), 0) == (4 * BLOCK, True)
    assert attach.match(make("other", prompt, **arguments(other)), 0)[0] == 0
    attach.finished("same")


@pytest.mark.engine
@pytest.mark.parametrize("sampling", [{"prompt_logprobs": 1}, {"skip_reading_prefix_cache": True}])
def test_who_must_not_read_the_prefix_cache_does_not_attach(
    engine: Engine, salt: int, make: MakeRequest, flight: Callable[[Any], None], sampling: dict[str, Any]
) -> None:
    """Hazard I5; vllm#57418. It neither attaches nor asks the store: it must compute every token."""
    prompt = [*blocks(*range(1, 5), salt=salt), 7]
    flight(make("leader", prompt))
    request = make("skips", prompt, sampling=sampling)
    assert request.skip_reading_prefix_cache
    assert engine.connector.layer.match(request, 0) == (0, False)
    assert engine.recorder.take().lookups == 0


@pytest.mark.engine
def test_a_request_that_skips_the_cache_arrives_during_a_flight(
    engine: Engine, reference: Arm, salt: int
) -> None:
    """Hazard I5, on the engine: it computes at once, while the leader's Get hangs and a follower waits."""
    trunk = blocks(*range(1, 5), salt=salt)
    store_prefixes(engine, trunk)
    prompts = {"leader": [*trunk, 7], "follower": [*trunk, 8], "skips": [*trunk, 9]}
    engine.gate.open.clear()
    burst, steps = until_scheduled(engine, {k: prompts[k] for k in ("leader", "follower")})
    engine.add("skips", prompts["skips"], skip_reading_prefix_cache=True)
    while "skips" not in burst.tokens:
        next(steps)
    assert set(burst.tokens) == {"skips"}
    tokens = finish(engine, burst, steps)
    assert engine.recorder.take().gets == 1
    expect_equal(reference, prompts, tokens)


@pytest.mark.engine
def test_tenants_share_within_a_salt_and_never_across(engine: Engine, reference: Arm, salt: int) -> None:
    """Hazard I1, on the engine: three requests of tenant x and two of tenant y, the same tokens: one Get for
    each tenant, into blocks of its own."""
    from vllm import SamplingParams

    trunk = blocks(*range(1, 5), salt=salt)
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)

    def ask(names: list[str], token: int) -> None:
        for name in names:
            prompt = {"prompt_token_ids": [*trunk, token], "cache_salt": f"{name[0]}-{salt}"}
            engine.llm.add_request(name, prompt, greedy)

    ask(["x-fill", "y-fill"], 5)
    engine.cold()
    engine.recorder.take()
    stats = engine.connector.layer.table.stats
    attached = stats.attached
    ask(["x0", "y0", "x1", "x2", "y1"], 7)
    engine.gate.open.clear()
    while len(engine.recorder.waiting) < 5:
        engine.step()
    engine.gate.open.set()
    tokens = engine.burst({}).tokens
    counts = engine.recorder.take()
    assert (counts.gets, counts.keys, counts.gpu_blocks, stats.attached - attached) == (2, 8, 8, 3)
    expect_equal(reference, {name: [*trunk, 7] for name in tokens}, tokens)
    assert len(tokens) == 5


@pytest.mark.engine
def test_one_block_four_times_in_a_prompt_is_four_blocks(engine: Engine, reference: Arm, salt: int) -> None:
    """Hazard I3. A block's hash covers the whole prefix, so the second copy of a block is not the first."""
    trunk = blocks(1, 1, 1, 1, salt=salt)
    store_prefixes(engine, trunk)
    prompts = {"leader": [*trunk, 7], "same": [*trunk, 8], "two": [*trunk[: 2 * BLOCK], 9]}
    burst = engine.burst(prompts, barrier=True)
    counts = engine.recorder.take()
    assert (counts.gets, counts.keys, counts.gpu_blocks) == (1, 4, 4)
    expect_equal(reference, prompts, burst.tokens)


@pytest.mark.engine
def test_a_block_that_is_not_full_is_nobodys_but_its_own(engine: Engine, reference: Arm, salt: int) -> None:
    """Hazards I4, A6. Three prompts share four blocks and the first half of a fifth. The half has no hash:
    each computes it in a block of its own."""
    trunk, half = blocks(*range(1, 5), salt=salt), blocks(5, salt=salt)[: BLOCK // 2]
    store_prefixes(engine, [*trunk, *half])
    prompts = {f"r{i}": [*trunk, *half, 7 + i] for i in range(3)}
    engine.gate.open.clear()
    burst, steps = until_scheduled(engine, prompts)
    assert engine.connector.layer.table.stats.blocks_adopted
    engine.gate.open.set()
    manager = engine.scheduler.kv_cache_manager
    while len(engine.scheduler.running) < 3:
        next(steps)
    held = [manager.get_block_ids(request.request_id)[0] for request in engine.scheduler.running]
    assert len({tuple(ids[:4]) for ids in held}) == 1
    assert len({ids[4] for ids in held}) == 3
    tokens = finish(engine, burst, steps)
    assert engine.recorder.take().keys == 4
    expect_equal(reference, prompts, tokens)


@pytest.mark.engine
def test_that_one_block_is_missing_says_nothing_about_another(
    engine: Engine, reference: Arm, salt: int
) -> None:
    """Hazard A4; DingoCache#163. The leader's lookup has found its fifth block missing. Of two followers, the
    one with the same fifth block believes that, the one with another fifth block asks, and loads it."""
    trunk, branch = blocks(1, 2, 3, 4, 5, salt=salt), blocks(1, 2, 3, 4, 50, salt=salt)
    store_prefixes(engine, trunk[: 4 * BLOCK], branch)
    prompts = {"leader": [*trunk, 7], "same": [*trunk, 8], "branch": [*branch, 9]}
    burst = engine.burst(prompts, barrier=True)
    counts = engine.recorder.take()
    assert (counts.lookups, counts.gets, counts.keys) == (2, 2, 5)
    expect_equal(reference, prompts, burst.tokens)


@pytest.mark.engine
def test_the_table_is_keyed_by_the_whole_digest(
    engine: Engine, salt: int, make: MakeRequest, flight: Callable[[Any], None]
) -> None:
    """Hazard I3; vllm#12621. Its keys are the very hashes that vLLM's own prefix cache uses, all 32 bytes."""
    request = make("leader", [*blocks(*range(1, 5), salt=salt), 7])
    flight(request)
    assert set(engine.connector.layer.table._pending) == set(request.block_hashes)
    assert {len(block_hash) for block_hash in request.block_hashes} == {32}


@pytest.mark.parametrize("byte", [0, 7, 8, 15, 31])
def test_hashes_that_differ_in_one_byte_are_different(byte: int) -> None:
    """Hazard I3: whatever part of a digest somebody may cut off, it counts."""
    one, other = bytearray(range(32)), bytearray(range(32))
    other[byte] ^= 1
    table = PendingBlockTable()
    assert table.lead("leader", [bytes(one)], ["block"], 0.0) is not None
    assert table.find(bytes(other)) is None
    assert table.run([bytes(other)], 0, 1) == []


@pytest.mark.engine
@pytest.mark.parametrize(("hash_block", "partial"), [(16, False), (32, True)])
def test_hashes_finer_than_blocks_pass_through(ours: Engine, hash_block: int, partial: bool) -> None:
    """Hazard I4; Mooncake#4153: a coarse block must not count as present because part of it is."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from connector_patch import compat

    manager = KVCacheManager.__new__(KVCacheManager)
    manager.enable_caching = True
    scheduler = SimpleNamespace(_block_size=32, _hash_block_size=hash_block, enable_partial_hash_hits=partial)
    assert "finer than blocks" in str(compat.unsupported_manager(manager, scheduler))
