"""A judge over a file of answers, with and without ordering: verdicts, flips, and what the prefix cache served.

    python -m benchmarks.judge --answers answers.parquet --json

For each kind and each order, a service of its own (`forq up` on a fresh FORQ_HOME, so a fresh engine with an empty
cache), with the bundled small model as the judge and the same options, runs `forq judge` to its end. `--limit` takes
the first rows, or for pairs the first questions with all their pairs; `--models` keeps the answers of some models.
Exits with 1 where a row is not accounted for: judged + null + failed must be the total.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jobs.settings import DEFAULT_MODEL, get_settings
from worker.models import resolve_model

REPOSITORY = Path(__file__).parents[1]
CONFIGURATION = """
[models."{model}"]
path = "{path}"
kv_budget = "{kv_budget}"
max_model_len = {max_model_len}
"""


class Service:
    """`forq` commands on one FORQ_HOME."""

    def __init__(self, home: Path, configuration: str, nice: int) -> None:
        home.mkdir()
        (home / "forq.toml").write_text(configuration)
        self.home = home
        self._nice = nice
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FORQ_")}
        self._environment = {
            **kept, "FORQ_HOME": str(home), "FORQ_API_PORT": str(_free_port()), "PYTHONPATH": str(REPOSITORY),
        }  # fmt: skip

    def forq(self, *args: object) -> str:
        done = subprocess.run(
            ["nice", "-n", str(self._nice), sys.executable, "-m", "jobs.cli", *map(str, args)],
            cwd=self.home, env=self._environment, text=True, stdout=subprocess.PIPE, check=False,
        )  # fmt: skip
        if done.returncode:
            raise click.ClickException(f"forq {args[0]} ended with {done.returncode}: {done.stdout[-2000:]}")
        return done.stdout


def _free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def measure(home: Path, configuration: str, nice: int, answers: Path, kind: str, ordered: bool, more: list[str]) -> Any:
    """One judging on a service of its own."""
    service = Service(home, configuration, nice)
    service.forq("up", "--detach")
    try:
        began_at = time.monotonic()
        order = [] if ordered else ["--no-order"]
        out = home / "judged"
        report = json.loads(service.forq("judge", answers, "--kind", kind, "--out", out, "--json", *order, *more))
        seconds = time.monotonic() - began_at
        (job,) = report["jobs"].values()
        stats = json.loads(service.forq("stats", job, "--json"))
        status = json.loads(service.forq("status", job, "--json"))
    finally:
        service.forq("down")
    (judge,) = report["judges"]
    cache = judge["prefix_cache"]
    ours = {"prompt_tokens": cache["prompt_tokens"], "cached_prompt_tokens": cache["cached_tokens"]}
    assert ours == {name: stats[name] for name in ours}, "`forq stats` and the report count alike"
    return {
        "kind": kind,
        "ordered": ordered,
        "items": report["items"],
        **{name: judge[name] for name in ("total", "judged", "null", "failed", "parse_rate", "problems", "errors")},
        "flip_rate": judge.get("flip_rate"),
        "first_place_share": (judge.get("position_bias") or {}).get("first_place_share"),
        **cache,
        "seconds": round(seconds, 1),
        "job_seconds": _seconds(status),
        "report": report,
        "accounted": judge["judged"] + judge["null"] + judge["failed"] == judge["total"],
    }


def _seconds(status: dict[str, Any]) -> float:
    from datetime import datetime

    started, finished = (datetime.fromisoformat(status[f"{name}_at"]) for name in ("started", "finished"))
    return round((finished - started).total_seconds(), 1)


@click.command()
@click.option("--answers", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--kind", "kinds", multiple=True, type=click.Choice(["pointwise", "pairwise"]), default=["pointwise"])
@click.option("--order", "orders", multiple=True, type=click.Choice(["yes", "no"]), default=["yes", "no"])
@click.option("--models", help="Keep the answers of these only, comma-separated.")
@click.option("--limit", type=int, help="Rows, or of pairs questions.")
@click.option("--kv-budget", default="1 GiB", show_default=True)
@click.option("--max-model-len", type=int, default=4096, show_default=True)
@click.option("--nice", type=int, default=5, show_default=True, help="Of every process.")
@click.option("--judge-option", "more", multiple=True, help="Passed on to `forq judge`.")
@click.option("--out", type=click.Path(path_type=Path), help="Keep the runs' folders here.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON per run.")
def main(
    answers: Path, kinds: tuple[str, ...], orders: tuple[str, ...], models: str | None, limit: int | None,
    kv_budget: str, max_model_len: int, nice: int, more: tuple[str, ...], out: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Judge a file of answers with the bundled small model."""
    path = resolve_model(DEFAULT_MODEL, get_settings(), report=lambda line: click.echo(line, err=True)).path
    configuration = CONFIGURATION.format(
        model=DEFAULT_MODEL, path=path, kv_budget=kv_budget, max_model_len=max_model_len
    )
    is_well = True
    with tempfile.TemporaryDirectory(prefix="forq-judge-") as scratch:
        folder = out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if models is not None:
            table = pq.read_table(answers)
            kept = pc.is_in(table["model"], value_set=pa.array(models.split(",")))
            answers = folder / "answers.parquet"
            pq.write_table(table.filter(kept), answers)
        own = [*more, *([] if limit is None else ["--limit", str(limit)])]
        for kind in kinds:
            for order in orders:
                home = folder / f"{kind}-{order}"
                found = measure(home, configuration, nice, answers.absolute(), kind, order == "yes", own)
                is_well &= found["accounted"]
                if as_json:
                    click.echo(json.dumps(found))
                else:
                    click.echo("\n".join(f"{name}: {value}" for name, value in found.items() if name != "report"))
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
