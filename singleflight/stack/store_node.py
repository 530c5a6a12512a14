"""The process that holds the objects: `python -m singleflight.stack.store_node CONFIG.json --ready FILE`.

It mounts its memory in the Mooncake pool, proves it by a put and a get, writes FILE, and serves until it
is told to stop (SIGTERM, SIGINT). A master that has just lost another node offers that one's memory for as
long as its client TTL (10 s); so the proof is tried again.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import uuid
from pathlib import Path
from typing import Any

PROOF_S = 20.0


def _keeps_what_it_is_given(store: Any) -> bool:
    key, value = f"kv-singleflight/ready/{uuid.uuid4()}", b"kv-singleflight store node"
    kept: bool = store.put(key, value) == 0 and store.get(key) == value
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path, help="Mooncake JSON")
    parser.add_argument("--ready", type=Path, required=True, help="file to write once the node answers")
    args = parser.parse_args()
    config = json.loads(args.config.read_text())

    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup(
        config["local_hostname"],
        config["metadata_server"],
        config["global_segment_size"],
        config["local_buffer_size"],
        config["protocol"],
        config["device_name"],
        config["master_server_address"],
    )
    if code != 0:
        print(f"the store node could not join {config['master_server_address']}: Mooncake's code {code}")
        return 1
    limit = time.monotonic() + PROOF_S
    while not (proved := _keeps_what_it_is_given(store)) and time.monotonic() < limit:
        time.sleep(0.5)
    if not proved:
        print("the store node joined, but what it stored did not come back")
        return 1
    args.ready.write_text("ready\n")
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    store.close()
    return 0


if __name__ == "__main__":
    # Before any thread exists, so that none of Mooncake's takes the signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    sys.exit(main())
