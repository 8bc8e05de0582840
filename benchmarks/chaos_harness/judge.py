"""What must be true in the end, asked of SQL, of the exported Parquet and of the machine.

Who owned a shard when a row was stored is recorded by the database itself: `install_audit` adds a trigger that copies
the shard's lease into a table of its own, in the transaction that stores the row, whatever the worker believed. A row
stored under another lease than the one it was generated and written for is a fenced write that got in.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from sqlalchemy import text

from benchmarks.chaos_harness.fake_engine import right_answer
from benchmarks.chaos_harness.journal import History
from benchmarks.chaos_harness.traffic import Batch, prompt_of
from db.session import Database
from jobs.export import export_job
from jobs.settings import Settings

_OWNER_OF_ROW = """
    SELECT NEW.request_id, NEW.sample, s.id, s.lease_token, s.state FROM requests r
    JOIN shards s ON s.job_id = r.job_id AND r.row_index >= s.start_row AND r.row_index < s.end_row
    WHERE r.id = NEW.request_id"""
_TABLE = "CREATE TABLE chaos_audit (request_id BIGINT, sample INTEGER, shard_id BIGINT, token INTEGER, state TEXT)"
_SQLITE = (
    _TABLE,
    f"CREATE TRIGGER chaos_stored AFTER INSERT ON outputs BEGIN INSERT INTO chaos_audit {_OWNER_OF_ROW}; END",
    "CREATE TRIGGER chaos_changed AFTER UPDATE ON outputs BEGIN "
    "INSERT INTO chaos_audit VALUES (NEW.request_id, NEW.sample, 0, 0, 'overwritten'); END",
)
_POSTGRESQL = (
    _TABLE,
    "CREATE FUNCTION chaos_stored() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
    f"INSERT INTO chaos_audit {_OWNER_OF_ROW}; RETURN NULL; END $$",
    "CREATE FUNCTION chaos_changed() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
    "INSERT INTO chaos_audit VALUES (NEW.request_id, NEW.sample, 0, 0, 'overwritten'); RETURN NULL; END $$",
    "CREATE TRIGGER chaos_stored AFTER INSERT ON outputs FOR EACH ROW EXECUTE FUNCTION chaos_stored()",
    "CREATE TRIGGER chaos_changed AFTER UPDATE ON outputs FOR EACH ROW EXECUTE FUNCTION chaos_changed()",
)
_ROWS = """
    SELECT r.job_id, r.row_index, r.id AS request_id, r.state, r.error_code, o.sample, o.text
    FROM requests r LEFT JOIN outputs o ON o.request_id = r.id ORDER BY r.job_id, r.row_index, o.sample"""
_BY_LEASE = re.compile(r"^(?P<answer>.*) by (?P<shard>\d+)\.(?P<token>\d+)-(?P<request>\d+)-\d+$", re.DOTALL)


def install_audit(database: Database) -> None:
    with database.write() as connection:
        for statement in _SQLITE if database.is_sqlite else _POSTGRESQL:
            connection.execute(text(statement))


@dataclass
class Verdict:
    rows: int = 0
    jobs: int = 0
    lost: int = 0
    doubled: int = 0
    wrong: int = 0
    """Rows with another text than their prompt's answer, in SQL or in the export."""
    fenced_accepted: int = 0
    faults: list[str] = field(default_factory=list)
    """One line for each, the first of each sort."""
    _said: Counter[str] = field(default_factory=Counter)

    def note(self, counter: str, num_rows: int, what: str) -> None:
        setattr(self, counter, getattr(self, counter) + num_rows)
        self._said[counter] += 1
        if self._said[counter] <= 5:
            self.faults.append(f"{counter}: {what}")


@dataclass
class _Stored:
    """A job as SQL has it."""

    rows: dict[int, list[str | None]] = field(default_factory=lambda: defaultdict(list))
    requests: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    states: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)


def judge(
    database: Database, settings: Settings, batches: dict[str, Batch], history: History, scratch: Path, *, fake: bool
) -> Verdict:
    """Look at every row of every job; the service is down."""
    verdict = Verdict()
    stored = _stored_jobs(database)
    jobs_of_batch: dict[str, list[str]] = defaultdict(list)
    for job_id, job in stored.items():
        exported = _export(database, settings, job_id, scratch)
        name = exported[0]["prompt"].rsplit(" row ", 1)[0] if exported else "?"
        jobs_of_batch[name].append(job_id)
        batch = batches.get(name)
        if batch is None:
            verdict.note("doubled", len(exported), f"job {job_id} is of no batch: {name}")
            continue
        _check_sql(verdict, job_id, job, batch, fake=fake)
        _check_export(verdict, job_id, exported, job, batch)
        verdict.rows += batch.num_rows
        verdict.jobs += 1
    for name, batch in batches.items():
        number = len(jobs_of_batch[name])
        if number > 1:
            verdict.note("doubled", batch.num_rows * (number - 1), f"{name} is {number} jobs")
        if number == 0 and batch.acknowledged:
            verdict.note("lost", batch.num_rows, f"{name} was acknowledged and is no job")
    _check_ends(verdict, database)
    _check_fence(verdict, database, history, fake=fake)
    _check_outbox(verdict, settings.home / "outbox", batches)
    return verdict


