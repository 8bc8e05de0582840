"""APAR's decoding, one thread after the other: the oracle that every faster decoder is compared with token by token.

In: a causal language model of transformers (or anything called like one) and a prompt's token ids. Out: the restored
answer, its paragraph nodes and its threads. A thread that samples [Fork] is put aside, its child runs to the child's
end, then the thread goes on; so tokens come out in restored order, and every limit of an answer is a plain "stop here".
Threads never attend to each other: running them one by one or side by side gives the same tokens.

Source: APAR paper, Algorithm 1 (section 3.4.5) and RESTORE (section 3.4.6).
"""

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from apar.options import ControlTokens, ForkLimits

Choose = Callable[[torch.Tensor], int]
"""From a position's logits, float32 [vocabulary], banned tokens at -inf, to the next token's id."""


class Node(NamedTuple):
    """A paragraph node. The fields are the first six of a node in the engine's statistics, in their order."""

    node: int
    parent: int | None
    """The node whose first_child (kind detail) or next_sibling (kind sibling) this one is; None for the root."""
    kind: Literal["root", "detail", "sibling"]
    thread: int
    start: int
    end: int
    """Its tokens are the restored tokens [start, end)."""


class Thread(NamedTuple):
    address: tuple[int, ...]
    """How to get here from the root thread `()`: the ordinal, from 0, of the fork to take in each thread."""
    path: tuple[int, ...]
    """All tokens it attends to or sampled: prompt, control tokens and its EOS included."""


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    token_ids: list[int]
    """The restored answer, the root thread's EOS or the stop token included, control tokens left out."""
    finish_reason: Literal["stop", "length"]
    stop_token_id: int | None
    """The caller's stop token that ended the answer; None when EOS or a limit did."""
    nodes: list[Node]
    """Depth first, as far as the answer went: nodes that lie behind a cut are not there."""
    threads: list[Thread]
    """Depth first, not in the order in which threads that run side by side start."""
    num_forks: int
    """Forks made. The one [Fork] too many that ends an answer is in its thread's path, but is not counted."""
    attended_tokens: int
    """Sum, over all sampled tokens, of the token's position on its path, from 1."""


class ReferenceDecoder:
    """Decodes one prompt at a time with a KV cache; greedy unless `choose` says otherwise.

    The cache is copied for a child rather than cropped for the parent's return, which caches of sliding-window and
    recurrent layers cannot do. Compare in float32: in lower precisions a step of two tokens and two steps of one
    differ enough to change an answer.
    """

    def __init__(
        self,
        model: Any,
        control: ControlTokens | None,
        limits: ForkLimits,
        eos_token_ids: Collection[int],
        max_model_len: int,
        choose: Choose | None = None,
    ) -> None:
        """
        Args:
            model: called as `model(input_ids=[1, tokens], past_key_values=, use_cache=True)`; answers with `.logits`
                [1, tokens, vocabulary] and `.past_key_values`, which `copy.deepcopy` can copy; has a `.device`.
            control: None for a model that cannot fork.
            eos_token_ids: each ends a thread; empty to ignore EOS.
            max_model_len: longest path of a thread, in tokens, the prompt included.
        """
        self._model = model
        self._control = control
        self._limits = limits
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_model_len = max_model_len
        self._choose = choose or greedy

    def decode(
        self,
        prompt_token_ids: Sequence[int],
        *,
        max_tokens: int,
        stop_token_ids: Collection[int] = (),
        fork: bool = True,
    ) -> ReferenceResult:
        """Decode at most `max_tokens` restored tokens.

        Args:
            stop_token_ids: end the whole answer, in whichever thread they come. EOS among them is still only EOS.
            fork: False bans [Fork].

        Raises:
            ValueError: no prompt, a prompt that leaves no room for a token, or `max_tokens` below 1.
        """
        if not 0 < len(prompt_token_ids) < self._max_model_len:
            raise ValueError(f"the prompt has {len(prompt_token_ids)} tokens: use 1 to {self._max_model_len - 1}")
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}: use at least 1")
        answer = _Answer(max_tokens, frozenset(stop_token_ids), self._limits.max_depth if fork else 0)
        with torch.inference_mode():
            self._run_thread(answer, _Branch((), list(prompt_token_ids)), None)
        return answer.result()

    def _run_thread(self, answer: "_Answer", branch: "_Branch", forked_node: int | None) -> None:
        """Run a thread, and the children it forks, to its end or the answer's.

        Args:
            forked_node: the node whose detail the thread is; None for the root thread.
        """
        thread = answer.add_thread(branch)
        node = answer.open_node(forked_node, "root" if forked_node is None else "detail", thread)
        banned = self._banned(may_fork=branch.depth < answer.max_depth)
        while len(branch.path) < self._max_model_len:
            logits_v = self._forward(branch)
            logits_v[banned] = -torch.inf
            token = self._choose(logits_v)
            branch.path.append(token)
            answer.attended_tokens += len(branch.path)
            if self._control is not None and token == self._control.fork:
                if answer.num_forks == self._limits.max_forks:
                    answer.finish("length")
                    return
                answer.num_forks += 1
                self._run_thread(answer, branch.fork(self._control.child), node)
                if answer.finish_reason is not None:
                    return
                node = answer.open_node(node, "sibling", thread)
            elif token in self._eos_token_ids:
                if branch.depth == 0:  # of all EOS only the root thread's, the last in restored order, is output
                    answer.token_ids.append(token)
                    answer.finish("stop")
                return
            else:
                answer.token_ids.append(token)
                if token in answer.stop_token_ids:
                    answer.finish("stop", token)
                    return
                if len(answer.token_ids) == answer.max_tokens:
                    answer.finish("length")
                    return
        answer.finish("length")  # no room for the thread's next token, which for a child may be its first

    def _banned(self, *, may_fork: bool) -> list[int]:
        """[Child] is the engine's to write, never the model's."""
        if self._control is None:
            return []
        return [self._control.child] if may_fork else [self._control.child, self._control.fork]

    def _forward(self, branch: "_Branch") -> torch.Tensor:
        """Compute the KV of the path's new tokens; returns the logits after the last, float32 [vocabulary]."""
        input_ids = torch.tensor([branch.path[branch.num_cached :]], device=self._model.device)
        output = self._model(input_ids=input_ids, past_key_values=branch.cache, use_cache=True)
        branch.cache, branch.num_cached = output.past_key_values, len(branch.path)
        return output.logits[0, -1].float().clone()  # type: ignore[no-any-return]


