"""vLLM's real scheduler and our real connector over a simulated worker with symbolic KV memory.

What is real: `Scheduler` / `AsyncScheduler`, `KVCacheManager`, both sides of the connector, and the code of
the store's receive and send threads. What is simulated: the GPU (each token slot holds which prefix was
written to it), the store, the clock, and when a thread gets on. There is no thread, no sleep and no engine.

Three ways to use it:

- `make simulate`, or `python -m tests.simulation --help`: many random runs; a failing one is shrunk.
- `test_seeds.py`: the same, a fixed number of seeds for each supported configuration.
- a scripted scenario, in a test that takes the fixture `world`:

        def test_two_requests_one_get(world):
            w = world(mode="attach", blocks=25, hold=True)  # any field of `Setup`; held loads end when told
            prompt = w.prompt("abcd", tail=2)               # four blocks, named by letters, and two tokens
            w.store.put(prompt)                             # its whole blocks are in the store
            first, second = w.add(prompt), w.add(prompt)
            w.step(2)
            assert w.loads == [first] and w.status(second) == "WAITING_FOR_REMOTE_KVS"
            w.land(first)
            w.run()                                             # to the end; raises Violation or Stuck
            assert w.gets == 1 and w.tokens_computed(second) == 2
            print(w.story())                                # what happened, line by line

  Faults: `w.store.fail(prompt, block=1)` breaks a key for good; `w.fault("short")` hits the next Get;
  `w.hang(first)` keeps a Get in the air until `w.land(first)`. Operators: `w.abort(r)`, `w.reset(...)`,
  `w.pause(...)`, `w.resume()`, `w.sleep(mode)`. Time: `w.now`, `w.advance(seconds)`. Streaming input:
  `w.add(..., resumable=True)`, `w.feed(r, prompt)`, `w.close(r)`. Another engine over the same store:
  `world(beside=w)`. Another connector in this one: `world(other="before")`, `w.store.lend(prompt)`. See
  `world.World`; `test_situations.py`, `test_kinds.py` and `test_beside.py` have examples of all.

Checked in every step, whatever the scenario: each slot that a forward reads, each entry of the prefix cache,
no block given away while a load may still write to it, nobody waiting beyond its deadline; at the end the
tokens of every request, free blocks, and that the layer has forgotten everything. See docs/simulation.md.
"""
