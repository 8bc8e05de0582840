"""A fast engine that computes nothing: every prompt has one right answer, which comes after a random while.

The text ends with the key of the sample it was made for, which holds the lease's shard and token: so every stored
answer says under which lease it was generated.
"""

import hashlib
import heapq
import random
import time
from collections.abc import Iterable, Mapping, Sequence

from apar.tree import Span
from benchmarks.chaos_harness.journal import Journal
from jobs.results import Stats
from worker.backend import Done, EngineFacts, Finished, Receipt, Sample
from worker.engine_thread import EngineThread

STEP_S = 0.002
MAX_MODEL_LEN = 512
NUM_TOKENS = 3


def right_answer(prompt: str) -> str:
    return f"answer {hashlib.sha256(prompt.encode()).hexdigest()[:16]}"


class BytesEncoder:
    """As much of `worker.prompts.PromptEncoder` as the shard loop uses: a token is a byte."""

    decoder = None

    def encode_prompt(self, text: str) -> list[int]:
        return list(text.encode())

    encode_text = encode_prompt

    def encode_chat(self, messages: Iterable[Mapping[str, str]]) -> list[int]:
        return self.encode_prompt("\n".join(message["content"] for message in messages))


class FakeBackend(EngineThread[None]):
    """`latency_s` is the shortest and the longest time of an answer."""

    def __init__(self, journal: Journal, latency_s: tuple[float, float], max_num_seqs: int) -> None:
        super().__init__()
        self._journal = journal
        self._latency_s = latency_s
        self._max_num_seqs = max_num_seqs
        self._running: dict[str, tuple[Sample, Done]] = {}
        self._due: list[tuple[float, str]] = []

    @property
    def num_unfinished(self) -> int:
        return len(self._running)

    def _build(self) -> tuple[None, EngineFacts]:
        return None, EngineFacts("fake", "1", 16, 4096, MAX_MODEL_LEN, MAX_MODEL_LEN, self._max_num_seqs)

    def _add(self, engine: None, sample: Sample, done: Done) -> None:
        self._running[sample.key] = sample, done
        heapq.heappush(self._due, (time.monotonic() + random.uniform(*self._latency_s), sample.key))

    def _abort(self, engine: None, keys: Sequence[str]) -> None:
        for key in keys:
            self._running.pop(key, None)

    def _advance(self, engine: None) -> None:
        time.sleep(STEP_S)
        while self._due and self._due[0][0] <= time.monotonic():
            sample, done = self._running.pop(heapq.heappop(self._due)[1], (None, None))
            if sample is not None and done is not None:
                self._journal.write("generated", key=sample.key)
                done(_finished(sample))


def _finished(sample: Sample) -> Finished:
    text = f"{right_answer(bytes(sample.token_ids).decode())} by {sample.key}"
    prompt = len(sample.token_ids)
    stats = Stats(1, 0, 1, NUM_TOKENS, prompt + NUM_TOKENS, 1, NUM_TOKENS * prompt, prompt, NUM_TOKENS * prompt, 0)
    span = Span(0, None, "root", 0, 0, NUM_TOKENS, 0, NUM_TOKENS - 1)
    return Finished(sample.key, text, "stop", tuple(range(NUM_TOKENS)), Receipt(stats, (span,)))
