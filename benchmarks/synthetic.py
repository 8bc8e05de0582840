"""A synthetic data set from end to end: prompts, answers of the real small model, filters, duplicates, a split, a load.

    python -m benchmarks.synthetic --rows 500 --n 2 --json

It makes its own prompts, starts a service of its own, runs a recipe as a user does (`forq run`), and reads the result
with `datasets`. It fails where the counts of the steps do not add up, where a file holds other rows than counted, or
where a question is on both sides of the split.
"""

import itertools
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
import pyarrow.parquet as pq

from jobs.dataset.duplicates import normal_form
from jobs.settings import DEFAULT_MODEL, get_settings
from worker.models import resolve_model

TOPICS = (
    "bread", "rain", "bicycles", "volcanoes", "chess", "honey bees", "the moon", "glass", "rivers", "libraries", "salt",
    "compasses", "coffee", "maps", "bridges", "dinosaurs", "soap", "clocks", "wool", "lightning", "penguins", "paper",
    "violins", "cheese", "deserts", "trains", "mirrors", "mushrooms", "tides", "elevators", "apples", "kites", "coal",
    "lighthouses", "sharks", "pencils", "tea", "snow", "windmills", "spiders", "gold", "radio", "olives", "tunnels",
    "owls", "candles", "rice", "magnets", "whales", "ladders",
)  # fmt: skip
TASKS = (
    "State one fact about {}.", "Give one use of {}.", "Say in one sentence why {} matter to people.",
    "Name one place where one finds {}.", "Write a short question about {}.", "Describe {} to a child in a sentence.",
    "Write a title for an article about {}.", "Name one danger of {}.", "Compare {} with something else in a sentence.",
    "Write one line of a poem about {}.",
)  # fmt: skip

RECIPE = """
input = "prompts.parquet"
name = "synthetic"
system = "You answer in one short sentence."
template = "{{{{ task }}}}"
turn = {turns}

[sampling]
n = {n}
max_tokens = {max_tokens}
temperature = 0.6
top_p = 0.95
seed = 7

[export]
out = "{out}"
format = "messages"
column = ["topic"]
finish_reason = "stop"
min_chars = 15
no_match = '(?i)\\bas an ai\\b'
dedup = "near"
near_threshold = 0.8
test_share = 0.05
"""


@click.command()
@click.option("--rows", default=500, show_default=True, type=click.IntRange(1, len(TOPICS) * len(TASKS)))
@click.option("--n", default=2, show_default=True, help="Samples of a row.")
@click.option("--max-tokens", default=32, show_default=True, help="Of an answer.")
@click.option("--two-turns", is_flag=True, help="Ask for a correction of the answer in a second turn.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line at the end.")
def main(rows: int, n: int, max_tokens: int, two_turns: bool, as_json: bool) -> None:
    """Make a data set and check it."""
    with tempfile.TemporaryDirectory(prefix="forq-synthetic-") as folder:
        report = _run(Path(folder), rows, n, max_tokens, two_turns)
    print(json.dumps(report) if as_json else "\n".join(f"{name}: {value}" for name, value in report.items()))


def _run(folder: Path, num_rows: int, n: int, max_tokens: int, two_turns: bool) -> dict[str, Any]:
    pairs = list(itertools.islice(((topic, task) for task in TASKS for topic in TOPICS), num_rows))
    table = {"topic": [topic for topic, _ in pairs], "task": [task.format(topic) for topic, task in pairs]}
    pq.write_table(pa.table(table), folder / "prompts.parquet")
    turns = '["Is this true: {{ answers[0] }} Answer yes or no and why."]' if two_turns else "[]"
    for name in ("messages", "all"):
        text = RECIPE.format(n=n, max_tokens=max_tokens, turns=turns, out="sft" if name == "messages" else "all")
        (folder / f"{name}.toml").write_text(text)
    forq = _Forq(folder / "home")
    forq("up", "--detach")
    try:
        started = time.monotonic()
        printed = forq("run", str(folder / "messages.toml"), "--json")
        seconds = time.monotonic() - started
        again = forq("run", str(folder / "messages.toml"), "--json")
        jsonl = forq("export", printed["job_id"], str(folder / "sharegpt.jsonl"), "--format", "sharegpt", "--json")
        status = forq("status", printed["job_id"], "--json")
    finally:
        forq("down")
    assert again == printed, "the same recipe again is the same job, and the same files"
    counts = printed["counts"]
    _check(counts, num_rows, n, status)
    assert jsonl["counts"] == counts, "another format, the same answers"
    sizes = _load(folder / "sft", counts, 1 + two_turns)
    num_lines = sum(len((folder / name).read_text().splitlines()) for name in ("sharegpt.jsonl", "sharegpt.test.jsonl"))
    assert num_lines == counts["written"]
    return {"seconds": round(seconds, 1), **status["counts"], "output_tokens": status["output_tokens"],
            "counts": counts, "datasets": sizes}  # fmt: skip


def _check(counts: dict[str, Any], num_rows: int, n: int, status: dict[str, Any]) -> None:
    """The counts of the steps add up."""
    without = counts["rows_failed"] + counts["rows_cancelled"] + counts["rows_waiting"]
    assert counts["rows"] == num_rows == status["counts"]["total"]
    assert counts["answers"] == n * (counts["rows"] - without) == n * status["counts"]["completed"]
    assert counts["answers"] - sum(counts["removed"].values()) == counts["written"]
    assert counts["train"] + counts["test"] == counts["written"]


def _load(folder: Path, counts: dict[str, Any], num_turns: int) -> dict[str, int]:
    """What `datasets` reads is what was counted, and no question is on both sides."""
    os.environ.update(HF_DATASETS_OFFLINE="1", HF_HOME=str(folder.parent / "hf"))
    import datasets

    loaded = datasets.load_dataset(str(folder))
    sizes = {name: split.num_rows for name, split in loaded.items()}
    assert sizes == {"train": counts["train"], "test": counts["test"]}, sizes
    asked = {}
    for name, split in loaded.items():
        assert split.column_names == ["messages", "topic"]
        for messages in split["messages"]:
            assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * num_turns]
        asked[name] = {normal_form(messages[1]["content"]) for messages in split["messages"]}
    assert not asked["train"] & asked["test"]
    return sizes


class _Forq:
    """The command line, on a FORQ_HOME of its own."""

    def __init__(self, home: Path) -> None:
        home.mkdir()
        model = resolve_model(DEFAULT_MODEL, get_settings(), report=lambda line: print(line, file=sys.stderr)).path
        (home / "forq.toml").write_text(
            f'[models.{DEFAULT_MODEL}]\npath = "{model}"\nkv_budget = "1 GiB"\nmax_model_len = 512\n'
            "[queue]\nshard_rows = 100\n"
        )
        self._environment = {**os.environ, "FORQ_HOME": str(home), "FORQ_API_PORT": "8797"}

    def __call__(self, *arguments: str) -> Any:
        command = [sys.executable, "-m", "jobs.cli", *arguments]
        done = subprocess.run(command, env=self._environment, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            raise click.ClickException(f"forq {' '.join(arguments)} ended with {done.returncode}")
        return json.loads(done.stdout) if "--json" in arguments else None


if __name__ == "__main__":
    main()
