"""Breaks the running service at random moments, and shows that nothing is lost, doubled or let in.

    python -m benchmarks.chaos --rows 2000 --faults 50 --seed 1 --database postgresql --json

A real broker, database, API, watcher and two worker processes under `forq up` (`chaos_harness/up_entry.py`); the
engine is a fake one that answers in milliseconds, or with `--engine real` the bundled model. One job of `--rows` rows
after the other is submitted for as long as faults come, with small jobs through the API and the drop folder between
them. The faults (`chaos_harness/faults.py`): SIGKILL of a worker, of `forq up`, of its whole tree, of the API, of the
watcher, of the broker, of PostgreSQL; FLUSHALL; SIGSTOP of the broker, and of a worker past its lease; and SIGKILL and
SIGSTOP of a worker at failpoints between any two steps of a shard (`chaos_harness/seams.py`). Then the jobs are waited
for, the service is stopped, and every row is judged in SQL and in its export (`chaos_harness/judge.py`). The seed fixes
which faults come in which order and after what waits; what the processes are at just then, it cannot.

`recovery_s` is the time from a fault until rows of a shard that it interrupted were committed under a later lease, or,
where it interrupted none, under any lease taken since. Leases are short (4 s) unless `--default-leases` is given. Exits
with 1 if anything was lost, doubled, wrong, accepted, stalled or left over.
"""

import json
import logging
import sys
from pathlib import Path

import click

from benchmarks.chaos_harness.faults import FAILPOINTS, WEIGHTS
from benchmarks.chaos_harness.run import Options, failed, run
from benchmarks.chaos_harness.seams import SEAMS
from jobs.logs import configure_logs


@click.command()
@click.option(
    "--rows", default=1000, show_default=True, help="Rows of a job; jobs follow until the faults are through."
)
@click.option("--faults", default=50, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--database", type=click.Choice(["sqlite", "postgresql"]), default="sqlite", show_default=True)
@click.option("--engine", type=click.Choice(["fake", "real"]), default="fake", show_default=True)
@click.option("--default-leases", is_flag=True, help="The default settings of the queue, for recovery times.")
@click.option(
    "--latency-ms", type=(int, int), default=(50, 1500), show_default=True, help="Of the fake engine's answers."
)
@click.option("--kind", "kinds", multiple=True, help="Only these faults, as in worker_stop or kill_at_failpoint:SEAM.")
@click.option("--sabotage", type=click.Choice(["fence"]), help="Take the fence out of the workers: must be noticed.")
@click.option("--keep", type=click.Path(path_type=Path), help="Copy FORQ_HOME here afterwards.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line at the end.")
def main(
    rows: int, faults: int, seed: int, database: str, engine: str, default_leases: bool, latency_ms: tuple[int, int],
    kinds: tuple[str, ...], sabotage: str | None, keep: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Break the service, and judge what it made of it."""
    known = {*WEIGHTS, *(f"{kind}:{seam}" for kind in FAILPOINTS for seam in SEAMS)}
    if unknown := set(kinds) - known:
        raise click.BadParameter(f"{sorted(unknown)[0]}: known are {', '.join(sorted(WEIGHTS))}", param_hint="--kind")
    configure_logs(logging.ERROR)
    latency_s = (latency_ms[0] / 1000, latency_ms[1] / 1000)
    report = run(Options(rows, faults, seed, database, engine, default_leases, latency_s, kinds, sabotage, keep))
    click.echo(json.dumps(report) if as_json else json.dumps(report, indent=2))
    sys.exit(1 if failed(report) else 0)


if __name__ == "__main__":
    main()
