"""From a row to samples for the engine, and back from finished samples to the row's result with its statistics."""

from dataclasses import dataclass, field, replace

from jobs.forking import drafter_of
from jobs.results import Node, PendingRow, RowResult, SampleResult, Turn
from jobs.sampling import MAX_SEED, Sampling
from jobs.turns import conversation, num_turns
from worker.backend import Decoding, EngineFacts, Finished, Receipt, Refused, Sample
from worker.prompts import PromptEncoder, PromptError
from worker.restoration import restore
from worker.texts import text_ends

TURN_STRIDE = 0x1E3779B97F4A7C15
"""Between the seeds of a sample's turns: as far from those of other samples and rows as can be."""


@dataclass(slots=True)
class RowInFlight:
    """A row whose samples are in the engine, each at one of its turns."""

    row: PendingRow
    num_prompt_tokens: int
    """Of the first turn."""
    samples: list[Sample]
    """The turn that each sample is at."""
    finished: dict[str, Finished] = field(default_factory=dict)
    """Last turns."""
    refused: Refused | None = None
    error: RowResult | None = None
    """A later turn cannot be asked."""
    earlier: dict[int, list[Turn]] = field(default_factory=dict)
    """By the sample's number, its answers before the turn it is at."""

    @property
    def is_done(self) -> bool:
        stopped = self.refused is not None or self.error is not None
        return stopped or len(self.finished) == len(self.samples)

    @property
    def num_turns(self) -> int:
        return num_turns(self.row.payload)


def prepare(
    row: PendingRow,
    encoder: PromptEncoder,
    facts: EngineFacts,
    default_max_tokens: int,
    key_prefix: str,
    decoding: Decoding = Decoding(),  # noqa: B008  (frozen)
) -> RowInFlight | RowResult:
    """Tokenise a row and check it against the engine's limits; a row that cannot run comes back as its error."""
    try:
        if "messages" in row.payload:
            token_ids = encoder.encode_chat(row.payload["messages"])
        elif row.payload.get("raw"):
            token_ids = encoder.encode_text(row.payload["prompt"])
        else:
            token_ids = encoder.encode_prompt(row.payload["prompt"])
    except PromptError as error:
        return _refuse(row, error.code, str(error))
    error_message = too_long(len(token_ids), facts)
    if error_message is not None:
        return _refuse(row, "prompt_too_long", error_message)
    sampling = row.sampling
    max_tokens = _max_tokens(sampling, default_max_tokens, len(token_ids), facts)
    samples = [
        Sample(
            key=f"{key_prefix}-{row.request_id}-{number}",
            token_ids=token_ids,
            sampling=sampling,
            max_tokens=max_tokens,
            # Derived, so that the samples of a row differ and each is the same in every run.
            seed=None if sampling.seed is None else (sampling.seed + number) % MAX_SEED,
            decoding=decoding,
        )
        for number in range(sampling.n or 1)
    ]
    return RowInFlight(row, len(token_ids), samples)


def advance(
    in_flight: RowInFlight,
    item: Finished | Refused,
    encoder: PromptEncoder,
    facts: EngineFacts,
    default_max_tokens: int,
    restoration: str = "exact",
) -> Sample | None:
    """Note how one of the row's samples ended; returns its next turn, where it has one.

    The answer is in the next turn's conversation, as text: what looks like a control token in it is none. A turn that
    cannot be asked fails the row, and what its samples have answered so far is dropped: a row has answers or an error.
    """
    if isinstance(item, Refused):
        in_flight.refused = item
        return None
    number = next(i for i, sample in enumerate(in_flight.samples) if sample.key == item.key)
    earlier = in_flight.earlier.setdefault(number, [])
    if len(earlier) + 1 == in_flight.num_turns:
        in_flight.finished[item.key] = item
        return None
    last, row = in_flight.samples[number], in_flight.row
    result = _sample_result(last, item, encoder, restoration, ())
    earlier.append(Turn(result.text, result.finish_reason, result.prompt_tokens, result.output_tokens))
    where = f"turn {len(earlier) + 1} of {in_flight.num_turns}"
    try:
        token_ids = encoder.encode_chat(conversation(row.payload, [turn.content for turn in earlier]))
    except PromptError as error:
        in_flight.error = _refuse(row, error.code, f"{where}: {error}")
        return None
    message = too_long(len(token_ids), facts)
    if message is not None:
        in_flight.error = _refuse(row, "prompt_too_long", f"{where}, after {len(earlier)} answer(s): {message}")
        return None
    following = replace(
        last,
        key=f"{last.key.partition('~')[0]}~{len(earlier)}",
        token_ids=token_ids,
        max_tokens=_max_tokens(row.sampling, default_max_tokens, len(token_ids), facts),
        seed=None if last.seed is None else (last.seed + TURN_STRIDE) % MAX_SEED,
    )
    in_flight.samples[number] = following
    return following


