"""Beside other connectors, and over several tensor-parallel ranks."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from connector_patch.health import Health
from connector_patch.lab.engine import Burst
from singleflight.core.stats import Reason
from singleflight.stack.arms import OURS, arm
from tests.faults.computed import computed
from tests.support import BLOCK, STUCK_S, blocks, expect_equal, salts

if TYPE_CHECKING:
    from connector_patch.lab.engine import Engine
    from singleflight.stack.arms import Arm
    from singleflight.stack.embedded import Stack

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def beside(tmp_path: Path, mode: str = "attach") -> list[dict[str, Any]]:
    """Children of a MultiConnector: ours, and vLLM's ExampleConnector, which loads files within the step."""
    return [
        {
            "kv_connector": OURS,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"singleflight": {"mode": mode}},
        },
        {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
        },
    ]


def test_before_another_connector_its_requests_share_one_get(
    stack: Stack, reference: Arm, tmp_path: Path
) -> None:
    """Hazard K1; vllm#51864, #18232. MultiConnector [ours, ExampleConnector]; both have the prompt, and ours
    is chosen. A second report of a request would end vLLM with an assertion; `cold` raises where a block is
    lost or a request stuck."""
    trunk = blocks(*range(1, 5), salt=next(salts))
    prompts = {f"r{i}": [*trunk, *(7 + i for _ in range(4))] for i in range(6)}
    with arm(stack, "MultiConnector", {"connectors": beside(tmp_path)}) as multi:
        multi.answer()
        multi.ask("fill", prompts=[[*trunk, 5]])
        answer = multi.ask("burst", prompts=prompts, barrier=True)
        multi.ask("cold")
    counts = answer["counts"]
    assert (counts["gets"], counts["keys"], counts["gpu_blocks"]) == (1, 4, 4)
    expect_equal(reference, prompts, answer["tokens"])


def test_after_another_connector_its_requests_share_what_that_has_not(
    stack: Stack, reference: Arm, tmp_path: Path
) -> None:
    """MultiConnector [ExampleConnector, ours]. What both have, the first loads, and ours does no Get. What it
    has lost, ours loads once for all."""
    trunk = blocks(*range(1, 5), salt=next(salts))
    prompts = {f"r{i}": [*trunk, *(7 + i for _ in range(4))] for i in range(6)}
    with arm(stack, "MultiConnector", {"connectors": beside(tmp_path)[::-1]}) as multi:
        multi.answer()
        multi.ask("fill", prompts=[[*trunk, 5]])
        theirs = multi.ask("burst", prompts=prompts)
        multi.ask("cold")
        for folder in tmp_path.iterdir():
            shutil.rmtree(folder)
        ours = multi.ask("burst", prompts=prompts, barrier=True)
        multi.ask("cold")
    assert theirs["counts"]["gets"] == 0
    assert (ours["counts"]["gets"], ours["counts"]["gpu_blocks"]) == (1, 4)
    expect_equal(reference, prompts, theirs["tokens"])
    expect_equal(reference, prompts, ours["tokens"])


# -- two ranks -------------------------------------------------------------------------------------------


def _watch(worker: Any, folder: str) -> None:
    """Runs in each worker: stand before the real store of its receive threads, and listen to the test through
    files. `hold-<rank>` holds that rank's Gets, `fail-<rank>` fails a key of its next one, the second or that
    of the block whose number is in the file, and each Get leaves a line in `gets-<rank>`."""
    import pathlib
    import time

    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    shm_broadcast.sched_yield = lambda: time.sleep(0.0005)  # as in the process of the scheduler
    where, rank = pathlib.Path(folder), worker.rank

    class Watched:
        def __init__(self, store: Any) -> None:
            self._store = store

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

        def batch_get_into_multi_buffers(self, keys: Any, addresses: Any, sizes: Any) -> Any:
            with (where / f"gets-{rank}").open("a") as log:
                log.write(f"{len(keys)}\n")
            while (where / f"hold-{rank}").exists():
                time.sleep(0.01)
            answers = self._store.batch_get_into_multi_buffers(keys, addresses, sizes)
            if (where / f"fail-{rank}").exists():
                block = (where / f"fail-{rank}").read_text()
                (where / f"fail-{rank}").unlink()
                # vLLM has rotated the keys by the rank.
                answers[(int(block) - rank) % len(keys) if block else 1] = -704
            return answers

    for thread in get_kv_transfer_group().connector_worker.kv_recv_threads:
        thread.store = Watched(thread.store)


