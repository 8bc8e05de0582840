"""How many rows a worker has in hand, in all and of each job: what a shard loop looks at before it leases."""

import threading
from collections import Counter

from jobs.leases import Lease


class RowsInFlight:
    """Counts the rows inside the engine, and lets loops wait until there is room for another shard."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._num_rows = 0
        self._of_job: Counter[str] = Counter()
        self._shares: dict[str, float] = {}
        self._changed = threading.Condition()

    def add(self, lease: Lease, num_rows: int) -> None:
        with self._changed:
            self._num_rows += num_rows
            self._shares[lease.job_id] = lease.kv_share
            self._of_job[lease.job_id] += num_rows
            if self._of_job[lease.job_id] == 0:
                del self._of_job[lease.job_id], self._shares[lease.job_id]
            if self._num_rows < self.limit:
                self._changed.notify()

    def jobs_at_their_share(self) -> list[str]:
        """Jobs with as many rows here as their `kv_share` lets them have while another job waits."""
        with self._changed:
            shares = {job_id: share for job_id, share in self._shares.items() if share < 1}
            return [job_id for job_id, share in shares.items() if self._of_job[job_id] >= share * self.limit]

    @property
    def has_room(self) -> bool:
        return self._num_rows < self.limit

    def wait_for_room(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.has_room, timeout_s)
