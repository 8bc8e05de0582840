"""Progress of long benchmarks: one line on a terminal's standard error, nothing elsewhere."""

import sys


def progress(what: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{what} {done}/{total}", end="\n" if done >= total else "", file=sys.stderr, flush=True)
