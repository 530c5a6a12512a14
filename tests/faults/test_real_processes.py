"""The promises again, on real processes that are stopped and killed: server, store node, master, clients.

What Mooncake 0.3 does over TCP, observed here and the reason for the bounds below: a Get whose store node is
stopped blocks until MC_TRANSFER_TIMEOUT (30 s unless set) and then answers -800; one whose store node is
dead answers -800 at once, also for objects that the master still lists; the master forgets a silent store
node, and its objects, after 10 s, also if it then goes on. A Get that takes longer than the objects' lease
(5 s) answers -707, though the bytes have come. While the master is stopped, a lookup blocks,
and with it the engine, stock and ours alike. A Get without a master answers -900 after about 4 s.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from singleflight.stack import embedded, keeper
from tests.server import Server, Unfinished, serving
from tests.support import BLOCK, expect_equal, salts

if TYPE_CHECKING:
    from singleflight.stack.arms import Arm

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

DEADLINE_S = 4.0
BOUND_S = 45.0
"""No client waits longer than this, whatever happens: Mooncake's time-out below, and a slow machine."""
ENDING_S = 120.0
"""How long a server that is asked to end may take, whatever its Get does: 1.3 s here. It takes until its
clients give up if vLLM kills EngineCore before that has told them: see the test."""
HANGS_S = 600
"""MC_TRANSFER_TIMEOUT for a Get that outlives every test."""
Answer = list[int] | str
"""Tokens, or the error a client saw."""
NOTHING = "neither tokens nor an error"
"""The client gave up."""


class Stage:
    """A server with flights in the air, and the processes below it."""

    def __init__(self, stack: embedded.Stack, server: Server, clients: ThreadPoolExecutor) -> None:
        self.stack = stack
        self.server = server
        self.clients = clients
        self.patience_s = BOUND_S
        """After which a client gives up."""
        self.restarted = contextlib.ExitStack()
        self.node, self.master = stack.store_node, stack.master

    def ask(self, prompt: list[int]) -> Answer:
        try:
            return self.server.complete(prompt, self.patience_s)
        except urllib.error.HTTPError as error:
            return f"HTTP {error.code}"
        except (ConnectionError, Unfinished) as error:
            return repr(error)
        except TimeoutError:
            return NOTHING

    def event(self, name: str) -> int:
        return self.server.counter("vllm:singleflight_requests", event=name)

    def flights(self, event: str) -> int:
        return self.server.counter("vllm:singleflight_flights", event=event)

    def gets(self) -> int:
        return self.server.counter("vllm:mooncake_store_operation", operation="load_get")

    def connect(self, prompt: list[int]) -> http.client.HTTPConnection:
        """A client that asks and can go away."""
        connection = http.client.HTTPConnection(self.server.url.removeprefix("http://"), timeout=BOUND_S)
        body = json.dumps(self.server.completion(prompt))
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        return connection

    def until(self, reached: Callable[[], bool], what: str) -> None:
        limit = time.monotonic() + BOUND_S
        while not reached():
            assert time.monotonic() < limit, f"{what}; the server said: {embedded.tail(self.server.log, 12)}"
            time.sleep(0.05)

    def stored_prefix(self) -> list[int]:
        """A prefix of 64 blocks that only the store has."""
        salt = next(salts)
        prefix = [3 + (17 * i + 531 * salt) % 2000 for i in range(64 * BLOCK)]
        self.server.fill(prefix)
        return prefix

    def segments(self) -> list[str]:
        """The memory that the master offers, also that of a node which has just died."""
        url = f"http://{embedded.LOOPBACK}:{self.stack.ports.metrics}/get_all_segments"
        with urllib.request.urlopen(url, timeout=BOUND_S) as answer:
            return str(answer.read().decode()).split()

    def in_the_air(self, prefix: list[int], count: int = 3) -> dict[str, tuple[list[int], Future[Answer]]]:
        """The store node stops; then a leader asks, and followers attach to its load."""
        self.node.send_signal(signal.SIGSTOP)
        led, attached = self.flights("led"), self.event("attached")
        asked: dict[str, tuple[list[int], Future[Answer]]] = {}
        for i in range(count):
            prompt = [*prefix, *(7 + i for _ in range(4))]
            asked[f"c{i}"] = prompt, self.clients.submit(self.ask, prompt)
            if i == 0:
                self.until(lambda: self.flights("led") > led, "the leader did not load")
            else:
                self.until(lambda i=i: self.event("attached") >= attached + i, "nobody attached")
        return asked

    def restart_node(self) -> None:
        """In place of a dead one. The master must have forgotten that, or it goes on giving keys to it."""
        self.until(lambda: not self.segments(), "the master never forgets a dead node")
        (self.stack.folder / "store_node.ready").unlink()
        self.node = self.restarted.enter_context(self.stack._start_store_node())

    def go_on(self) -> None:
        """Those that were stopped."""
        for process in (self.node, self.master):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)

    def restart_master(self) -> None:
        binary = embedded.master_binary()
        self.master = self.restarted.enter_context(self.stack._start_master(binary))


