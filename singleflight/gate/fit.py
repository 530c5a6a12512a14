"""A line through measured times: how much each thing that a time depends on adds to it."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def line(seconds: ArrayLike, *amounts: ArrayLike) -> tuple[float, ...]:
    """Least squares of relative errors, no part negative: seconds = first + second x amounts[0] + ...

    A part that would come out below zero is noise; it is 0, and the others are fitted without it.

    Args:
        seconds: (n,) times, above 0. amounts: each (n,), what the time is spent on.

    Returns:
        The constant, s, and for each of `amounts` the seconds that one of it takes.
    """
    took = np.asarray(seconds, np.float64)
    columns = [np.ones(len(took)), *(np.asarray(each, np.float64) for each in amounts)]
    parts: NDArray[np.float64] = np.zeros(len(columns))
    used = list(range(len(columns)))
    while used:
        weighted = np.column_stack([columns[i] for i in used]) / took[:, None]
        scale = np.abs(weighted).max(axis=0)  # of very different sizes
        scale[scale == 0] = 1.0
        found = np.linalg.lstsq(weighted / scale, np.ones(len(took)), rcond=None)[0] / scale
        if (found >= 0).all():
            parts[used] = found
            break
        used.remove(used[int(np.argmin(found * scale))])
    return tuple(float(part) for part in parts)
