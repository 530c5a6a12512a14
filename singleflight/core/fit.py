"""Seconds as a sum of two amounts, each at a price of its own, learned from what has been seen. No clock."""

from __future__ import annotations

WINDOW = 16
"""Observations remembered, about: a change of speed is believed after so many."""

ENOUGH = 4
"""Observations to have before anything is said; a line through two noisy points is no estimate."""

OUTLIER = 4.0
"""What takes longer than this many times the expected counts as that long. A load that hung, or a step in
which the machine did something else, says nothing about the next; a store that really has become slow is
still followed, in a few loads."""

ALIKE = 1e-3
"""Below this share of the largest possible determinant all observations point in one direction: then how the
seconds are split between the two amounts is not known, and all are taken to be for the first."""


class Plane:
    """seconds = a x + b y with a, b >= 0: least squares with exponential forgetting.

    Large observations weigh more, as they should: what is asked about is large.
    """

    __slots__ = ("_prices", "_seen", "_xs", "_xx", "_xy", "_ys", "_yy")

    def __init__(self) -> None:
        self._seen = 0
        self._xx = self._xy = self._yy = self._xs = self._ys = 0.0
        self._prices: tuple[float, float] | None = None

    def observe(self, x: float, y: float, seconds: float) -> None:
        """`x`, more than 0, and `y`, at least 0, took `seconds`, at least 0."""
        expected = self.seconds(x, y)
        if expected:
            seconds = min(seconds, OUTLIER * expected)
        self._seen += 1
        kept = 1 - 1 / WINDOW
        self._xx = kept * self._xx + x * x
        self._xy = kept * self._xy + x * y
        self._yy = kept * self._yy + y * y
        self._xs = kept * self._xs + x * seconds
        self._ys = kept * self._ys + y * seconds
        self._prices = self._solved() if self._seen >= ENOUGH else None

    def seconds(self, x: float, y: float) -> float | None:
        """What so much should take; None while too little has been seen."""
        if self._prices is None:
            return None
        return self._prices[0] * x + self._prices[1] * y

    def _solved(self) -> tuple[float, float]:
        only_x = (self._xs / self._xx, 0.0)
        determinant = self._xx * self._yy - self._xy * self._xy
        if determinant <= ALIKE * self._xx * self._yy:
            return only_x
        a = (self._xs * self._yy - self._ys * self._xy) / determinant
        b = (self._ys * self._xx - self._xs * self._xy) / determinant
        if b < 0:
            return only_x
        return (a, b) if a >= 0 else (0.0, self._ys / self._yy)