@contextlib.contextmanager
def set_up(transfer_timeout_s: int = 15) -> Iterator[Stage]:
    with (
        embedded.Stack() as stack,
        serving(
            stack,
            {"deadline_base_s": DEADLINE_S, "deadline_per_token_s": 0.0},
            {"VLLM_MOONCAKE_LOAD_RECV_THREADS": "4", "MC_TRANSFER_TIMEOUT": str(transfer_timeout_s)},
        ) as server,
        ThreadPoolExecutor(8) as clients,
    ):
        stage = Stage(stack, server, clients)
        with stage.restarted:
            yield stage


@pytest.fixture(scope="module")
def shared() -> Iterator[Stage]:
    """One stage for all tests but the last."""
    with set_up() as running:
        yield running


@pytest.fixture
def stage(shared: Stage) -> Iterator[Stage]:
    """The shared one; nobody is left stopped, also where a test fails."""
    yield shared
    shared.go_on()


def outcomes(
    reference: Arm, asked: dict[str, tuple[list[int], Future[Answer]]], *, may_hear_nothing: bool = False
) -> tuple[dict[str, Answer], list[str]]:
    """Every client's answer, none of them a wrong one; and who got an error."""
    answers = {name: future.result(2 * BOUND_S) for name, (_, future) in asked.items()}
    assert may_hear_nothing or NOTHING not in answers.values(), answers
    right = {name: answer for name, answer in answers.items() if isinstance(answer, list)}
    if right:
        expect_equal(reference, {name: asked[name][0] for name in right}, right)
    return answers, [name for name in answers if name not in right]


def later(stage: Stage, reference: Arm) -> None:
    """Whatever has happened: requests that come now are right, and no block is lost."""
    prefix = [3 + (29 * i + 17 * next(salts)) % 2000 for i in range(16 * BLOCK)]
    answer = stage.ask([*prefix, 6])
    assert isinstance(answer, list), answer
    expect_equal(reference, {"later": [*prefix, 6]}, {"later": answer})
    stage.server.cold()  # vLLM refuses while a block is in use
    for gauge in ("running", "waiting"):
        lines = stage.server.ask("/metrics").splitlines()
        values = [line.split()[-1] for line in lines if line.startswith(f"vllm:num_requests_{gauge}{{")]
        assert values == ["0.0"]


