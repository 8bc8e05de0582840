"""Token buckets: who may ask how often. In this process alone: two API processes allow twice as much."""

import time
from collections import OrderedDict
from collections.abc import Callable

MAX_BUCKETS = 10_000
"""The one unused the longest is forgotten first, which makes it full again: names may be addresses, and without end."""


class Buckets:
    """A bucket per name, which fills by `per_minute` up to `burst`. Belongs to one event loop.

    Not the library `limits`: it has windows and no bucket, and keeps what it counts without a bound.
    """

    def __init__(self, per_minute: int, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._burst = burst
        self._clock = clock
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Tokens, and when they were counted."""

    def wait_s(self, name: str, per_minute: int | None = None) -> float:
        """Seconds until the bucket has a token; 0 where it has one, or there is no limit."""
        per_minute = self._per_minute if per_minute is None else per_minute
        if per_minute == 0:
            return 0.0
        return max(0.0, 1.0 - self._level(name, per_minute)) * 60.0 / per_minute

    def take(self, name: str, per_minute: int | None = None) -> None:
        """Take a token; one that is not there is no debt."""
        per_minute = self._per_minute if per_minute is None else per_minute
        if per_minute == 0:
            return
        self._levels[name] = (max(0.0, self._level(name, per_minute) - 1.0), self._clock())
        self._levels.move_to_end(name)
        if len(self._levels) > MAX_BUCKETS:
            self._levels.popitem(last=False)

    def _level(self, name: str, per_minute: int) -> float:
        burst = float(min(self._burst, per_minute))
        level, counted_at = self._levels.get(name, (burst, 0.0))
        return min(burst, level + (self._clock() - counted_at) * per_minute / 60.0)
