"""The picture of load or compute: time to first token against the length of the receive queue. A model.

    python bench/load_or_compute.py --out docs/img/load-or-compute.png

A prompt takes one second to compute. The rule is the connector's (`singleflight.core`), the prices are given;
nothing is measured.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

from singleflight.core.choice import Chosen, Expected
from singleflight.core.policy import Policy

COMPUTE_S = 1.0
LONGEST = 24
LOADS_S = {"1 s": 1.0, "1/3 s": 1 / 3, "1/10 s": 0.1}


def expected(queued: int, load_s: float) -> Expected:
    """For a request that finds so many loads before it, each as long as its own."""
    landings = ((i + 1) * load_s for i in range(queued))
    others_s = sum(COMPUTE_S - lands for lands in landings if lands < COMPUTE_S)
    return Expected((queued + 1) * load_s, COMPUTE_S, COMPUTE_S, others_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(LOADS_S), figsize=(11, 3.4), layout="constrained")
    queue = range(LONGEST + 1)
    for axis, (name, load_s) in zip(axes, LOADS_S.items(), strict=True):
        rows = [expected(queued, load_s) for queued in queue]
        loads = [row.chosen(Policy(), 8192) is Chosen.LOAD for row in rows]
        axis.plot(queue, [row.load_s for row in rows], color="tab:grey", label="load (stock)")
        axis.axhline(COMPUTE_S, color="tab:grey", linestyle=":", label="compute")
        chosen = [row.load_s if load else COMPUTE_S for row, load in zip(rows, loads, strict=True)]
        axis.plot(queue, chosen, "o", color="tab:blue", markersize=4, label="what is chosen")
        axis.set(title=f"a load takes {name}", xlabel="loads queued before it", ylim=(0, 5))
    axes[0].set_ylabel("time to first token, s (model)")
    axes[0].legend()
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
