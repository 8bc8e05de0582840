"""The drop folder: a file that comes to rest in the inbox becomes a job, or goes to `rejected/` with a reason.

A file's way: `inbox/` → (rest, end in place, no writer) → `inbox/.claimed/<id>/` → submit → receipt in `outbox/` →
`accepted/`. The rename into the private claim folder comes before the use, so that nobody can exchange the file between
check and submit; and whatever a killed watcher leaves there is taken up by the next one. Polled, not notified:
inotify is silent on NFS and in many container mounts.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

import structlog
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from ulid import ULID

from db.models import Job
from db.session import Database
from jobs import doorbell
from jobs.drop.claim import Claim, alone, has_accepted, make_private, open_claims
from jobs.drop.files import is_data_name, shown
from jobs.drop.job_toml import in_words_of_the_job_file, job_files_of, read_options
from jobs.drop.judge import Judge, Verdict
from jobs.drop.outbox import Backoff, Outbox, Receipt, Stopping, is_our_trouble
from jobs.errors import BadInput, QueueFull, Unavailable
from jobs.settings import Settings
from jobs.submit import Submitted, submit_file

MAX_TRIES = 5
"""Submits of one file that may end with an unexpected error or the watcher's death before the file is rejected."""

Ring = Callable[[Settings, str, int], bool]

log = structlog.get_logger()


@dataclass
class Scan:
    """What one pass did."""

    submitted: list[str] = field(default_factory=list)
    """Ids of new jobs."""
    duplicates: list[str] = field(default_factory=list)
    """Job ids of files whose content was a job already."""
    rejected: list[str] = field(default_factory=list)
    """Names as they are in `rejected/`."""
    exported: list[str] = field(default_factory=list)
    """Names of results in `outbox/`."""
    num_waiting: int = 0
    """Files not at rest yet, or held back by a trouble that is not theirs."""
    is_database_away: bool = False
    is_busy: bool = False
    """Another watcher was at work on the same folder; nothing was done."""


