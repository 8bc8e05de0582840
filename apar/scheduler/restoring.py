"""After a step: [Fork] among the new tokens makes a child, and threads' tokens leave in restored order."""

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from apar.scheduler.group import Group, Thread, fork
from apar.scheduler.keeping import GroupKeeping
from apar.scheduler.outputs import carry, group_output, rows_of
from apar.tree import LENGTH, End, Node


class Restoring(GroupKeeping):
    """`update_from_output` and what it calls; the order itself is `apar.tree`."""

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        if self._fork_id in new_token_ids:
            # vLLM compares a thread's own tokens with `max_tokens`; control tokens are no output.
            room = request.max_tokens - request.num_output_tokens
            for token in new_token_ids:
                if room <= 0:
                    break  # drafts went beyond the last token: a [Fork] there is none
                if token == self._fork_id:
                    request.max_tokens += 1
                else:
                    room -= 1
        kept: tuple[list[int], bool] = super()._update_request_with_output(request, new_token_ids, is_stale)
        return kept

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        self._output_step += scheduler_output.total_num_scheduled_tokens > 0
        by_client: dict[int, EngineCoreOutputs]
        by_client = super().update_from_output(scheduler_output, model_runner_output)
        for outputs in by_client.values():
            outputs.outputs = self._restore(outputs.outputs)
        for group, output in self._restored():
            outputs = by_client.setdefault(group.root.request.client_index, EngineCoreOutputs())
            outputs.outputs.append(output)
            if output.finish_reason is not None and self.finished_req_ids_dict is not None:
                outputs.finished_requests = {*(outputs.finished_requests or ()), group.request_id}
        return by_client

    def _restore(self, outputs: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
        """Take the outputs of threads into their trees; what is left goes out as it is."""
        plain = []
        threads, step, fork_id = self._threads, self._output_step, self._fork_id
        touched = self._touched
        for output in outputs:
            thread = threads.get(output.request_id)
            if thread is None:
                plain.append(output)
                continue
            group, tokens = thread.group, output.new_token_ids
            tree = group.tree
            if (
                tree is not None
                and output.finish_reason is None
                and output.new_logprobs is None
                and fork_id not in tokens
                and not output.events
            ):
                # Nearly every output of a forked request: worth a way of its own.
                touched[group] = None
                node = thread.node
                if node is not None and not node.closed:
                    tree.extend(node, tokens, step)
                group.last_step = step  # it has a tree, so it had a first step
            elif tree is None and not (group.may_fork and fork_id in tokens):
                plain.append(output)
                group.sampled_in(step)
                if output.finish_reason is not None:
                    self._finish_plain(group, output)
                elif group.sends_receipts:
                    group.receipt.observe(self._holdings(group))
                    output.kv_transfer_params = {"apar": group.report(thread.request.num_output_tokens)}
            else:
                touched[group] = None
                self._take(thread, output)
                group.sampled_in(step)
        return plain

    def _finish_plain(self, group: Group, output: EngineCoreOutput) -> None:
        """The end of a request that never forked."""
        group.receipt.observe(group.leaving)
        report = {"apar": group.report(group.root.request.num_output_tokens)}
        output.kv_transfer_params = {**(output.kv_transfer_params or {}), **report}
        self._touched.pop(group, None)
        self._forget(group)

    def _take(self, thread: Thread, output: EngineCoreOutput) -> None:
        """Take a thread's new tokens into the tree, fork where it says so, and close its node where it ends."""
        group, tokens = thread.group, output.new_token_ids
        carry(thread, output)
        path_length = thread.request.num_tokens - len(tokens)
        tree = group.tree or group.plant(thread.request.num_output_tokens - len(tokens))
        reason = output.finish_reason
        for token, row in zip(tokens, rows_of(output.new_logprobs, len(tokens)), strict=True):
            path_length += 1
            node = thread.node
            assert node is not None
            if node.closed:
                return  # the output has ended before this place; the thread is about to be stopped
            if token != self._fork_id:
                tree.append(node, token, self._output_step, row)
            elif thread.depth < group.limits.max_depth:
                self._fork(thread, path_length)
        if reason is None:
            return
        node = thread.node
        assert node is not None
        if reason == FinishReason.STOP and (output.stop_reason is None or output.stop_reason in self._eos_ids):
            if thread.parent is not None:
                tree.take_back(node)
                tree.close(node)
            else:
                tree.close(node, End(str(reason), output.stop_reason) if output.stop_reason is not None else None)
        else:
            tree.close(node, End(str(reason), output.stop_reason))

    def _fork(self, thread: Thread, path_length: int) -> None:
        group = thread.group
        assert group.tree is not None
        assert self._control is not None
        assert thread.node is not None
        detail, thread.node = group.tree.fork(thread.node, len(group.threads), self._output_step)
        child = fork(
            thread, path_length, self._control, detail, biased=self._by_bias, hash_block_size=self.hash_block_size
        )
        if child.request.num_tokens >= self.max_model_len:
            # No room for a single token: the output ends here, as it does where any thread meets the model's length.
            group.tree.close(detail, LENGTH)
            child.finished = True
            return
        self._threads[child.request.request_id] = child
        self.requests[child.request.request_id] = child.request
        self._waiting_threads.add(child)

    def _restored(self) -> list[tuple[Group, EngineCoreOutput]]:
        """What the groups that were touched in this step have to say."""
        said = []
        for group in list(self._touched):
            tree = group.tree
            if tree is None:
                continue
            if not (tree.is_ready or tree.end or group.leaving or group.sends_receipts or tree.needs_pruning()):
                continue  # what was written stands behind a thread that is still to write
            emitted = tree.emit()
            prunes = tree.end is not None or tree.needs_pruning()
            if group.leaving or prunes or group.sends_receipts:
                group.receipt.observe([*group.leaving, *self._holdings(group)])
            if prunes:
                self._stop_behind(group, tree.prune())
            group.leaving = []
            output = group_output(group, emitted)
            if output is not None:
                said.append((group, output))
            if tree.end is not None:
                self._forget(group)
        self._touched.clear()
        return said

    def _stop_behind(self, group: Group, nodes: list[Node]) -> None:
        """End the threads that write behind the end of the output."""
        ended = {id(node) for node in nodes}
        ids = [t.request.request_id for t in group.threads if not t.finished and id(t.node) in ended]
        if ids:
            # vLLM's own: ours takes ids for whole requests.
            super(GroupKeeping, self).finish_requests(ids, RequestStatus.FINISHED_ABORTED)
