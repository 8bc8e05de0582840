"""Stand-ins for the shard loop's tests: an engine that finishes samples when it is told to, and an encoder that turns
the prompt "row 7" into the token [7]."""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import select
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel

from db.models import Job, Output, Request, RequestStats, Shard, ThreadNode
from db.session import Database
from jobs.forking import VLLM_DECODINGS
from jobs.settings import DEFAULT_MODEL, Settings
from jobs.submit import SubmitOptions, submit_file
from worker.backend import Done, EngineDead, EngineFacts, Finished, Receipt, Refused, Sample
from worker.forking import read_receipt
from worker.prompts import PromptError
from worker.shards import ShardLoop

PATIENCE_S = 30.0
"""Longest wait for something that happens at once on a quiet machine."""
BLOCK_SIZE = 4


class NumberEncoder:
    """Encodes "row 7" as [7] and "long" as more tokens than fit; refuses "refused"; breaks on what `broken` says."""

    def __init__(self, broken: Callable[[str], BaseException | None] = lambda text: None) -> None:
        self._broken = broken

    @property
    def decoder(self) -> Tokenizer:
        """Knows the tokens of forked answers: "one", ":", " detail two", and an end without text."""
        tokenizer = Tokenizer(WordLevel(vocab={"": 2, "one": 5, ":": 6, " detail two": 7}, unk_token=""))
        tokenizer.decoder = Fuse()
        return tokenizer

    def encode_prompt(self, text: str) -> list[int]:
        if (error := self._broken(text)) is not None:
            raise error
        if text == "refused":
            raise PromptError("template_refused", "the template refuses it")
        return [0] * 100 if text == "long" else [int(text.split()[1])]


class ScriptedBackend:
    """Implements `worker.backend.Backend`. `script` answers a sample at once, or returns None to keep it running."""

    def __init__(
        self,
        script: Callable[[Sample], Finished | Refused | None] = lambda sample: None,
        max_num_seqs: int = 64,
        can_fork: bool = False,
        decodings: tuple[str, ...] = VLLM_DECODINGS,
    ) -> None:
        self._facts = EngineFacts("scripted", "1", BLOCK_SIZE, 16, 64, 64, max_num_seqs, can_fork, decodings)
        self._script = script
        self._failure: str | None = None
        self._changed = threading.Condition()
        self._running: dict[str, tuple[Sample, Done]] = {}
        self.seen: list[Sample] = []
        self.aborted: list[str] = []

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    @property
    def failure(self) -> str | None:
        return self._failure

    def submit(self, samples: Iterable[Sample], done: Done) -> None:
        with self._changed:
            if self._failure is not None:
                raise EngineDead(self._failure)
            for sample in samples:
                self.seen.append(sample)
                self._running[sample.key] = sample, done
                answer = self._script(sample)
                if answer is not None:
                    del self._running[sample.key]
                    done(answer)
            self._changed.notify_all()

    def abort(self, keys: Iterable[str]) -> None:
        with self._changed:
            for key in keys:
                self.aborted.append(key)
                self._running.pop(key, None)
            self._changed.notify_all()

    def shutdown(self) -> None:
        pass

    @property
    def rows(self) -> list[int]:
        """The rows that have a sample in the engine, sorted."""
        with self._changed:
            return self._rows()

    def wait_for_rows(self, *rows: int) -> None:
        """Wait until exactly these rows are in the engine."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._rows() == sorted(rows), PATIENCE_S):
                raise AssertionError(f"rows {self._rows()} are in the engine, not {sorted(rows)}")

    def finish(self, *rows: int) -> None:
        """Finish every sample of these rows."""
        self._end(lambda sample: sample.token_ids[0] in rows, answer)

    def finish_sample(self, row: int, number: int, how: Callable[[Sample], Finished | Refused]) -> None:
        self._end(lambda sample: sample.token_ids[0] == row and sample.key.endswith(f"-{number}"), how)

    def die(self, reason: str = "out of memory") -> None:
        self._failure = reason

    def _end(self, which: Callable[[Sample], bool], how: Callable[[Sample], Finished | Refused]) -> None:
        with self._changed:
            for key, (sample, done) in list(self._running.items()):
                if which(sample):
                    del self._running[key]
                    done(how(sample))

    def _rows(self) -> list[int]:
        return sorted({sample.token_ids[0] for sample, _ in self._running.values()})


def receipt(num_prompt_tokens: int, num_tokens: int, nodes: list[list[Any]] | None = None, **stats: int) -> Receipt:
    """As the scheduler would report it; without nodes, of an answer of one thread."""
    steps = max(num_tokens - 1, 0)
    nodes = nodes or [[0, None, "root", 0, 0, num_tokens, 0, steps]]
    threads = 1 + max(node[3] for node in nodes)
    peak = num_prompt_tokens + steps
    counted = {
        "threads": threads, "forks": threads - 1, "max_width": threads, "steps": num_tokens, "preemptions": 0,
        "peak_cached_tokens": peak, "peak_blocks": -(-peak // BLOCK_SIZE), "attended_tokens": 9,
        "recomputed_tokens": 0, "fork_prefill_tokens": 0, "copied_forks": 0,
    }  # fmt: skip
    found = read_receipt({"version": 1, "stats": {**counted, **stats}, "nodes": nodes}, num_prompt_tokens, num_tokens)
    assert found is not None
    return found


def answer(sample: Sample) -> Finished:
    text = f"answer {sample.token_ids[0]}"
    return Finished(sample.key, text, "stop", (5, 6, 2), receipt(len(sample.token_ids), 3))


def refuse(sample: Sample) -> Refused:
    return Refused(sample.key, "temperature is too hot")


def eventually(condition: Callable[[], object], what: str) -> None:
    """Look until it is so: for what only the database can tell."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:.0f} s: {what}"
        time.sleep(0.01)


