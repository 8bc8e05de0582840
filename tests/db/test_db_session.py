"""Connections are configured alike for every process."""

from db.session import IDLE_IN_TRANSACTION_S, Database


def test_an_idle_transaction_does_not_hold_its_locks_for_ever(database: Database) -> None:
    if database.is_sqlite:  # there the file's lock ends with the process, and nothing bounds a stopped one
        return
    with database.read() as connection:
        said = connection.exec_driver_sql("SHOW idle_in_transaction_session_timeout").scalar_one()
    assert said in (f"{IDLE_IN_TRANSACTION_S}s", "1min")
