"""The main job on real input, as `make demo` runs it: start everything, submit, wait, export, look, stop everything.

It drives the same commands a user types, and nothing else.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq

QUESTIONS = Path(__file__).parent / "questions.parquet"
MODEL = "smollm2-135m-apar"
SHOWN = ("q01", "q07", "q19")
LONGEST_SHOWN = 420


def main() -> int:
    started = time.monotonic()
    home = Path(os.environ.get("FORQ_HOME") or Path.home() / ".forq")
    home.mkdir(parents=True, exist_ok=True)
    answers = home / "demo-answers.parquet"
    with _service():
        say("submit 24 questions")
        job_id = json.loads(
            forq("submit", str(QUESTIONS), "--model", MODEL, "--decoding", "apar", "--id-column", "id",
                 "--max-tokens", "200", "--temperature", "0", "--name", "demo", "--json", capture=True)
        )["job_id"]  # fmt: skip
        print(f"job {job_id}")
        say("wait")
        forq("wait", job_id)
        say("export")
        forq("export", job_id, str(answers))
        say("a few answers")
        show(answers)
        say("the thread tree of the answer that forked most")
        forq("show", job_id, str(most_forked(answers)))
        say("the memory receipt")
        forq("stats", job_id)
        say("stop")
    print(f"\nDone in {time.monotonic() - started:.0f} s. All answers: {answers}")
    return 0


@contextlib.contextmanager
def _service() -> Iterator[None]:
    """`forq up` for the time of the block; one that runs already is used and left alone."""
    parts = json.loads(forq("ps", "--json", capture=True))
    if any(part["part"] == "up" for part in parts):
        if not any(part["part"] == "worker" and part.get("model") == MODEL for part in parts):
            sys.exit(f"forq is up with another model: `forq down` first, or start `forq worker --model {MODEL}`")
        say("forq is up already: using it")
        yield
        return
    if "FORQ_API_PORT" not in os.environ and not _is_free(8765):
        os.environ["FORQ_API_PORT"] = str(_free_port())
    say("start database, broker, worker with its engine, API and drop folder")
    forq("up", "--detach", "--model", MODEL)
    try:
        yield
    finally:
        forq("down")


def forq(*arguments: str, capture: bool = False) -> str:
    """Run one forq command; ends the demo if it fails."""
    print(f"$ forq {' '.join(arguments)}", flush=True)
    command = [sys.executable, "-m", "jobs.cli", *arguments]
    done = subprocess.run(command, check=False, text=True, stdout=subprocess.PIPE if capture else None)
    if done.returncode != 0:
        sys.exit(done.returncode)
    return done.stdout or ""


def show(answers: Path) -> None:
    for row in pq.read_table(answers).to_pylist():
        if row["id"] in SHOWN:
            text = row["forq_output"] or f"{row['forq_error_code']}: {row['forq_error']}"
            text = text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN].rsplit(" ", 1)[0] + " …"
            tokens = (
                f"{row['forq_prompt_tokens']} + {row['forq_output_tokens']} tokens, {row['forq_threads']} threads, "
                f"{row['forq_steps']} steps, {row['forq_finish_reason']}"
            )
            print(f"[{row['id']}] {row['prompt']}  ({tokens})")
            print(textwrap.indent(text.strip(), "    "), end="\n\n")


def most_forked(answers: Path) -> int:
    """The row, counted from 0, whose answer has most threads."""
    threads = pq.read_table(answers, columns=["forq_threads"])["forq_threads"].to_pylist()
    return max(range(len(threads)), key=lambda row: threads[row] or 0)


def say(line: str) -> None:
    print(f"\n== {line}", flush=True)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
