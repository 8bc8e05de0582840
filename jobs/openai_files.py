"""The files of the OpenAI-compatible API: uploads, and what batches write.

A file is a row that names content in the data store; several files, and jobs, may name the same. Deleting is expiring
now: the row is not seen any more, and `reclaim` removes row and content when no upload of the same content can be on
its way.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, delete, insert, literal, or_, select, update
from ulid import ULID

from db.clock import db_now
from db.models import Batch, File, Job
from db.session import Database
from db.states import BatchState
from jobs import store
from jobs.batch_claims import IS_OPEN
from jobs.errors import BadInput, NotFound, Unavailable
from jobs.messages import storable
from jobs.settings import Settings
from jobs.source import JSONL_SUFFIXES, PARQUET_SUFFIXES, first_line
from jobs.upkeep import leftovers

INPUT, OUTPUT = "batch", "batch_output"
"""Purposes: what a client uploads, and what a batch writes."""
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * 24 * 3600
MAX_LIST = 10_000
PREFIX = "file-"
_LOST_S = 24 * 3600.0
"""An expired row whose content is not on this machine may be another's to reclaim; after this long nobody's."""
_PER_PAGE = 500
"""Expired rows that are looked at in one go."""
_PARQUET_MAGIC = b"PAR1"

# Of the few open batches, by their index.
_IS_AWAITED = File.id.in_(select(Batch.input_file_id).where(IS_OPEN, Batch.state == BatchState.VALIDATING))
IS_LIVE = or_(File.expires_at.is_(None), File.expires_at > db_now())


def new_id() -> str:
    return f"{PREFIX}{ULID()}"


def create(
    database: Database,
    settings: Settings,
    source: Path,
    *,
    tenant: str,
    purpose: str,
    expires_s: int | None = None,
) -> dict[str, Any]:
    """Keep a file under its own name; `expires_s` counts from now.

    Raises:
        BadInput: another purpose than `batch`, an expiry beyond the limits.
        Unavailable: it cannot be stored.
    """
    if purpose != INPUT:
        raise BadInput(f"purpose is {purpose!r}: files are uploaded for {INPUT!r}")
    check_expiry(expires_s)
    try:
        key = store.keep(settings, source, _suffix(source))
    except OSError as error:
        raise Unavailable(f"the file cannot be stored ({first_line(error)}): check space and rights") from None
    with database.write() as connection:
        return view(
            insert_file(
                connection,
                tenant=tenant,
                filename=source.name,
                purpose=purpose,
                num_bytes=source.stat().st_size,
                data_key=key,
                expires_s=expires_s,
            )
        )


def insert_file(
    connection: Connection,
    *,
    tenant: str,
    filename: str,
    purpose: str,
    num_bytes: int,
    data_key: str,
    expires_s: int | None,
) -> Row[*tuple[Any, ...]]:
    """The row of content that is in the store already."""
    values = {
        "id": new_id(),
        "tenant": tenant,
        "filename": storable(filename),
        "purpose": purpose,
        "num_bytes": num_bytes,
        "data_key": data_key,
        "created_at": db_now(),
        "expires_at": None if expires_s is None else db_now(literal(float(expires_s))),
    }
    return connection.execute(insert(File).values(values).returning(File.__table__)).one()


def check_expiry(seconds: int | None) -> None:
    """Raises BadInput: too short or too long."""
    if seconds is not None and not MIN_EXPIRY_S <= seconds <= MAX_EXPIRY_S:
        raise BadInput(
            f"expires_after.seconds is {seconds}: it must be between {MIN_EXPIRY_S} (an hour) and {MAX_EXPIRY_S} "
            "(30 days)"
        )


def find(database: Database, file_id: str, tenant: str | None) -> Row[*tuple[Any, ...]]:
    """A file that has not expired, of one tenant or of any.

    Raises:
        NotFound: no such file.
    """
    with database.read() as connection:
        return find_within(connection, file_id, tenant)


def find_within(
    connection: Connection, file_id: str, tenant: str | None, *, holding: bool = False
) -> Row[*tuple[Any, ...]]:
    """`holding`: nobody reclaims it before the transaction ends."""
    statement = select(File.__table__).where(_is_visible(file_id, tenant))
    row = connection.execute(statement.with_for_update(read=True) if holding else statement).one_or_none()
    if row is None:
        raise no_file(file_id)
    return row


def list_files(
    database: Database,
    tenant: str | None,
    *,
    after: str | None = None,
    limit: int = MAX_LIST,
    is_newest_first: bool = True,
    purpose: str | None = None,
) -> tuple[list[dict[str, Any]], bool]:
    """A page, and whether more follow; `after` is the last id of the page before."""
    statement = select(File.__table__).where(IS_LIVE)
    if tenant is not None:
        statement = statement.where(File.tenant == storable(tenant))
    if purpose is not None:
        statement = statement.where(File.purpose == storable(purpose))
    if after is not None:
        after = storable(after)
        statement = statement.where(File.id < after if is_newest_first else File.id > after)
    statement = statement.order_by(File.id.desc() if is_newest_first else File.id).limit(limit + 1)
    with database.read() as connection:
        rows = connection.execute(statement).all()
    return [view(row) for row in rows[:limit]], len(rows) > limit


def delete_file(database: Database, file_id: str, tenant: str | None) -> None:
    """A batch that was made of it goes on: its job has a copy.

    Raises:
        NotFound: no such file.
    """
    with database.write() as connection:
        changed = connection.execute(
            update(File).where(_is_visible(file_id, tenant)).values(expires_at=db_now())
        ).rowcount
    if not changed:
        raise no_file(file_id)


def content_path(settings: Settings, row: Row[*tuple[Any, ...]]) -> Path:
    """Raises NotFound: its content is not on this machine."""
    path: Path = settings.data_dir / row.data_key
    if not path.is_file():
        raise NotFound(f"the content of {row.id} is not on this machine: ask where it was uploaded")
    return path


def view(row: Row[*tuple[Any, ...]]) -> dict[str, Any]:
    """As OpenAI writes it."""
    return {
        "id": row.id,
        "object": "file",
        "bytes": row.num_bytes,
        "created_at": int(row.created_at.timestamp()),
        "filename": row.filename,
        "purpose": row.purpose,
        "status": "processed",
        "status_details": None,
        "expires_at": None if row.expires_at is None else int(row.expires_at.timestamp()),
    }


def no_file(file_id: str) -> NotFound:
    shown = file_id if len(file_id) <= 40 else file_id[:37] + "..."
    return NotFound(f"no file {shown!r}: it never was, expired or was deleted")


def reclaim(database: Database, settings: Settings, *, dry_run: bool = False) -> Iterator[leftovers.Left]:
    """Remove expired files and yield the content that nothing else named. What was written within `leftovers.OLD_S`
    waits: an upload of the same content may be between store and row. So does the input of a batch that is still to be
    read, however long its tenant's queue is full."""
    last = ""
    while True:
        statement = (
            select(File.id, File.data_key, (File.expires_at < db_now(literal(-_LOST_S))).label("is_long_ago"))
            .where(File.expires_at <= db_now(), File.id > last, ~_IS_AWAITED)
            .order_by(File.id)
            .limit(_PER_PAGE)
        )
        with database.read() as connection:
            rows = connection.execute(statement).all()
        if not rows:
            return
        for row in rows:
            left = leftovers.old_file(settings, row.data_key)
            if left is None and not (row.is_long_ago and not (settings.data_dir / row.data_key).exists()):
                continue
            if dry_run:
                if left is not None:
                    yield left
                continue
            is_unneeded = _forget(database, row.id) and not _is_named(database, row.data_key)
            if left is not None and is_unneeded and leftovers.remove_unnamed(left):
                yield left
        last = rows[-1].id