class Ranks:
    """An engine with two tensor-parallel ranks, each a process; the scheduler is in this one."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self.folder = folder
        self.attach = engine.connector.layer
        engine.core.model_executor.collective_rpc(_watch, args=(str(folder),))
        self.burst = Burst()

    def hold(self, *ranks: int) -> None:
        for rank in ranks:
            (self.folder / f"hold-{rank}").touch()

    def release(self, *ranks: int) -> None:
        for rank in ranks:
            (self.folder / f"hold-{rank}").unlink(missing_ok=True)

    def gets(self) -> list[list[int]]:
        """Keys of each Get of each rank since the last question."""
        found = []
        for rank in (0, 1):
            log = self.folder / f"gets-{rank}"
            found.append([int(line) for line in log.read_text().split()] if log.exists() else [])
            log.unlink(missing_ok=True)
        return found

    def until(self, reached: Any, what: str) -> None:
        limit = time.monotonic() + STUCK_S
        while not reached():
            for output in self.engine.step():
                if output.finished:
                    self.burst.tokens[output.request_id] = list(output.outputs[0].token_ids)
            assert time.monotonic() < limit, what

    def add_all(self, prompts: dict[str, list[int]]) -> None:
        """Add them, and step until each waits for its load or another's."""
        for name, prompt in prompts.items():
            self.engine.add(name, prompt)
        self.until(lambda: len(self.attach._pending) == len(prompts), "not all were scheduled")

    def meet_the_node(self) -> None:
        """A rank's first Get from a store node may time out on a loaded machine, in Mooncake."""
        prompt = [*blocks(1, 2, salt=next(salts)), 5]
        limit = time.monotonic() + STUCK_S
        while not self.burst.tokens.get("first"):
            assert time.monotonic() < limit, "no Get succeeds"
            self.engine.fill([prompt])
            self.add_all({"first": prompt})
            self.finish()

    def finish(self) -> dict[str, list[int]]:
        self.until(lambda: not self.engine.llm.has_unfinished_requests(), "stuck")
        return self.burst.tokens


@pytest.fixture(scope="module")
def two(ours: Engine, stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """`ours` is asked for so that it comes first: vLLM remembers the environment that its first engine has
    found, so what must differ here is set in vLLM's own memory too."""
    import vllm.envs
    from vllm.distributed.device_communicators import shm_broadcast

    from connector_patch.lab.engine import Engine

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "VLLM_CPU_OMP_THREADS_BIND": "0|1" if (os.cpu_count() or 1) > 1 else "0|0",
            "VLLM_RPC_BASE_PATH": stack.env()["VLLM_RPC_BASE_PATH"],
        }.items():
            patch.setenv(name, value)
            patch.setattr(vllm.envs, name, value, raising=False)
        # Each rank and the scheduler wait for each other in a loop around sched_yield. Three of them on two
        # cores leave so little to Mooncake's threads that its calls run into their time-outs, after 30 s.
        patch.setattr(shm_broadcast, "sched_yield", lambda: time.sleep(0.0005))
        engine = Engine(str(stack.model), OURS, tensor_parallel_size=2)
        ranks = Ranks(engine, tmp_path_factory.mktemp("ranks"))
        ranks.meet_the_node()
        yield ranks
        # Its ranks are processes of their own; the distributed state in this one is that of `ours`.
        patch.setattr("vllm.v1.engine.core.cleanup_dist_env_and_memory", lambda: None)
        engine.close()


@pytest.fixture
def ranks(two: Ranks) -> Iterator[Ranks]:
    engine = two.engine
    two.burst = Burst()
    two.attach.health = Health(two.attach.table.policy, two.attach.table.stats)  # as tests.support.quiescent
    engine.cold()
    free = engine.free_blocks()
    two.gets()
    yield two
    two.release(0, 1)
    engine.cold()
    assert not len(two.attach.table)
    assert not two.attach._pending
    assert engine.free_blocks() == free


@pytest.fixture
def trunk(ranks: Ranks) -> list[int]:
    """Four blocks that only the store has."""
    prefix = blocks(*range(1, 5), salt=next(salts))
    ranks.engine.fill([[*prefix, 5]])
    ranks.gets()
    return prefix


def test_each_rank_loads_its_share_once(ranks: Ranks, reference: Arm, trunk: list[int]) -> None:
    """Hazards K4, A1. Six requests: the scheduler decides once who leads, so each rank does one Get."""
    prompts = {f"r{i}": [*trunk, *(7 + i for _ in range(4))] for i in range(6)}
    ranks.hold(0, 1)
    ranks.add_all(prompts)
    ranks.release(0, 1)
    expect_equal(reference, prompts, ranks.finish())
    assert ranks.gets() == [[4], [4]]


def test_nobody_goes_on_before_the_slowest_rank(ranks: Ranks, reference: Arm, trunk: list[int]) -> None:
    """Hazard K3; sglang#27010. Rank 0 has its share, rank 1 hangs: the flight has not landed, and the
    leader's blocks are not freed, although the leader is aborted."""
    prompts = {f"r{i}": [*trunk, *(7 + i for _ in range(4))] for i in range(3)}
    ranks.hold(1)
    ranks.add_all(prompts)
    before = ranks.engine.free_blocks()
    ranks.engine.llm.abort_request(["r0"])
    for _ in range(30):
        ranks.engine.step()
    assert len(ranks.attach.table) == 4
    assert not ranks.burst.tokens
    assert ranks.engine.free_blocks() <= before + 1, "the leader's tail at most"
    ranks.release(1)
    tokens = ranks.finish()
    tokens.pop("r0", None)
    prompts.pop("r0")
    expect_equal(reference, prompts, tokens)
    assert ranks.gets() == [[4], [4]]