class Inbox:
    """Watches `settings.home/inbox`. `scan` is one pass, `run` repeats it; neither raises for one file's sake."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        ring: Ring = doorbell.ring,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._settings = settings
        self._database = database
        self._ring = ring
        self._now = now
        self.inbox = settings.home / "inbox"
        self.claimed = self.inbox / ".claimed"
        self.accepted = settings.home / "accepted"
        self.rejected = settings.home / "rejected"
        self.outbox = Outbox(settings, database, clock, self._check_stop)
        self._judge = Judge(settings.drop, clock, lambda name: self._tell("drop_held_open", file=name))
        self._backoff = Backoff(settings.drop.poll_s, clock)
        self._stop = threading.Event()
        self._rings = True
        self._told: set[str] = set()
        """Troubles that were logged and are not over: each gets one line when it begins, not one per poll."""
        self._has_cleaned = False

    def run(self, stop: threading.Event) -> None:
        """Scan every `drop.poll_s` until `stop` is set, whatever happens to files, database or broker meanwhile."""
        self._stop = stop
        log.info("inbox_watched", folder=str(self.inbox))
        while not stop.is_set():
            try:
                self.scan()
                self._over("scan_failed")
            except Stopping:
                break
            except Exception as error:  # a watcher that dies of one bad moment is a drop folder that lies
                self._tell("scan_failed", reason=type(error).__name__)
            stop.wait(self._settings.drop.poll_s)

    def scan(self) -> Scan:
        """One pass: finish what was claimed, take what is ready, export what has ended.

        Raises:
            OSError: the folders cannot be made or read.
            Unavailable: the claim folder is not ours alone.
        """
        done = Scan()
        self._make_folders()
        with alone(self.claimed) as is_alone:
            if not is_alone:
                done.is_busy = True
                self._tell("inbox_busy")
                return done
            self._over("inbox_busy")
            if not self._has_cleaned:
                self.outbox.remove_leftovers()
                self._has_cleaned = True
            done.is_database_away = not self._database_answers()
            self._rings = True
            self._finish_claims(done)
            self._take_files(done)
            self._judge.forget_gone()
            if not done.is_database_away:
                try:
                    done.exported = self.outbox.update()
                except SQLAlchemyError as error:
                    done.is_database_away = True
                    self._tell("drop_database_away", reason=type(error).__name__)
        return done

    def _finish_claims(self, done: Scan) -> None:
        """Go on with the files of a watcher that was killed, and with those a trouble or a late writer held back."""
        for claim in open_claims(self.claimed):
            self._check_stop()
            if not self._backoff.is_due(claim.id):
                done.num_waiting += 1
                for path in filter(None, (claim.data, claim.toml)):
                    self._judge.keep(path)
                continue
            try:
                if claim.data is None:
                    claim.undo(self.inbox, self.rejected)
                elif (reason := claim.reason()) is not None:
                    self._reject(claim, reason, done)
                elif (receipt := self.outbox.find_receipt(claim.id, claim.data.name)) is not None:
                    claim.accept(self.accepted, receipt.job_id)
                else:
                    self._decide(claim, self._judge.look(claim.data, claim.toml), done, is_recovery=True)
            except OSError as error:
                self._hold(claim, error, done)

    def _take_files(self, done: Scan) -> None:
        with os.scandir(self.inbox) as entries:
            names = {entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)}
        data_names = sorted(filter(is_data_name, names))
        job_files = job_files_of(data_names, names)
        num_users = Counter(job_files.values())
        for name in data_names:
            self._check_stop()
            toml_name = job_files.get(name, "")
            toml = self.inbox / toml_name if toml_name else None
            try:
                verdict = self._judge.look(self.inbox / name, toml)
                if verdict.waits or (done.is_database_away and verdict.reason is None):
                    done.num_waiting += 1
                    continue
                claim = Claim.take(self.claimed / str(ULID()), self.inbox / name, toml, num_users[toml_name] > 1)
                num_users[toml_name] -= 1
            except FileNotFoundError:
                continue  # withdrawn meanwhile; a job.toml already claimed goes back at the next scan
            except OSError as error:
                done.num_waiting += 1
                self._tell("drop_not_taken", file=shown(name), reason=type(error).__name__)
                continue
            try:
                self._decide(claim, verdict, done, is_recovery=False)
            except OSError as error:
                self._hold(claim, error, done)

    def _decide(self, claim: Claim, verdict: Verdict, done: Scan, *, is_recovery: bool) -> None:
        assert claim.data is not None
        if verdict.reason is not None:
            self._reject(claim, verdict.reason, done)
        elif verdict.waits or done.is_database_away or not claim.holds(verdict.signatures):
            # The last: exchanged or written between check and claim, another file than the one judged. In the claim
            # folder nobody reaches it by name, so it is judged again there until it rests.
            done.num_waiting += 1
        elif claim.count_try() > MAX_TRIES:
            reason = f"{MAX_TRIES} tries to submit it ended unexpectedly, the limit is {MAX_TRIES}: see forq's log"
            self._reject(claim, reason, done)
        else:
            self._submit(claim, done, is_recovery=is_recovery)

    def _submit(self, claim: Claim, done: Scan, *, is_recovery: bool) -> None:
        assert claim.data is not None
        before = claim.signatures()
        try:
            options = read_options(claim.toml, self._settings)
            submitted = submit_file(self._database, self._settings, claim.data, options, self._check_stop)
        except Stopping:
            claim.forget_tries()
            raise
        except Exception as error:  # whatever one file brings about must not stop the others
            if claim.signatures() != before:
                claim.forget_tries()
                done.num_waiting += 1  # a late writer, whom the kernel could not tell of: judged again when it rests
            elif isinstance(error, BadInput) and not is_our_trouble(error):
                self._reject(claim, in_words_of_the_job_file(str(error), claim.data.name), done)
            else:
                self._hold(claim, error, done)
            return
        self._backoff.worked(claim.id)
        self._over("drop_held_back", claim_id=claim.id)
        # A killed watcher may have submitted this very file: then the job is new although the database knew it.
        is_new = submitted.is_new or (is_recovery and not has_accepted(self.accepted, submitted.job_id))
        if is_new:
            self._wake(submitted)
        receipt = Receipt(
            job_id=submitted.job_id,
            file=claim.data.name,
            model=submitted.model,
            submitted_at=_utc(self._now()),
            duplicate=not is_new,
            state="queued",
            claim_id=claim.id,
        )
        name = self.outbox.open_receipt(receipt)
        log.info("drop_submitted", job_id=receipt.job_id, file=shown(receipt.file), receipt=name, duplicate=not is_new)
        (done.submitted if is_new else done.duplicates).append(receipt.job_id)
        claim.accept(self.accepted, receipt.job_id)

    def _reject(self, claim: Claim, reason: str, done: Scan) -> None:
        self._told.discard("drop_held_back" + claim.id)
        name = claim.reject(self.rejected, reason, f"rejected {_utc(self._now())}")
        # The reason may quote the file, so the log only says where it is.
        log.warning("drop_rejected", file=name, reason_file=f"{name}.reason.txt")
        done.rejected.append(name)

    def _hold(self, claim: Claim, error: Exception, done: Scan) -> None:
        """Leave a claim for a later scan. Only errors that nobody foresaw count against the file."""
        done.num_waiting += 1
        if is_our_trouble(error):
            claim.forget_tries()
            done.is_database_away = done.is_database_away or isinstance(error, SQLAlchemyError)
        self._backoff.failed(claim.id)
        self._tell("drop_held_back", claim_id=claim.id, reason=_reason_of(error))

    def _wake(self, submitted: Submitted) -> None:
        if not self._rings:
            return  # a broker that is away costs seconds per try; workers poll, and the sweeper rings again
        try:
            self._rings = self._ring(self._settings, submitted.model, submitted.num_shards)
        except Exception as error:  # the job is safe already: no broker trouble may undo that
            self._rings = False
            log.warning("doorbell_not_rung", job_id=submitted.job_id, reason=type(error).__name__)

    def _database_answers(self) -> bool:
        try:
            with self._database.read() as connection:
                connection.execute(select(Job.id).limit(1)).first()
        except SQLAlchemyError as error:
            self._tell("drop_database_away", reason=type(error).__name__)
            return False
        self._over("drop_database_away")
        return True

    def _make_folders(self) -> None:
        self._settings.home.mkdir(parents=True, exist_ok=True)
        for folder in (self.inbox, self.outbox.folder, self.rejected, self.accepted):
            folder.mkdir(mode=0o700, exist_ok=True)
        make_private(self.claimed)

    def _check_stop(self, *_: object) -> None:
        if self._stop.is_set():
            raise Stopping

    def _tell(self, event: str, **facts: str) -> None:
        key = event + facts.get("file", "") + facts.get("claim_id", "")
        if key not in self._told:
            self._told.add(key)
            log.warning(event, **facts)

    def _over(self, event: str, claim_id: str = "") -> None:
        if event + claim_id in self._told:
            self._told.discard(event + claim_id)
            log.info(event + "_over", **({"claim_id": claim_id} if claim_id else {}))


def _reason_of(error: Exception) -> str:
    """For the log: the text of errors that are not about the file's content, and of others their type."""
    if isinstance(error, Unavailable | QueueFull):
        return str(error)
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__


def _utc(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