def _forget(database: Database, file_id: str) -> bool:
    """Delete an expired file's row; False where somebody else did, or a batch was made of it meanwhile."""
    with database.write() as connection:
        # Whoever makes a batch of it holds it until that can be seen (`find_within`).
        connection.execute(select(File.id).where(File.id == file_id).with_for_update())
        return connection.execute(delete(File).where(File.id == file_id, ~_IS_AWAITED)).rowcount == 1


def _is_named(database: Database, data_key: str) -> bool:
    """Whether a file or a job names this content.

    Asked when the row's deletion is committed: of two processes that delete the last two rows at once, each within its
    transaction would still see the other's, and both would leave the content.
    """
    with database.read() as connection:
        return any(
            connection.execute(select(table.id).where(table.data_key == data_key).limit(1)).first() is not None
            for table in (File, Job)
        )


def _is_visible(file_id: str, tenant: str | None) -> ColumnElement[bool]:
    which = (File.id == storable(file_id)) & IS_LIVE
    return which if tenant is None else which & (File.tenant == tenant)


def _suffix(source: Path) -> str:
    """Parquet or JSONL, by name; what has neither name is looked at."""
    suffix = source.suffix.lower()
    if suffix in PARQUET_SUFFIXES:
        return ".parquet"
    if suffix not in JSONL_SUFFIXES:
        with source.open("rb") as file:
            if file.read(len(_PARQUET_MAGIC)) == _PARQUET_MAGIC:
                return ".parquet"
    return ".jsonl"