def test_clients_that_disconnect_in_mid_load(stage: Stage, reference: Arm) -> None:
    """Hazards H1, D1, D3. The leader's and one follower's connection close while the Get hangs. The load is
    nobody's fault: it lands, and the other follower has the right tokens from it, without a second Get."""
    prefix = stage.stored_prefix()
    cancelled, ready, attached = (stage.event(name) for name in ("cancelled", "ready", "attached"))
    orphaned, led, gets = stage.flights("orphaned"), stage.flights("led"), stage.gets()
    stage.node.send_signal(signal.SIGSTOP)
    leader = stage.connect([*prefix, 7])
    stage.until(lambda: stage.flights("led") > led, "the leader did not load")
    follower = stage.connect([*prefix, 8])
    stage.until(lambda: stage.event("attached") > attached, "the first did not attach")
    staying = stage.clients.submit(stage.ask, [*prefix, 9])
    stage.until(lambda: stage.event("attached") > attached + 1, "the second did not attach")
    leader.close()
    follower.close()
    stage.until(lambda: stage.event("cancelled") > cancelled, "the follower was not cancelled")
    stage.node.send_signal(signal.SIGCONT)
    answers, errors = outcomes(reference, {"stays": ([*prefix, 9], staying)})
    assert not errors, answers
    assert stage.flights("orphaned") == orphaned + 1
    assert stage.event("ready") == ready + 1
    assert stage.gets() == gets + 1
    later(stage, reference)


def test_a_store_node_that_stops_for_longer_than_the_deadline(stage: Stage, reference: Arm) -> None:
    """Hazards C1, C4. Followers leave by their deadline, compute, and answer while the store stands still;
    when it goes on, the leader's Get completes."""
    asked = stage.in_the_air(stage.stored_prefix())
    fell_back = stage.event("fell_back_deadline")
    started = time.monotonic()
    followers = {name: asked[name] for name in ("c1", "c2")}
    answers, errors = outcomes(reference, followers)
    waited = time.monotonic() - started
    leader_waits = not asked["c0"][1].done()
    stage.node.send_signal(signal.SIGCONT)
    assert not errors, answers
    assert leader_waits, "the followers did not wait for the store"
    assert waited < DEADLINE_S + 10
    answers, errors = outcomes(reference, asked)
    assert set(errors) <= {"c0"}, answers  # its objects' lease may have run out: vLLM's policy, "fail"
    assert stage.event("fell_back_deadline") == fell_back + 2
    later(stage, reference)


def test_the_store_node_is_killed_in_mid_get(stage: Stage, reference: Arm) -> None:
    """Hazards C3, E1. The Get fails at once. The leader meets policy "fail"; one follower leads again, since
    the master still lists the objects, and meets it too; the third has used up its hand-over and
    computes. Within 10 s the master has forgotten the node, and all later requests compute."""
    asked = stage.in_the_air(stage.stored_prefix(), count=4)
    stage.node.kill()
    answers, errors = outcomes(reference, asked)
    assert "c0" in errors
    assert len(errors) <= 2, f"the leader and the one that led again: {answers}"
    assert set(map(str, (answers[name] for name in errors))) == {"HTTP 500"}
    stage.node.wait()
    stage.until(lambda: not stage.segments(), "the master never forgets a dead node")
    stage.server.cold()  # what the followers have computed would do without the store
    assert isinstance(stage.ask(asked["c0"][0]), list), "requests fail for ever"
    later(stage, reference)
    stage.restart_node()
    prefix, gets = stage.stored_prefix(), stage.gets()
    assert isinstance(stage.ask([*prefix, 8]), list)
    assert stage.gets() == gets + 1, "with a store node there are loads again"


def test_the_master_stops_and_goes_on(stage: Stage, reference: Arm) -> None:
    """Hazard C2. The master is stopped while a Get is in the air and newcomers ask it: their lookup blocks
    vLLM's scheduler, as in stock. When it goes on, everybody has the right tokens."""
    asked = stage.in_the_air(stage.stored_prefix())
    stage.master.send_signal(signal.SIGSTOP)
    other = [3 + (23 * i) % 2000 for i in range(8 * BLOCK)]
    asked["new"] = other, stage.clients.submit(stage.ask, other)
    time.sleep(2)
    stage.node.send_signal(signal.SIGCONT)
    time.sleep(1)
    stage.master.send_signal(signal.SIGCONT)
    answers, errors = outcomes(reference, asked)
    assert not errors, answers
    later(stage, reference)


