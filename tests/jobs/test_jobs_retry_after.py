"""`Retry-After`: seconds, a date, and what is neither."""

import email.utils
import time

import pytest

from jobs.retry_after import seconds_of


@pytest.mark.parametrize(("text", "seconds"), [("0", 0.0), ("120", 120.0), (" 7 ", 7.0), ("9" * 400, 1e12 - 1)])
def test_seconds(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


def test_a_date() -> None:
    ahead = seconds_of(email.utils.formatdate(time.time() + 90, usegmt=True))
    assert ahead is not None
    assert 85 <= ahead <= 90
    assert seconds_of("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0


@pytest.mark.parametrize("text", [None, "", "soon", "-1", "1.5", "inf", "²", "Wed, 99 Oct 2015 07:28:00 GMT", "\x00"])
def test_what_is_neither(text: str | None) -> None:
    assert seconds_of(text) is None
