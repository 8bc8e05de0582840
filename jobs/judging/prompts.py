"""From items to the rows of a job: the judge's prompts, in an order that the engine's prefix cache likes.

An engine computes a prefix once and finds it again while its blocks are in the cache. Sorted by their text, prompts
with a prefix in common stand side by side: that of the rubric, then the question, then the first answer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from jobs import store
from jobs.judging.items import Item, Unusable
from jobs.judging.rubrics import CompiledRubric
from jobs.judging.verdicts import ReplyForm
from jobs.source import Progress

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
SCHEMA = pa.schema([("item", pa.int32()), ("turn", pa.int8()), ("order", pa.string()), ("messages", MESSAGES)])
ORDERS = ("ab", "ba")
WRITE_ROWS = 4096


@dataclass(frozen=True, slots=True)
class JudgePrompt:
    """One question to the judge."""

    item: int
    """Its number among the items."""
    turn: int
    """The turn that is judged, from 1."""
    order: str | None
    """Of a pair: `ab`, or `ba` where B's answer is shown first."""
    messages: list[dict[str, str]]


def make_prompts(
    items: Iterable[Item], rubric: CompiledRubric, form: ReplyForm, judged_turns: tuple[int, ...], ordered: bool
) -> tuple[list[JudgePrompt], dict[int, str]]:
    """The prompts, and by item the error of those that cannot be judged or that the rubric fails on."""
    prompts: list[JudgePrompt] = []
    errors: dict[int, str] = {}
    for number, item in enumerate(items):
        try:
            prompts += _prompts_of(number, item, rubric, form, judged_turns)
        except Unusable as error:
            errors[number] = str(error)
    if ordered:
        prompts.sort(key=lambda prompt: [message["content"] for message in prompt.messages])
    return prompts, errors


def _prompts_of(
    number: int, item: Item, rubric: CompiledRubric, form: ReplyForm, judged_turns: tuple[int, ...]
) -> list[JudgePrompt]:
    """Raises Unusable: the item has no prompts."""
    if item.error is not None:
        raise Unusable(item.error)
    low, high = rubric.rubric.scale
    told = {**item.values, "reply": form.instruction(), "low": low, "high": high}
    orders = ORDERS if rubric.rubric.kind == "pairwise" else (None,)
    found = []
    try:
        for turn in judged_turns:
            for order in orders:
                messages = rubric.render(_swapped({**told, "judged_turn": turn}, order))
                for message in messages:
                    message["content"].encode()
                found.append(JudgePrompt(number, turn, order, messages))
    except MemoryError:
        raise
    except UnicodeEncodeError:
        raise Unusable("the prompt would hold half of a surrogate pair: write valid Unicode") from None
    except Exception as error:  # any filter or operator of a user's template may raise anything
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Unusable(f"the rubric failed on this row: {text}") from None
    return found


def write_prompts(
    prompts: Sequence[JudgePrompt], path: Path, report: Progress = lambda phase, done, total: None
) -> None:
    """Write the job's input file."""
    temporary = store.temporary_beside(path)
    try:
        with pq.ParquetWriter(temporary, SCHEMA, compression="zstd", write_statistics=False) as writer:
            for start in range(0, len(prompts), WRITE_ROWS):
                some = prompts[start : start + WRITE_ROWS]
                columns = [[getattr(prompt, name) for prompt in some] for name in SCHEMA.names]
                writer.write_table(
                    pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)
                )
                report("writing", start + len(some), len(prompts))
        store.publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _swapped(values: dict[str, object], order: str | None) -> dict[str, object]:
    if order != "ba":
        return values

    def swap(turn: dict[str, object]) -> dict[str, object]:
        return {**turn, "response_a": turn["response_b"], "response_b": turn["response_a"]}

    turns = values["turns"]
    assert isinstance(turns, list)
    return {**swap(values), "turns": [swap(turn) for turn in turns]}


def sampling_of(form: ReplyForm, *, constrained: bool, logprobs: bool) -> dict[str, object]:
    """The job's sampling values: greedy, so that the same judge says the same again."""
    said: dict[str, object] = {"temperature": 0.0, "max_tokens": form.max_tokens}
    if constrained:
        said["structured"] = form.structured()
    if logprobs:
        said["logprobs"] = 20
    return said
