"""What a command did."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Result:
    exit_code: int
    out: str
    err: str


Forq = Callable[..., Result]