def greedy(logits_v: torch.Tensor) -> int:
    return int(logits_v.argmax())


@dataclass(slots=True)
class _Branch:
    """A thread while it runs."""

    address: tuple[int, ...]
    path: list[int]
    cache: Any = None
    """KV of the path's first `num_cached` tokens; None when there is none yet."""
    num_cached: int = 0
    num_forks: int = 0

    @property
    def depth(self) -> int:
        return len(self.address)

    def fork(self, child_token_id: int) -> "_Branch":
        """The child of a thread that has just sampled [Fork], whose KV neither of them has yet."""
        address = (*self.address, self.num_forks)
        self.num_forks += 1
        return _Branch(address, [*self.path, child_token_id], copy.deepcopy(self.cache), self.num_cached)


class _Answer:
    """What one prompt's threads have put out so far."""

    def __init__(self, max_tokens: int, stop_token_ids: frozenset[int], max_depth: int) -> None:
        self.max_tokens = max_tokens
        self.stop_token_ids = stop_token_ids
        self.max_depth = max_depth
        self.token_ids: list[int] = []
        self.num_forks = 0
        self.attended_tokens = 0
        self.finish_reason: Literal["stop", "length"] | None = None
        self._stop_token_id: int | None = None
        self._nodes: list[Node] = []
        self._threads: list[tuple[tuple[int, ...], list[int]]] = []

    def add_thread(self, branch: _Branch) -> int:
        self._threads.append((branch.address, branch.path))  # not the branch: its KV is free when the thread ends
        return len(self._threads) - 1

    def open_node(self, parent: int | None, kind: Literal["root", "detail", "sibling"], thread: int) -> int:
        """Close the open node, which is the last one in restored order, and open the next."""
        self._close_node()
        here = len(self.token_ids)
        self._nodes.append(Node(len(self._nodes), parent, kind, thread, here, here))
        return len(self._nodes) - 1

    def finish(self, reason: Literal["stop", "length"], stop_token_id: int | None = None) -> None:
        self.finish_reason, self._stop_token_id = reason, stop_token_id
        self._close_node()

    def result(self) -> ReferenceResult:
        assert self.finish_reason is not None
        threads = [Thread(address, tuple(path)) for address, path in self._threads]
        return ReferenceResult(
            self.token_ids,
            self.finish_reason,
            self._stop_token_id,
            self._nodes,
            threads,
            self.num_forks,
            self.attended_tokens,
        )

    def _close_node(self) -> None:
        if self._nodes:
            self._nodes[-1] = self._nodes[-1]._replace(end=len(self.token_ids))
