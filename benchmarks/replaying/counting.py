"""Watches a scheduler from outside, the same way for vLLM's own and for the forking one.

Receives the scheduler of an engine in this process; hands on a `StepLog`. Nothing of the scheduler is replaced: two of
its methods are wrapped, and what they are given and return is counted.
"""

import time
from collections.abc import Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass
class StepLog:
    """One entry per executed engine step that had tokens, then the sums."""

    rows: list[int] = field(default_factory=list)
    """Threads in the step."""
    tokens: list[int] = field(default_factory=list)
    """Tokens scheduled: one per decoding row, more where a row is prefilled."""
    context: list[int] = field(default_factory=list)
    """KV positions that the rows' attention reads: all they have after the step."""
    started_s: list[float] = field(default_factory=list)
    """When the step's scheduling began, in seconds since the run did: it ended when the next one's began."""
    preemptions: int = 0
    recomputed_tokens: int = 0
    """Tokens computed again because a preemption had freed them."""
    fork_prefill_tokens: int = 0
    """Tokens that child threads computed before their first own one."""
    num_children: int = 0
    first_steps: dict[str, int] = field(default_factory=dict)
    """By vLLM's request id, the step in which a request (not a child) first ran."""

    @property
    def num_steps(self) -> int:
        return len(self.rows)


class Watch:
    """Counts the steps of `scheduler` while the context is open. `root_ids`: vLLM's ids of the requests themselves."""

    def __init__(self, scheduler: Any, root_ids: Container[str]) -> None:
        self._scheduler, self._root_ids = scheduler, root_ids
        self._log = StepLog()
        self._known: set[str] = set()
        self._lost: dict[str, int] = {}
        """Preempted requests that are not back where they were: tokens they had computed."""
        self._schedule, self._preempt = scheduler.schedule, scheduler._preempt_request

    def __enter__(self) -> StepLog:
        self._started = time.perf_counter()
        self._scheduler.schedule, self._scheduler._preempt_request = self._on_schedule, self._on_preempt
        return self._log

    def __exit__(self, *_: object) -> None:
        del self._scheduler.schedule, self._scheduler._preempt_request  # the class's own show again

    def _on_preempt(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        computed = request.num_computed_tokens
        self._log.preemptions += 1
        self._lost[request.request_id] = max(computed, self._lost.get(request.request_id, 0))
        return self._preempt(request, *args, **kwargs)

    def _on_schedule(self, *args: Any, **kwargs: Any) -> "SchedulerOutput":
        started_s = time.perf_counter() - self._started
        output: SchedulerOutput = self._schedule(*args, **kwargs)
        if not output.total_num_scheduled_tokens:
            return output
        log, cached = self._log, output.scheduled_cached_reqs
        computed_before = sum(cached.num_computed_tokens)
        for new in output.scheduled_new_reqs:
            computed_before += new.num_computed_tokens
            if new.req_id not in self._known:
                self._known.add(new.req_id)
                if new.req_id in self._root_ids:
                    log.first_steps[new.req_id] = log.num_steps
                else:
                    log.num_children += 1
                    log.fork_prefill_tokens += len(new.prompt_token_ids or ()) - new.num_computed_tokens
        log.rows.append(len(output.num_scheduled_tokens))
        log.tokens.append(output.total_num_scheduled_tokens)
        log.context.append(computed_before + output.total_num_scheduled_tokens)
        log.started_s.append(started_s)
        if self._lost:
            self._count_recomputed(output)
        return output

    def _count_recomputed(self, output: "SchedulerOutput") -> None:
        cached = output.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for request_id in self._lost.keys() & starts.keys():
            start, lost = starts[request_id], self._lost[request_id]
            end = start + output.num_scheduled_tokens[request_id]
            self._log.recomputed_tokens += max(0, min(end, lost) - start)
            if end >= lost:
                del self._lost[request_id]
