"""Whatever workers, sweepers and users do, in any order: no row is lost or doubled, and every job can end."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batches import (
    LEASE_S,
    MODEL,
    answered,
    check_integrity,
    drain,
    expire_lease,
    failed,
    job_state,
    requests_of,
    settings_in,
    submit_table,
)
from database_fixtures import BACKENDS, Templates
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from db.session import Database
from db.states import ENDED, JOB_TRANSITIONS, JobState, sources_of
from jobs import ending, leases, results
from jobs.errors import Conflict, LeaseLost

OWNERS = ["A" * 26, "B" * 26, "C" * 26]
NUM_EXAMPLES = {"sqlite": 25, "postgresql": 10}


class Job(RuleBasedStateMachine):
    """One job, three workers that may be slow, die and come back, a sweeper, and a user who cancels and retries."""

    database: Database
    folder: Path

    def __init__(self) -> None:
        super().__init__()
        self.leases: list[leases.Lease] = []
        """Every lease ever given out, the stale ones too: a slow worker may still try to use it."""
        self.current: dict[int, leases.Lease] = {}
        self.ended: dict[int, Any] = {}
        """Rows that had ended when last looked at, until a retry opens them."""

    @initialize(num_rows=st.integers(1, 7), refused=st.sets(st.integers(0, 6)))
    def submit(self, num_rows: int, refused: set[int]) -> None:
        prompts = [None if row in refused else f"q{row}" for row in range(num_rows)]
        with self.database.write() as connection:
            connection.exec_driver_sql("DELETE FROM jobs")
        self.refused = refused & set(range(num_rows))
        settings = settings_in(self.folder / "home", shard_rows=2)
        self.job_id = submit_table(self.database, settings, {"prompt": prompts}).job_id

    @rule(owner=st.sampled_from(OWNERS))
    def acquire(self, owner: str) -> None:
        lease = leases.acquire(self.database, MODEL, owner, LEASE_S)
        if lease is not None:
            assert lease.shard_id not in self.current
            assert all(lease.token > old.token for old in self.leases if old.shard_id == lease.shard_id)
            self.leases.append(lease)
            self.current[lease.shard_id] = lease

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), fail=st.booleans(), whole=st.booleans())
    def write(self, data: st.DataObject, fail: bool, whole: bool) -> None:
        lease = self._any_lease(data)
        rows = results.load(self.database, lease).rows
        rows = rows if whole else rows[:1]
        ended = [(failed if fail else answered)(row) for row in rows]
        self._fenced(lease, lambda: results.write(self.database, lease, ended), harmless=not rows)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        lease = self._any_lease(data)
        missing = bool(results.load(self.database, lease).rows)
        if missing:
            with pytest.raises(LeaseLost):
                leases.finish(self.database, lease)
        else:
            self._fenced(lease, lambda: leases.finish(self.database, lease), gone=True)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), crashed=st.booleans())
    def release(self, data: st.DataObject, crashed: bool) -> None:
        lease = self._any_lease(data)
        assert leases.release(self.database, lease, crashed=crashed) == self._holds(lease)
        if self._holds(lease):
            del self.current[lease.shard_id]

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        lease = self._any_lease(data)
        if job_state(self.database, self.job_id) == "cancelling" or not self._holds(lease):
            self._fenced(lease, lambda: leases.abandon(self.database, lease), gone=True)

    @rule(owner=st.sampled_from(OWNERS))
    def renew(self, owner: str) -> None:
        held = {(lease.shard_id, lease.token) for lease in self.current.values() if lease.owner == owner}
        assert leases.renew(self.database, owner, LEASE_S).held == held

    @rule(owner=st.sampled_from(OWNERS))
    def die(self, owner: str) -> None:
        leases.release_all(self.database, owner, crashed=True)
        self.current = {shard: lease for shard, lease in self.current.items() if lease.owner != owner}

    @precondition(lambda self: self.current)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        shard_id = data.draw(st.sampled_from(sorted(self.current)))
        expire_lease(self.database, shard_id)
        assert leases.sweep(self.database) == 1
        del self.current[shard_id]

    @rule()
    def sweep(self) -> None:
        assert leases.sweep(self.database) == 0

    @rule()
    def cancel(self) -> None:
        before = job_state(self.database, self.job_id)
        if before in ENDED:
            with pytest.raises(Conflict):
                ending.cancel(self.database, self.job_id)
        else:
            assert ending.cancel(self.database, self.job_id) in ("cancelling", "cancelled", "completed")

    @rule()
    def retry(self) -> None:
        rows = requests_of(self.database, self.job_id)
        again = {row.row_index for row in rows if row.state == "failed"} - self.refused
        if job_state(self.database, self.job_id) in ENDED and again:
            assert ending.retry(self.database, self.job_id) == len(again)
            for row in again:
                self.ended.pop(row, None)
        else:
            with pytest.raises(Conflict):
                ending.retry(self.database, self.job_id)

    @rule()
    def fail(self) -> None:
        before = job_state(self.database, self.job_id)
        ending.fail_job(self.database, self.job_id, "no engine")
        if before in ("queued", "running"):
            assert job_state(self.database, self.job_id) == "failed"
            self.current = {}

    @invariant()
    def rows_and_counters_agree(self) -> None:
        if not hasattr(self, "job_id"):
            return
        check_integrity(self.database, self.job_id)
        for row in requests_of(self.database, self.job_id):
            if row.row_index in self.ended:
                assert row == self.ended[row.row_index], "a row that had ended was changed"
            elif row.state != "queued":
                self.ended[row.row_index] = row
            assert row.row_index not in self.refused or row.error_code == "empty_prompt"

    def teardown(self) -> None:
        """From wherever it is, the job can be brought to its end."""
        if not hasattr(self, "job_id"):
            return
        for owner in OWNERS:
            leases.release_all(self.database, owner, crashed=True)
        leases.sweep(self.database)
        drain(self.database)
        leases.sweep(self.database)
        assert job_state(self.database, self.job_id) in ENDED
        check_integrity(self.database, self.job_id)

    def _any_lease(self, data: st.DataObject) -> leases.Lease:
        return self.leases[data.draw(st.integers(0, len(self.leases) - 1))]

    def _holds(self, lease: leases.Lease) -> bool:
        return self.current.get(lease.shard_id) == lease

    def _fenced(self, lease: leases.Lease, act: Any, *, gone: bool = False, harmless: bool = False) -> None:
        """A current lease may act; a stale one is refused, and the invariant then shows that it changed nothing."""
        if self._holds(lease) or harmless:
            act()
            if gone:
                self.current.pop(lease.shard_id)
        else:
            with pytest.raises(LeaseLost):
                act()


@pytest.fixture
def folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="forq-states-"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_order_of_events_keeps_every_row_once(backend: str, templates: Templates, folder: Path) -> None:
    url = templates.copy(backend, folder)
    database = Database(url)
    machine = type("AnyJob", (Job,), {"database": database, "folder": folder})
    try:
        run_state_machine_as_test(
            machine,
            settings=hypothesis_settings(
                max_examples=NUM_EXAMPLES[backend],
                stateful_step_count=25,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        database.dispose()
        templates.drop(url)


def test_every_state_can_reach_an_end() -> None:
    for state in JobState:
        reached, frontier = {state}, [state]
        while frontier:
            news = JOB_TRANSITIONS[frontier.pop()] - reached
            reached |= news
            frontier += news
        assert reached & set(ENDED), state


def test_a_transitions_sources_are_the_inverse_of_its_targets() -> None:
    for target in JobState:
        assert sources_of(target) == [state for state in JobState if target in JOB_TRANSITIONS[state]]