def _max_tokens(sampling: Sampling, default: int, num_prompt_tokens: int, facts: EngineFacts) -> int:
    # An answer may not outgrow the context: it then ends with `length`, like any other answer that was cut. The same
    # holds for a forked one, although no single thread of it is that long: so that one group always fits the engine.
    return min(sampling.max_tokens or default, facts.max_model_len - num_prompt_tokens)


def too_long(num_prompt_tokens: int, facts: EngineFacts) -> str | None:
    """Why a prompt cannot run, or None: at least one token of answer must fit behind it."""
    if num_prompt_tokens < facts.max_model_len:
        return None
    if facts.max_model_len < facts.context_len and facts.max_model_len >= facts.num_blocks * facts.block_size - 1:
        blocks = -(-(num_prompt_tokens + 1) // facts.block_size)
        return (
            f"the prompt and one token of answer need {blocks} KV blocks of {facts.block_size} tokens, the KV budget "
            f"is {facts.num_blocks}: raise kv_budget or shorten the prompt"
        )
    return (
        f"the prompt has {num_prompt_tokens} tokens, at most {facts.max_model_len - 1} leave room for an answer: "
        "shorten it or raise max_model_len"
    )


def cannot_decode(decoding: Decoding, facts: EngineFacts, model: str) -> str | None:
    """Why no row of a job with this decoding can run on the worker's engine, or None."""
    name = decoding.name
    if decoding.forks and not facts.can_fork:
        what = f"the worker's model {model!r} has no control tokens"
        remedy = f"name fork_token and child_token in [models.{model}]"
    elif name in facts.decodings:
        return None
    elif drafter_of(name) == "medusa" and "ptd" in facts.decodings:
        what = f"the worker's model {model!r} has no Medusa heads"
        remedy = f"name their folder as medusa in [models.{model}.reference]"
    else:
        what = f"the worker runs model {model!r} on {facts.engine}, which has {', '.join(facts.decodings)}"
        remedy = f'say backend = "reference" in [models.{model}]'
    return f"decoding is {name}, but {what}: {remedy} of the worker's forq.toml, restart it and retry the job"


def result_of(in_flight: RowInFlight, encoder: PromptEncoder, restoration: str = "exact") -> RowResult:
    """The result of a row whose samples are all done; `restoration` is a profile of `worker.restoration`."""
    if in_flight.refused is not None:
        return _refuse(in_flight.row, "engine_refused", f"the engine refused the row: {in_flight.refused.message}")
    if in_flight.error is not None:
        return in_flight.error
    samples = [
        _sample_result(
            sample, in_flight.finished[sample.key], encoder, restoration, tuple(in_flight.earlier.get(number, ()))
        )
        for number, sample in enumerate(in_flight.samples)
    ]
    return RowResult(in_flight.row.request_id, tuple(samples))


def _sample_result(
    sample: Sample, finished: Finished, encoder: PromptEncoder, restoration: str, turns: tuple[Turn, ...]
) -> SampleResult:
    receipt = finished.receipt
    nodes = _nodes(sample, finished, receipt, encoder) if receipt else ()
    text, nodes = restore(restoration, finished.text, nodes)
    return SampleResult(
        text=text,
        finish_reason=finished.finish_reason,
        prompt_tokens=len(sample.token_ids),
        output_tokens=len(finished.token_ids),
        stats=receipt.stats if receipt else None,
        nodes=nodes,
        turns=turns,
        logprobs=finished.logprobs,
        cached_tokens=finished.cached_tokens,
    )


def _nodes(sample: Sample, finished: Finished, receipt: Receipt, encoder: PromptEncoder) -> tuple[Node, ...]:
    """The tree with the text of each node: in depth-first order they follow one another in the output."""
    text, token_ends = finished.text, [span.end for span in receipt.spans]
    ends = [len(text)]
    if len(token_ends) > 1:
        ends = text_ends(encoder.decoder, sample.token_ids, finished.token_ids, token_ends, text)
    return tuple(Node(*span, start, end) for span, start, end in zip(receipt.spans, [0, *ends], ends, strict=False))


def _refuse(row: PendingRow, code: str, message: str) -> RowResult:
    return RowResult(row.request_id, error_code=code, error=message)