def _stored_jobs(database: Database) -> dict[str, _Stored]:
    jobs: dict[str, _Stored] = defaultdict(_Stored)
    with database.read() as connection:
        for row in connection.execute(text(_ROWS)):
            job = jobs[row.job_id]
            job.rows[row.row_index].append(row.text)
            job.requests[row.row_index].add(row.request_id)
            job.states[row.state] += 1
            job.errors[row.error_code or ""] += 1
    return jobs


def _export(database: Database, settings: Settings, job_id: str, scratch: Path) -> list[dict[str, Any]]:
    target = scratch / f"{job_id}.parquet"
    export_job(database, settings, job_id, target)
    rows: list[dict[str, Any]] = pq.read_table(target).to_pylist()
    return rows


def _check_sql(verdict: Verdict, job_id: str, job: _Stored, batch: Batch, *, fake: bool) -> None:
    if set(job.states) != {"completed"}:
        number = sum(job.states.values()) - job.states["completed"]
        verdict.note("lost", number, f"{batch.name}, job {job_id}: rows {dict(job.states)} {dict(job.errors)}")
    missing = set(range(batch.num_rows)) - set(job.rows)
    if missing:
        verdict.note("lost", len(missing), f"{batch.name}: no request for rows {sorted(missing)[:5]}")
    for row, texts in job.rows.items():
        if len(texts) > 1 or len(job.requests[row]) > 1:
            verdict.note("doubled", 1, f"{batch.name} row {row} has {len(texts)} outputs")
        for answer in texts:
            if answer is None and job.states["completed"] == sum(job.states.values()):
                verdict.note("lost", 1, f"{batch.name} row {row} is completed without an output")
            elif fake and answer is not None and not _is_right(answer, prompt_of(batch.name, row)):
                verdict.note("wrong", 1, f"{batch.name} row {row}: {answer[:60]!r}")


def _is_right(answer: str, prompt: str) -> bool:
    match = _BY_LEASE.match(answer)
    return match is not None and match["answer"] == right_answer(prompt)


def _check_export(verdict: Verdict, job_id: str, exported: list[dict[str, Any]], job: _Stored, batch: Batch) -> None:
    """The file has the input's rows in the input's order, each with the answer that SQL has."""
    prompts = [row["prompt"] for row in exported]
    if prompts != [prompt_of(batch.name, row) for row in range(batch.num_rows)]:
        missing, extra = batch.num_rows - len(set(prompts)), len(prompts) - len(set(prompts))
        verdict.note("doubled" if extra else "lost", max(missing, extra), f"export of {job_id} has other rows")
    for number, row in enumerate(exported):
        if row["forq_output"] != job.rows[number][0]:
            verdict.note("wrong", 1, f"export of {batch.name} row {number} says {str(row['forq_output'])[:60]!r}")


def _check_ends(verdict: Verdict, database: Database) -> None:
    """Jobs and shards have ended, and their counters say what the rows say."""
    sums = "num_completed + num_failed + num_cancelled"
    for what, query in {
        "jobs not completed": "SELECT count(*) FROM jobs WHERE state <> 'completed'",
        "shards not done": "SELECT count(*) FROM shards WHERE state <> 'done'",
        "leases left": "SELECT count(*) FROM shards WHERE lease_owner IS NOT NULL OR lease_expires_at IS NOT NULL",
        "shards whose counters are wrong": f"SELECT count(*) FROM shards WHERE {sums} <> end_row - start_row",
    }.items():
        with database.read() as connection:
            number = connection.execute(text(query)).scalar_one()
        if number:
            verdict.note("lost", 0, f"{number} {what}")


def _check_fence(verdict: Verdict, database: Database, history: History, *, fake: bool) -> None:
    """Every stored row was stored under the lease it was generated for, by that lease's own attempt."""
    for row in _audited(database):
        what = f"request {row.request_id}: shard {row.shard_id} was {row.state} with token {row.token}"
        if row.state == "overwritten":
            verdict.note("doubled", 1, f"request {row.request_id} was overwritten")
            continue
        match = _BY_LEASE.match(row.text) if fake else None
        own = match is None or (int(match["shard"]), int(match["token"])) == (row.shard_id, row.token)
        if row.state != "leased" or not own:
            verdict.note("fenced_accepted", 1, f"{what}, the text says {row.text[-40:]!r}")
        elif row.request_id not in history.attempts.get((row.shard_id, row.token), ()):
            verdict.note("fenced_accepted", 1, f"{what}, whose worker tried no such write")


def _audited(database: Database) -> Iterator[Any]:
    join = "FROM outputs o LEFT JOIN chaos_audit a ON a.request_id = o.request_id AND a.sample = o.sample"
    with database.read() as connection:
        yield from connection.execute(text(f"SELECT o.request_id, o.text, a.shard_id, a.token, a.state {join}"))


def _check_outbox(verdict: Verdict, outbox: Path, batches: dict[str, Batch]) -> None:
    """A dropped file's answers lie in the outbox, once."""
    found: Counter[str] = Counter()
    for path in outbox.glob("*.parquet"):
        prompts = pq.read_table(path, columns=["prompt"]).column(0).to_pylist()
        found[prompts[0].rsplit(" row ", 1)[0] if prompts else "?"] += 1
    for batch in batches.values():
        if batch.way == "drop" and found[batch.name] != 1:
            sort = "lost" if found[batch.name] == 0 else "doubled"
            verdict.note(sort, batch.num_rows, f"{batch.name} is in the outbox {found[batch.name]} times")
