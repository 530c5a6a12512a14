"""Inside another release's environment: which modes are on there, and how the simulation goes.

python -m tests.versions.inside SEEDS
"""

from __future__ import annotations

import logging
import sys
import time

from .child import say

PLAIN = ("stock", "off")
"""Run everywhere: the stock connector, and ours where it passes through."""
EVERY_S = 0.5


def main(seeds: int) -> None:
    import vllm

    from connector_patch import compat
    from connector_patch.config import Mode

    lacks = {mode.value: compat.missing_feature(mode) for mode in (Mode.ATTACH, Mode.PARK, Mode.SHADOW)}
    modes = [*PLAIN, *(mode for mode, reason in lacks.items() if reason is None)]
    say(vllm=vllm.__version__, lacks=lacks, modes=modes)
    logging.getLogger("vllm").setLevel(logging.CRITICAL)
    for mode in modes:
        _stories(mode, seeds)


def _stories(mode: str, seeds: int) -> None:
    from ..simulation import campaign

    heard = time.monotonic()

    def told(tally: campaign.Tally) -> None:
        nonlocal heard
        if time.monotonic() - heard > EVERY_S:
            heard = time.monotonic()
            say(mode=mode, done=tally.stories)

    tally = campaign.run(mode, range(seeds), told=told)
    say(
        mode=mode,
        done=tally.stories,
        tally={
            "stories": tally.stories,
            "steps": tally.steps,
            "gets": tally.gets,
            "known": {what: len(found) for what, found in tally.known.items()},
            "failed": [f"seed {seed}: {failure}" for seed, failure in tally.failures],
        },
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
