"""One request's outputs out of its threads': vLLM's front ends see a plain completion under the request's own id."""

from typing import Any

import numpy as np
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists

from apar.scheduler.group import Group, Thread

REASONS = {str(reason): reason for reason in FinishReason}


def rows_of(logprobs: LogprobsLists | None, num_tokens: int) -> list[LogprobsLists | None]:
    """One row of logprobs for each new token of an output, or None for each."""
    if logprobs is None:
        return [None] * num_tokens
    return [
        LogprobsLists(
            logprobs.logprob_token_ids[index : index + 1],
            logprobs.logprobs[index : index + 1],
            logprobs.sampled_token_ranks[index : index + 1],
        )
        for index in range(num_tokens)
    ]


def joined(rows: list[LogprobsLists]) -> LogprobsLists | None:
    """The rows of consecutive tokens as one table, shapes [num_tokens, num_logprobs + 1] and [num_tokens]."""
    if not rows:
        return None
    # A step's table is as wide as its most curious request; rows of different steps are cut to what they share.
    width = min(row.logprobs.shape[1] for row in rows)
    return LogprobsLists(
        np.concatenate([row.logprob_token_ids[:, :width] for row in rows]),
        np.concatenate([row.logprobs[:, :width] for row in rows]),
        np.concatenate([row.sampled_token_ranks for row in rows]),
    )


def carry(thread: Thread, output: EngineCoreOutput) -> None:
    """Keep what of a thread's output belongs to the request and is no token."""
    carried = thread.group.carried
    events = output.events or []
    if thread.parent is not None:
        # A child that is queued or scheduled is no news to anybody; one that is preempted is.
        events = [event for event in events if event.type == EngineCoreEventType.PREEMPTED]
    else:
        for name in ("prefill_stats", "new_prompt_logprobs_tensors", "prompt_token_id_logprobs", "spec_decode_metrics"):
            value = getattr(output, name)
            if value is not None:
                carried[name] = value
    if events:
        carried["events"] = [*carried.get("events", []), *events]
    if output.num_nans_in_logits:
        carried["num_nans_in_logits"] = carried.get("num_nans_in_logits", 0) + output.num_nans_in_logits


def group_output(group: Group, emitted: list[tuple[int, Any]]) -> EngineCoreOutput | None:
    """The request's next output, or None when there is nothing to say yet."""
    tree = group.tree
    assert tree is not None
    if not emitted and tree.end is None:
        return None
    output = EngineCoreOutput(
        request_id=group.request_id,
        new_token_ids=[token for token, _ in emitted],
        new_logprobs=joined([row for _, row in emitted if row is not None]),
        trace_headers=group.root.request.trace_headers,
        **group.carried,
    )
    group.carried = {}
    if tree.end is not None:
        output.finish_reason = REASONS[tree.end.reason]
        output.stop_reason = tree.end.stop_token_id
    if tree.end is not None or group.sends_receipts:
        output.kv_transfer_params = {"apar": group.report(tree.num_emitted)}
    return output
