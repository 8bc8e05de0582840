"""Answers all questions with one engine, greedily, and frees the engine."""

import contextlib
import gc
import os
import queue
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from apar.evaluation import Answer, AnswerNode
from jobs.errors import Unavailable
from jobs.results import PendingRow, RowResult, SampleResult
from jobs.sampling import Sampling
from worker.backend import Backend, Decoding, EngineDead, EngineFacts, Finished, Refused
from worker.backends import make_backend
from worker.evaluation.contestants import Contestant
from worker.forking import load_encoder
from worker.generation import RowInFlight, prepare, result_of
from worker.prompts import PromptEncoder

_POLL_S = 1.0
_THREADS_EACH = 16
"""Room in the batch for every answer that may fork: a thread that waits for it would count as steps of the answer."""


@dataclass(frozen=True, slots=True)
class Question:
    row: int
    prompt: str
    category: str


@dataclass(frozen=True, slots=True)
class Answers:
    """One model's answers, by the question's row; what could not be asked is missing."""

    by_row: dict[int, Answer]
    facts: EngineFacts
    refused: dict[int, str]


def answer_all(
    contestant: Contestant,
    questions: Sequence[Question],
    *,
    forks: bool,
    max_tokens: int,
    advance: Callable[[int], None],
) -> Answers:
    """Start an engine, answer everything greedily, and free the engine.

    Raises:
        Unavailable: the engine does not start, dies, or gives no receipts.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its many warnings are for operators of a service
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is the report's
    encoder, forking = load_encoder(contestant.alias, contestant.path)
    with _stdout_as_stderr():
        backend = make_backend(contestant.alias, str(contestant.path), forking)
        try:
            backend.start()
            decoding = Decoding("apar" if forks and forking is not None else "ar")
            return _ask(backend, encoder, questions, decoding, max_tokens, advance)
        except (EngineDead, Unavailable) as error:
            raise Unavailable(" ".join(f"{contestant.name}: {error}".split())) from error
        finally:
            backend.shutdown()
            del backend
            gc.collect()  # the engine's parts know each other: weights and KV cache would stay beside the next one's


def _ask(
    backend: Backend,
    encoder: PromptEncoder,
    questions: Sequence[Question],
    decoding: Decoding,
    max_tokens: int,
    advance: Callable[[int], None],
) -> Answers:
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens)
    flights: dict[str, RowInFlight] = {}
    refused: dict[int, str] = {}
    for question in questions:
        pending = PendingRow(question.row, question.row, {"prompt": question.prompt}, sampling, 0)
        flight = prepare(pending, encoder, backend.facts, max_tokens, "eval", decoding)
        if isinstance(flight, RowResult):
            refused[question.row] = flight.error or ""
        else:
            flights[flight.samples[0].key] = flight
    told: queue.SimpleQueue[Finished | Refused] = queue.SimpleQueue()
    waiting = iter([sample for flight in flights.values() for sample in flight.samples])
    most = backend.facts.max_num_seqs // (_THREADS_EACH if decoding.forks else 1)
    backend.submit(list(islice(waiting, max(1, most))), told.put)
    answers: dict[int, Answer] = {}
    advance(len(refused))
    while len(answers) + len(refused) < len(questions):
        try:
            outcome = told.get(timeout=_POLL_S)
        except queue.Empty:
            if backend.failure is not None:
                raise Unavailable(f"the engine died while it answered: {backend.failure}") from None
            continue
        flight = flights[outcome.key]
        if isinstance(outcome, Refused):
            refused[flight.row.row_index] = outcome.message
        else:
            flight.finished[outcome.key] = outcome
            (sample,) = result_of(flight, encoder).samples
            answers[flight.row.row_index] = _answer(sample)
        backend.submit(list(islice(waiting, 1)), told.put)
        advance(len(answers) + len(refused))
    return Answers(answers, backend.facts, refused)


def _answer(sample: SampleResult) -> Answer:
    stats = sample.stats
    if stats is None:
        raise Unavailable("the alias's own engine.scheduler_cls gives no receipts: remove it to evaluate this model")
    return Answer(
        text=sample.text,
        finish_reason=sample.finish_reason,
        prompt_tokens=sample.prompt_tokens,
        output_tokens=sample.output_tokens,
        threads=stats.threads,
        steps=stats.steps,
        peak_cached_tokens=stats.peak_cached_tokens,
        attended_tokens=stats.attended_tokens,
        nodes=tuple(
            AnswerNode(
                node.node, node.parent, node.kind, node.thread, node.start, node.end, node.first_step, node.last_step,
                node.text_start, node.text_end,
            )
            for node in sample.nodes
        ),
    )  # fmt: skip


@contextlib.contextmanager
def _stdout_as_stderr() -> Iterator[None]:
    """vLLM and its libraries, some of them in C++, print to descriptor 1; ours is for data."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
