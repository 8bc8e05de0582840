"""What a log line holds of an exception."""

import json
import sys
from typing import Any

import pytest
import structlog

from jobs.logs import configure_logs, place_of

CANARY = "a prompt that nobody else may read"


def raised() -> ValueError:
    try:
        int(CANARY)  # whose error quotes it
    except ValueError as error:
        return error
    raise AssertionError


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Any:
    before = structlog.get_config()
    configure_logs()
    yield structlog.get_logger()
    structlog.configure(**before)


@pytest.mark.parametrize("how", ["in the handler", "as an error", "as a tuple"])
def test_an_exception_is_logged_by_type_and_place_and_never_by_its_text(how: str, log: Any, capsys: Any) -> None:
    error = raised()
    assert CANARY in str(error)
    if how == "in the handler":
        try:
            raise error
        except ValueError:
            log.exception("it_broke", shard=7)
    elif how == "as an error":
        log.error("it_broke", shard=7, exc_info=error)
    else:
        log.error("it_broke", shard=7, exc_info=(type(error), error, error.__traceback__))
    printed = capsys.readouterr().err
    assert CANARY not in printed
    line = json.loads(printed)
    assert (line["event"], line["shard"], line["error"]) == ("it_broke", 7, "ValueError")
    assert "test_jobs_logs.py:" in line["where"]
    assert line["where"].endswith(("raised", "text"))


def test_a_line_without_an_exception_is_as_it_was(log: Any, capsys: Any) -> None:
    log.error("it_broke", exc_info=True)  # in no handler
    log.info("it_works", rows=3)
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first.keys() == {"event", "level", "timestamp"}
    assert second["rows"] == 3


def test_a_place_names_the_innermost_function_first() -> None:
    assert sys.exc_info() == (None, None, None)
    assert place_of(raised()).startswith(__file__)
    assert place_of(ValueError(CANARY)) == ""