def test_the_master_is_killed_and_comes_back_on_the_same_ports(stage: Stage, reference: Arm) -> None:
    """Hazard C2. The Get in the air needs no master any more: it lands. Requests without a master compute
    after Mooncake's own time-outs, and so do requests after its return, which knows of no object."""
    asked = stage.in_the_air(stage.stored_prefix())
    stage.master.kill()
    stage.master.wait()
    stage.node.send_signal(signal.SIGCONT)
    answers, errors = outcomes(reference, asked)
    assert not errors, answers
    later(stage, reference)
    stage.restart_master()
    later(stage, reference)


@pytest.mark.parametrize("engine_core", ["runs", "stands still"])
def test_the_server_is_asked_to_end_with_flights_in_the_air(reference: Arm, engine_core: str) -> None:
    """Hazard D9. SIGTERM while a Get hangs, for much longer than the test lasts: the server ends without
    waiting for the Get, and of its session no process is left.

    vLLM kills what has not ended `--shutdown-timeout` seconds (0 unless set) after the signal; a receive
    thread in a Get is among that. With 0, EngineCore races with its own end to tell the clients: they see an
    error or their tokens, or hear nothing, and then the server's HTTP part waits until they have given up.
    An EngineCore that stands still has lost that race; then the HTTP part may find out by itself (HTTP 500),
    or not. Stock does the same. The server has no other test.
    """
    with set_up(HANGS_S) as stage:
        prefix = stage.stored_prefix()
        stage.patience_s = 10.0
        asked = stage.in_the_air(prefix)
        process = stage.server.process
        comms = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in keeper.members(process.pid)}
        (core,) = (pid for pid, comm in comms.items() if comm.startswith("VLLM::EngineC"))
        if engine_core == "stands still":  # it alone: Python's resource tracker is to remove what it leaves
            os.kill(core, signal.SIGSTOP)
        process.terminate()
        process.wait(ENDING_S)
        answers, errors = outcomes(reference, asked, may_hear_nothing=True)
        assert "c0" in errors, f"tokens of a load that hangs: {answers}"
        # Python's resource tracker ends by itself when its parent has.
        stage.until(lambda: not keeper.members(process.pid), "somebody is left of the server's session")


def test_the_server_is_killed_outright(reference: Arm) -> None:
    """It cannot take EngineCore and workers along, and with a hung Get they would never end by themselves."""
    with set_up(HANGS_S) as stage:
        asked = stage.in_the_air(stage.stored_prefix())
        process = stage.server.process
        assert len(keeper.members(process.pid)) > 1
        process.kill()
        stage.until(lambda: not keeper.members(process.pid), "somebody is left of the server's session")
        answers, errors = outcomes(reference, asked)
        assert set(errors) == set(answers)
        assert stage.master.poll() is None, "the rest of the stack goes on"


SERVES = """
import time
from singleflight.stack.embedded import Stack
from tests.server import serving
with Stack() as stack, serving(stack) as server:
    print(stack.master.pid, stack.store_node.pid, server.process.pid, flush=True)
    time.sleep(3600)
"""


def test_whoever_started_the_server_is_killed_outright() -> None:
    """As by `kill -9` or the kernel's memory killer: neither server, EngineCore and worker nor the stack
    outlive it."""
    here = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", SERVES], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=here
    ) as owner:
        assert owner.stdout is not None
        try:
            sessions = [int(pid) for pid in owner.stdout.readline().split()]
            before = [len(keeper.members(session)) for session in sessions]
        finally:
            owner.kill()
    assert len(sessions) == 3
    assert before[2] > 2, "server, EngineCore and worker"
    limit = time.monotonic() + BOUND_S
    while left := [pid for session in sessions for pid in keeper.members(session)]:
        assert time.monotonic() < limit, f"left: {left}"
        time.sleep(0.05)
