"""Locks of a name, until the transaction ends: for checks that no constraint and no row can stand for."""

from sqlalchemy import Connection, func, select


def hold(connection: Connection, purpose: str, name: str) -> None:
    """Wait until no other transaction holds `name` for this purpose, and hold it.

    On SQLite a writing transaction is alone anyway. Two names may share a lock (hashes of 32 bits): that costs time,
    nothing else.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(func.hashtext(purpose), func.hashtext(name))))
