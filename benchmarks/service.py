"""The service's rows per second beside a bare `LLM.generate`: same model, rows, sampling and engine options, one run.

    python -m benchmarks.service --rows 400 --json

Both sides are measured with their engine loaded and warm. The bare side is timed around `LLM.chat`, from texts to
texts. The service is timed from the moment the job is stored until it has ended, on the database's clock: leasing,
tokenising, storing every answer and tree included; several shards are in flight. Sides alternate (bare, service,
service, bare, …), so that a slow spell of the machine does not fall on one of them alone; each pair gives a ratio, and
their median counts.
"""

import json
import os
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq

from examples.make_questions import QUESTIONS
from jobs.settings import DEFAULT_MODEL, get_settings
from worker.engine import engine_args, prepare_environment
from worker.models import resolve_model

WARM_UP_ROWS = 16


@click.command()
@click.option("--rows", default=400, show_default=True, help="Rows of the job.")
@click.option("--shards", default=8, show_default=True, help="Shards the rows are split into.")
@click.option("--max-tokens", default=64, show_default=True)
@click.option("--pairs", default=2, show_default=True, help="Pairs of measurements.")
@click.option("--multiprocessing/--in-process", default=False, help="The bare side's engine core in its own process.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line at the end.")
def main(rows: int, shards: int, max_tokens: int, pairs: int, multiprocessing: bool, as_json: bool) -> None:
    """Measure the service beside a bare LLM.generate."""
    prompts = _prompts(rows)
    model_path = str(resolve_model(DEFAULT_MODEL, get_settings(), report=_say).path)
    measured: dict[str, list[dict[str, float]]] = {"bare": [], "service": []}
    with tempfile.TemporaryDirectory(prefix="forq-bench-") as folder:
        for pair in range(pairs):
            for side in ("bare", "service") if pair % 2 == 0 else ("service", "bare"):
                if side == "bare":
                    result = _bare(Path(folder), model_path, prompts, max_tokens, multiprocessing)
                else:
                    result = _service(Path(folder) / f"home-{pair}", model_path, prompts, max_tokens, shards)
                measured[side].append(result)
                _say(f"{side}: {result['rows_per_s']:.2f} rows/s, {result['tokens_per_s']:.1f} tokens/s")
    ratios = [
        service["rows_per_s"] / bare["rows_per_s"]
        for bare, service in zip(measured["bare"], measured["service"], strict=True)
    ]
    report = {"rows": rows, "shards": shards, "max_tokens": max_tokens, **measured, "ratios": ratios}
    report["ratio"] = median(ratios)
    print(json.dumps(report) if as_json else f"service / bare: {report['ratio']:.3f}  (pairs: {ratios})")


def _prompts(num_rows: int) -> list[str]:
    """Different prompts of different lengths, so that neither side lives off the prefix cache."""
    questions = [question for group in QUESTIONS.values() for question in group]
    return [f"({number}) {questions[number % len(questions)]}" for number in range(num_rows)]


def _bare(
    folder: Path, model_path: str, prompts: list[str], max_tokens: int, multiprocessing: bool
) -> dict[str, float]:
    task = folder / "bare.json"
    task.write_text(json.dumps({"model_path": model_path, "prompts": prompts, "max_tokens": max_tokens}))
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocessing))}
    command = [sys.executable, "-m", "benchmarks.service_bare", str(task)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise click.ClickException(f"the bare side failed: {done.stderr[-2000:]}")
    # The engine's own process may write to stdout after us.
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"rows_per_s"')]
    result: dict[str, float] = json.loads(lines[-1])
    return result


def _service(home: Path, model_path: str, prompts: list[str], max_tokens: int, shards: int) -> dict[str, float]:
    home.mkdir()
    (home / "forq.toml").write_text(
        f'[models.bench]\npath = "{model_path}"\nkv_budget = "1 GiB"\nmax_model_len = 2048\n'
        f"[queue]\nshard_rows = {-(-len(prompts) // shards)}\n"
    )
    environment = {**os.environ, "FORQ_HOME": str(home), "FORQ_DEFAULT_MODEL": "bench", "FORQ_API_PORT": "8799"}

    def forq(*arguments: str) -> Any:
        command = [sys.executable, "-m", "jobs.cli", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise click.ClickException(f"forq {' '.join(arguments)} failed: {done.stderr[-2000:]}")
        return json.loads(done.stdout) if "--json" in arguments else None

    def run(rows: list[str]) -> dict[str, Any]:
        file = home / "rows.parquet"
        pq.write_table(pa.table({"prompt": rows}), file)
        job = forq("submit", str(file), "--max-tokens", str(max_tokens), "--temperature", "0", "--json")
        status: dict[str, Any] = forq("wait", job["job_id"], "--json")
        return status

    forq("up", "--detach")
    try:
        run(prompts[:WARM_UP_ROWS])
        status = run([f"{prompt} " for prompt in prompts])  # the blank: nothing of the warm-up is in the prefix cache
    finally:
        forq("down")
    created, finished = (datetime.fromisoformat(status[name]) for name in ("created_at", "finished_at"))
    seconds = (finished - created).total_seconds()
    return {
        "rows_per_s": status["counts"]["completed"] / seconds,
        "tokens_per_s": status["output_tokens"] / seconds,
        "seconds": seconds,
        "output_tokens": status["output_tokens"],
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def bench_engine_args(model_path: str) -> dict[str, Any]:
    """The engine options the service would use for the benchmark's alias."""
    from jobs.settings import KVBudget, ModelAlias

    prepare_environment()
    return engine_args(ModelAlias(kv_budget=KVBudget.parse("1 GiB"), max_model_len=2048), model_path)


if __name__ == "__main__":
    main()
