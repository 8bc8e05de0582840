"""The header `Retry-After`, in both of its forms (RFC 9110, 10.2.3)."""

import time
from email.utils import parsedate_to_datetime


def seconds_of(value: str | None) -> float | None:
    """How many seconds from now; None where it is left out or is neither a number of seconds nor a date."""
    text = (value or "").strip()
    if text.isdecimal() and text.isascii():
        return float(text[:12])
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