def test_one_rank_fails_and_the_other_is_slow(ranks: Ranks, reference: Arm, trunk: list[int]) -> None:
    """Hazard K2; vllm#42422. Rank 1's Get fails at once, rank 0 still hangs: followers are not released
    between the two reports, and not released into the half-loaded blocks after them."""
    prompts = {f"r{i}": [*trunk, *(7 + i for _ in range(4))] for i in range(3)}
    stats = ranks.attach.table.stats
    failed, ready = stats.fell_back[Reason.LEADER_FAILED], stats.ready
    (ranks.folder / "fail-1").touch()
    ranks.hold(0)
    ranks.add_all(prompts)
    for _ in range(30):
        ranks.engine.step()
    assert stats.fell_back[Reason.LEADER_FAILED] == failed
    assert not ranks.burst.tokens.keys() & {"r1", "r2"}
    ranks.release(0)
    tokens = ranks.finish()
    assert stats.fell_back[Reason.LEADER_FAILED] == failed + 2
    assert stats.ready == ready + 1, "one leads again, the other attaches to it"
    tokens.pop("r0", None)  # it meets vLLM's policy, "fail"
    prompts.pop("r0")
    expect_equal(reference, prompts, tokens)


@pytest.mark.parametrize("bad", [{1: 3}, {0: 2}, {0: 3, 1: 1}, {0: 1, 1: 2}, {0: 2, 1: 0}], ids=str)
def test_what_is_there_on_every_rank_lands(
    ranks: Ranks, reference: Arm, trunk: list[int], monkeypatch: pytest.MonkeyPatch, bad: dict[int, int]
) -> None:
    """Issue 11: each rank misses one block of four, another one, or none; the shortest prefix counts. Rank 1
    reports many steps before rank 0, and vLLM passes its words on in the step in which they come. The leader
    computes from the first block that is bad anywhere, as with stock, and the others hit that."""
    monkeypatch.setattr(ranks.engine.scheduler, "recompute_kv_load_failures", True)
    prompts = {f"r{i}": [*trunk, *(7 + i for _ in range(4))] for i in range(3)}
    for rank, block in bad.items():
        (ranks.folder / f"fail-{rank}").write_text(str(block))
    ranks.hold(0)
    with computed(ranks.engine) as counts:
        ranks.add_all(prompts)
        for _ in range(30):
            ranks.engine.step()
        ranks.release(0)
        tokens = ranks.finish()
    tail = 4 + 3  # behind the prefix, and generated
    assert counts == {"r0": (4 - min(bad.values())) * BLOCK + tail, "r1": tail, "r2": tail}
    assert ranks.gets() == [[4], [4]]
    expect_equal(reference, prompts, tokens)


def test_an_aborted_follower_is_acknowledged_by_both_ranks(ranks: Ranks, trunk: list[int]) -> None:
    """Hazards D3, K3. The follower has no load of its own. Both ranks acknowledge, vLLM frees its blocks,
    while the leader's load still hangs on both."""
    ranks.hold(0, 1)
    ranks.add_all({"leader": [*trunk, 7], "follower": [*trunk, 8]})
    shared = [block for flight in ranks.attach.table._flights.values() for block in flight.destination]
    assert [block.ref_cnt for block in shared] == [2, 2, 2, 2]
    ranks.engine.llm.abort_request(["follower"])
    ranks.until(lambda: len(ranks.attach._pending) == 1, "the ranks did not acknowledge")
    assert [block.ref_cnt for block in shared] == [1, 1, 1, 1], "the follower's references are lost"
    ranks.release(0, 1)
    ranks.finish()


def test_a_follower_leaves_by_its_deadline_on_both_ranks(
    ranks: Ranks, reference: Arm, trunk: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard C1. Both ranks hang; the follower's deadline passes on a clock that the test moves. It computes
    and finishes while the load hangs."""
    offset = [0.0]
    monkeypatch.setattr(ranks.attach, "_clock", lambda: time.monotonic() + offset[0])
    prompts = {"leader": [*trunk, 7], "follower": [*trunk, 8]}
    ranks.hold(0, 1)
    ranks.add_all(prompts)
    offset[0] = 1000.0
    ranks.until(lambda: "follower" in ranks.burst.tokens, "it did not leave")
    assert "leader" not in ranks.burst.tokens
    expect_equal(reference, {"follower": prompts["follower"]}, ranks.burst.tokens)
    ranks.release(0, 1)
    ranks.finish()
