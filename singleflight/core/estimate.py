"""How long a load will take, learned from loads that have landed. No clock: durations are given.

The model is a line, seconds = latency + seconds a block x blocks, fitted by least squares with exponential
forgetting (exponentially weighted mean, variance and covariance: Finch 2009, "Incremental calculation of
weighted mean and variance", section 9).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from .fit import ENOUGH, OUTLIER, WINDOW
from .flight import Flight


class LoadTimes:
    """Expected seconds of a load, by its size in blocks.

    The line never leaves the room between "only latency" (sizes alike, or noise that slopes down) and "only
    bandwidth" (through the origin), so a few odd observations cannot make it absurd.
    """

    __slots__ = ("_covariance", "_mean_blocks", "_mean_s", "_seen", "_variance")

    def __init__(self) -> None:
        self._seen = 0
        self._mean_blocks = self._mean_s = 0.0
        self._variance = self._covariance = 0.0

    def observe(self, blocks: float, seconds: float) -> None:
        """A load of `blocks` blocks, more than 0, took `seconds`, at least 0."""
        expected = self.seconds(blocks)
        if expected:
            seconds = min(seconds, OUTLIER * expected)
        self._seen += 1
        weight = 1 / min(self._seen, WINDOW)
        off_blocks, off_s = blocks - self._mean_blocks, seconds - self._mean_s
        self._mean_blocks += weight * off_blocks
        self._mean_s += weight * off_s
        self._variance = (1 - weight) * (self._variance + weight * off_blocks * off_blocks)
        self._covariance = (1 - weight) * (self._covariance + weight * off_blocks * off_s)

    def seconds(self, blocks: float) -> float | None:
        """Expected duration of a load of so many blocks; None while too little has been seen."""
        if self._seen < ENOUGH:
            return None
        slope = self._covariance / self._variance if self._variance else 0.0
        slope = min(max(slope, 0.0), self._mean_s / self._mean_blocks)
        return self._mean_s + slope * (blocks - self._mean_blocks)


class Forecast:
    """When flights will land, and whether that is worth waiting for.

    `lanes` is how many loads the driver runs at a time; further ones queue. With one lane a load of one's
    own never overtakes a flight that is in the air, so there is nothing to learn and nothing to weigh.
    """

    def __init__(self, lanes: int = 1) -> None:
        self.lanes = lanes
        self.times = LoadTimes()

    def work(self, blocks: int, air: Collection[Flight]) -> int | None:
        """Blocks that the link has to bring before the last of `blocks` more, if it is shared evenly with the
        flights in the air; None if these would queue first.

        Where loads do not slow each other, this makes us wait a little more than would be best.
        """
        if len(air) >= self.lanes:
            return None
        return blocks + sum(min(len(flight.hashes), blocks) for flight in air)

    def landed(self, flight: Flight, seconds: float) -> None:
        """Learn from a flight that took so long, unless it has queued."""
        if flight.work is not None and self.lanes > 1:
            self.times.observe(flight.work, seconds)

    def remaining_s(self, flight: Flight, now: float) -> float:
        """Seconds until it should land; 0 where it is late, or where nothing is known."""
        expected = self.times.seconds(flight.work or len(flight.hashes)) or 0.0
        return max(expected - (now - flight.started), 0.0)

    def worth_joining(
        self,
        flights: Iterable[Flight],
        blocks: int,
        air: Collection[Flight],
        patience: float,
        now: float,
        then: int = 0,
    ) -> bool:
        """Whether waiting for these flights, and then loading `then` blocks, should take at most `patience`
        times as long as loading all `blocks` blocks alone, beside the flights in the `air`.

        If no lane is idle, a load of one's own would queue behind them: waiting cannot lose. Nor is a flight
        that takes longer than expected left alone: in a slow hour that would end the sharing just when it
        is needed (hazard J2).
        """
        work = self.work(blocks, air) if patience else None
        alone = self.times.seconds(work) if work is not None else None
        if alone is None:
            return True
        wait = max(self.remaining_s(flight, now) for flight in flights)
        wait += (self.times.seconds(then) or 0.0) if then else 0.0
        return wait <= patience * alone
