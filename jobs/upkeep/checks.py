"""The checks of `forq doctor`, in the order they run: what each looks for, and what then helps."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sqlalchemy import select, text

from db.models import Shard, Worker
from db.session import Database
from db.states import ShardState
from db.upgrade import current_revision, newest_revision
from jobs import leases
from jobs.settings import Settings
from jobs.upkeep import invariants as sql
from jobs.upkeep import leftovers

SILENT_S = 300.0
"""A worker that beats every few seconds is not just slow after this long."""
UNSENT_S = 900.0
BATCH_WAITS_S = 600.0
"""A batch whose turn has come is taken on within seconds; checking the largest input takes minutes."""
_MAX_FAULTS = 100
"""SQLite lists so many faults of its file and stops."""


@dataclass(frozen=True, slots=True)
class Found:
    num: int
    example: str | None


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    """Shown while it runs: what should hold."""
    what: str
    """What a finding counts."""
    remedy: str
    find: Callable[[Database, Settings], Found]
    mend: Callable[[Database, Settings], object] | None = None
    """What `--repair` does: always something the service does by itself, too."""
    is_ground: bool = False
    """Where this fails, nothing is repaired, and after a wrong schema nothing else is looked at."""


def _holds(statement: str, seconds: Callable[[Settings], float] | None = None) -> Callable[[Database, Settings], Found]:
    def find(database: Database, settings: Settings) -> Found:
        violations = statement.format(**sql.FRAGMENTS["sqlite" if database.is_sqlite else "postgresql"])
        counted = text(f"SELECT count(*) AS num, min(example) AS example FROM ({violations}) AS found")  # noqa: S608
        values = {} if seconds is None else {"seconds": seconds(settings)}
        with database.read() as connection:
            row = connection.execute(counted, values).one()
        return Found(row.num, row.example)

    return find


def _counted(examples: Iterable[str]) -> Found:
    num, first = 0, None
    for example in examples:
        num, first = num + 1, first or example
    return Found(num, first)


def _schema(database: Database, settings: Settings) -> Found:
    current = current_revision(database)
    return Found(int(current != newest_revision()), f"{current} instead of {newest_revision()}")


def _sqlite_integrity(database: Database, settings: Settings) -> Found:
    if not database.is_sqlite:
        return Found(0, None)
    with database.read() as connection:
        lines = connection.exec_driver_sql(f"PRAGMA integrity_check({_MAX_FAULTS})").scalars().all()
    return _counted(line for line in lines if line != "ok")


def _foreign_keys(database: Database, settings: Settings) -> Found:
    if not database.is_sqlite:  # PostgreSQL has them always on
        return Found(0, None)
    statement = "SELECT count(*), min(\"table\" || ' below ' || parent) FROM pragma_foreign_key_check"
    with database.read() as connection:
        num, example = connection.exec_driver_sql(statement).one()
    return Found(num, example)


def _missing_files(database: Database, settings: Settings) -> Found:
    if not database.is_sqlite and not settings.data_dir.exists():  # a machine that submits nothing
        return Found(0, None)
    return _counted(f"job {job_id}" for job_id in leftovers.missing_files(database, settings))


def _missing_openai_files(database: Database, settings: Settings) -> Found:
    if not database.is_sqlite and not settings.data_dir.exists():
        return Found(0, None)
    return _counted(leftovers.missing_openai_files(database, settings))


def _unnamed_files(database: Database, settings: Settings) -> Found:
    return _counted(left.path.name for left in leftovers.unnamed_files(database, settings))


def _temporaries(database: Database, settings: Settings) -> Found:
    return _counted(str(left.path) for left in leftovers.dead_temporaries(settings))


def _sweep(database: Database, settings: Settings) -> None:
    leases.sweep(database)


def _release(database: Database, settings: Settings) -> None:
    statement = select(Worker.id).where(
        Worker.exited_at.is_not(None),
        Worker.id.in_(select(Shard.lease_owner).where(Shard.state == ShardState.LEASED)),
    )
    with database.read() as connection:
        owners = connection.scalars(statement).all()
    for owner in owners:
        leases.release_all(database, owner, crashed=True)


def _remove_unnamed(database: Database, settings: Settings) -> None:
    for left in leftovers.unnamed_files(database, settings):
        leftovers.remove_unnamed(left)


def _remove_temporaries(database: Database, settings: Settings) -> None:
    for left in leftovers.dead_temporaries(settings):
        leftovers.remove_temporary(left)


_BACKUP = "no command mends this: keep a copy of the database, and restore a backup or submit the job again"
_SWEEP = "any worker's next sweep does it; --repair does it now"

CHECKS = (
    Check("the schema is this version's", "schema of another version", "run `forq db upgrade`", _schema,
          is_ground=True),
    Check("SQLite's file is whole", "faults in the database file",
          "restore a backup; `sqlite3 FILE .recover` may save rows that are in none", _sqlite_integrity,
          is_ground=True),
    Check("foreign keys lead to rows", "rows whose parent is gone", _BACKUP, _foreign_keys),
    Check("shards cover their job", "jobs whose shards do not cover their rows once", _BACKUP,
          _holds(sql.SHARDS_TILE)),
    Check("every row is there once", "jobs with missing or surplus rows", _BACKUP, _holds(sql.ROWS_ARE_THERE)),
    Check("shards count their rows", "shards whose counters are not their rows' states", _BACKUP,
          _holds(sql.COUNTERS_ARE_THE_ROWS)),
    Check("shards count their tokens", "shards whose tokens are not their answers'", _BACKUP,
          _holds(sql.TOKENS_ARE_THE_ANSWERS)),
    Check("ended shards are whole", "ended shards with rows that have not ended", _BACKUP,
          _holds(sql.ENDED_SHARDS_ARE_WHOLE)),
    Check("ended jobs have their shards' totals", "ended jobs whose totals are not their shards'", _BACKUP,
          _holds(sql.TOTALS_ARE_THE_SHARDS)),
    Check("rows have their answers", "rows with other answers than their state and n say", _BACKUP,
          _holds(sql.SAMPLES_ARE_COMPLETE)),
    Check("answers have statistics", "jobs with statistics for some answers only",
          "nothing to do where one of the job's workers ran a scheduler of your own; else restore a backup",
          _holds(sql.ANSWERS_HAVE_STATISTICS)),
    Check("statistics have answers", "statistics without an answer", _BACKUP, _holds(sql.STATISTICS_HAVE_ANSWERS)),
    Check("statistics have trees", "answers with statistics and without a tree", _BACKUP,
          _holds(sql.STATISTICS_HAVE_TREES)),
    Check("trees cover their answer", "nodes that do not follow one another to the answer's end", _BACKUP,
          _holds(sql.NODES_TILE)),
    Check("finished jobs have ended", "jobs without an open shard that have not ended", _SWEEP,
          _holds(sql.JOBS_HAVE_ENDED), _sweep),
    Check("cancelled jobs have ended", "jobs being cancelled that nobody works on", _SWEEP,
          _holds(sql.CANCELLED_JOBS_HAVE_ENDED), _sweep),
    Check("leases are whole", "shards with half a lease", _BACKUP, _holds(sql.LEASES_ARE_WHOLE)),
    Check("expired leases are swept", "leases that expired long ago", _SWEEP,
          _holds(sql.LEASES_ARE_FRESH, lambda settings: settings.queue.lease_s), _sweep),
    Check("leases have living owners", "shards leased to workers that exited",
          "they come back when they expire; --repair gives them back now", _holds(sql.OWNERS_LIVE), _release),
    Check("workers have a pulse", f"workers without a heartbeat for {SILENT_S:.0f} s that did not say they exit",
          "killed, or cut off: look there, start another; `forq purge` forgets them after a day or more",
          _holds(sql.WORKERS_HAVE_A_PULSE, lambda settings: SILENT_S)),
    Check("webhooks are told", f"events that nobody tried to send for {UNSENT_S:.0f} s",
          "no sender runs, or none keeps up: list webhooks.allow and run `forq up`, or `forq webhooks send`",
          _holds(sql.EVENTS_ARE_SENT, lambda settings: UNSENT_S)),
    Check("submitted files are there", "jobs whose submitted file is missing",
          "put it back into FORQ_HOME/data, or export where it was submitted", _missing_files),
    Check("files of the API are there", "uploaded files, or output of batches, that are missing",
          "put them back into FORQ_HOME/data, or ask where they were uploaded", _missing_openai_files),
    Check("batches go on", f"batches that wait for an API process for over {BATCH_WAITS_S:.0f} s",
          "start `forq api` with the same FORQ_HOME; its log says what stands in the way",
          _holds(sql.BATCHES_GO_ON, lambda settings: BATCH_WAITS_S)),
    Check("batches have their output", "ended batches without their output", _BACKUP,
          _holds(sql.BATCHES_HAVE_THEIR_FILES)),
    Check("submitted files have a job", "submitted files that no job names",
          "`forq purge` deletes them, and so does --repair", _unnamed_files, _remove_unnamed),
    Check("nothing is left half-written", "temporary files of processes that are gone",
          "`forq purge` deletes them, and so does --repair", _temporaries, _remove_temporaries),
)  # fmt: skip