class Loops:
    """`run_available` in a number of `threading.Thread`s, as Celery runs it."""

    def __init__(self, loop: ShardLoop, number: int = 1) -> None:
        self.errors: list[BaseException] = []
        self._loop = loop
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(number)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        try:
            self._loop.run_available()
        except BaseException as error:
            self.errors.append(error)

    def join(self) -> None:
        """Wait for their end, which must come by itself."""
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "the loop has not ended"
        assert not self.errors, self.errors


def submit(database: Database, settings: Settings, prompts: list[str] | int, **options: Any) -> str:
    """Submit prompts, or "row 0" to "row N-1". Returns the job's id."""
    texts = prompts if isinstance(prompts, list) else [f"row {i}" for i in range(prompts)]
    settings.home.mkdir(parents=True, exist_ok=True)
    path = settings.home / "input.parquet"
    pq.write_table(pa.table({"prompt": texts}), path)
    return submit_file(database, settings, path, SubmitOptions(**{"model": DEFAULT_MODEL, **options})).job_id


def job_of(database: Database, job_id: str) -> Any:
    with database.read() as connection:
        return connection.execute(select(Job.__table__).where(Job.id == job_id)).one()


def shards_of(database: Database, job_id: str) -> list[Any]:
    with database.read() as connection:
        return list(connection.execute(select(Shard.__table__).where(Shard.job_id == job_id).order_by(Shard.ordinal)))


def rows_of(database: Database, job_id: str) -> dict[int, tuple[str, str | None]]:
    """Row → (state, error code)."""
    with database.read() as connection:
        found = connection.execute(
            select(Request.row_index, Request.state, Request.error_code)
            .where(Request.job_id == job_id)
            .order_by(Request.row_index)
        ).all()
    return {row.row_index: (row.state, row.error_code) for row in found}


def answers_of(database: Database, job_id: str) -> dict[int, list[str]]:
    """Row → its samples' texts; the receipt and the tree must be there for each."""
    with database.read() as connection:
        found = connection.execute(
            select(Request.row_index, Output.text, RequestStats.steps, ThreadNode.node)
            .join(Output, Output.request_id == Request.id)
            .outerjoin(
                RequestStats, (RequestStats.request_id == Output.request_id) & (RequestStats.sample == Output.sample)
            )
            .outerjoin(ThreadNode, (ThreadNode.request_id == Output.request_id) & (ThreadNode.sample == Output.sample))
            .where(Request.job_id == job_id)
            .order_by(Request.row_index, Output.sample)
        ).all()
    answers: dict[int, list[str]] = {}
    for row in found:
        assert row.steps is not None
        assert row.node == 0
        answers.setdefault(row.row_index, []).append(row.text)
    return answers


OWNER = "A" * 26


def with_queue(settings: Settings, **values: Any) -> Settings:
    return settings.model_copy(update={"queue": settings.queue.model_copy(update=values)})


def make_loop(
    database: Database, settings: Settings, backend: ScriptedBackend, encoder: NumberEncoder | None = None
) -> ShardLoop:
    return ShardLoop(database, settings, OWNER, DEFAULT_MODEL, backend, encoder or NumberEncoder())  # type: ignore[arg-type]


class DiesWithAll(ScriptedBackend):
    """Dies when `number` rows are in it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def submit(self, samples: Any, done: Any) -> None:
        super().submit(samples, done)
        if len(self.rows) == self._number:
            self.die("illegal memory access")
