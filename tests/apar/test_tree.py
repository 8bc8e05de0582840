"""The paragraph tree, grown by threads in any order, against a recursive decoder that runs thread after thread."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apar.tree import LENGTH, STOP, End, Node, ParagraphTree, Span

EOS, STOP_TOKEN = 0, 1
STOPPED = End("stop", STOP_TOKEN)


@dataclass(eq=False)
class Script:
    """What a thread does: tokens it samples and, for each [Fork], the child's script; then how it ends."""

    items: list["int | Script"]
    ending: str = "eos"
    """`eos`; `stop`, a user's stop token; or `room`, the longest path the model takes."""
    num_done: int = 0
    """Items, and after them the ending, that have happened."""

    def all(self) -> Iterator["Script"]:
        yield self
        for item in self.items:
            if isinstance(item, Script):
                yield from item.all()

    def __repr__(self) -> str:
        return f"Script({self.items}, {self.ending!r})"


class Cut(Exception):
    pass


@dataclass
class Oracle:
    """The answer, or as much of it as is known: a thread is left where it stands, and nothing behind that is known."""

    max_tokens: int
    max_forks: int
    tokens: list[int] = field(default_factory=list)
    nodes: list[tuple[int | None, str, Script]] = field(default_factory=list)
    """Parent, kind, thread."""
    starts: list[int] = field(default_factory=list)
    end: End | None = None
    num_forks: int = 0

    @classmethod
    def of(cls, script: Script, max_tokens: int, max_forks: int, *, whole: bool) -> "Oracle":
        oracle = cls(max_tokens, max_forks)
        try:
            oracle.run(script, None, whole)
        except Cut:
            pass
        else:
            oracle.end = oracle.end or STOP
        return oracle

    def run(self, thread: Script, forked: int | None, whole: bool) -> None:
        node = self.open(forked, "root" if forked is None else "detail", thread)
        for place, item in enumerate(thread.items):
            if place == thread.num_done and not whole:
                raise Cut
            if isinstance(item, int):
                self.put(item)
                continue
            self.num_forks += 1
            if self.num_forks > self.max_forks:
                self.cut(LENGTH)
            self.run(item, node, whole)
            node = self.open(node, "sibling", thread)
        if thread.num_done <= len(thread.items) and not whole:
            raise Cut
        if thread.ending == "stop":
            self.tokens.append(STOP_TOKEN)
            self.cut(STOPPED)
        if thread.ending == "room":
            self.cut(LENGTH)
        if forked is None:
            self.tokens.append(EOS)

    def put(self, token: int) -> None:
        self.tokens.append(token)
        if len(self.tokens) == self.max_tokens:
            self.cut(LENGTH)

    def cut(self, end: End) -> None:
        self.end = end
        raise Cut

    def open(self, parent: int | None, kind: str, thread: Script) -> int:
        self.nodes.append((parent, kind, thread))
        self.starts.append(len(self.tokens))
        return len(self.nodes) - 1

    def spans(self) -> list[tuple[int, int | None, str, Script, int, int]]:
        ends = [*self.starts[1:], len(self.tokens)]
        return [(i, *node, self.starts[i], ends[i]) for i, node in enumerate(self.nodes)]


class InVain:
    """The threads that can add nothing to the output, from what is known of all threads."""

    def __init__(self, script: Script, max_tokens: int, max_forks: int) -> None:
        self.threads: set[Script] = set()
        self._room, self._forks = max_tokens, max_forks
        self._ended = False
        self._walk(script)

    def _walk(self, thread: Script) -> None:
        for item in thread.items[: thread.num_done]:
            if isinstance(item, int):
                self._room -= 1
                self._ended = self._ended or self._room == 0
            else:
                self._forks -= 1
                self._ended = self._ended or self._forks < 0
                self._walk(item)
        if thread.num_done > len(thread.items):
            self._ended = self._ended or thread.ending != "eos"
        elif self._ended:
            self.threads.add(thread)


class Growing:
    """A tree while the threads of a script run; every script is good for one run."""

    def __init__(self, script: Script, max_tokens: int, max_forks: int) -> None:
        self.script, self.limits = script, (max_tokens, max_forks)
        self.tree = ParagraphTree(max_tokens, max_forks)
        self.nodes: dict[Script, Node] = {script: self.tree.root}
        """What each live thread writes."""
        self.threads = [script]
        self.step = 0
        self.emitted: list[int] = []

    def go_on(self, thread: Script) -> None:
        """One sampled token of a thread. What ends a thread happens with its last token, as in an engine's step."""
        tree, node = self.tree, self.nodes[thread]
        if thread.num_done < len(thread.items):
            item = thread.items[thread.num_done]
            if isinstance(item, int):
                tree.append(node, item, self.step, f"logprobs of {item}")
            else:
                self.nodes[item], self.nodes[thread] = tree.fork(node, len(self.threads), self.step)
                self.threads.append(item)
        elif thread.ending == "eos":
            tree.append(node, EOS, self.step, f"logprobs of {EOS}")
            if thread is not self.script:
                tree.take_back(node)
            tree.close(node)
        elif thread.ending == "stop":
            tree.append(node, STOP_TOKEN, self.step, f"logprobs of {STOP_TOKEN}")
            tree.close(node, STOPPED)
        else:
            tree.close(node, LENGTH)
        thread.num_done += 1
        if thread.num_done > len(thread.items):
            del self.nodes[thread]

    def finish_step(self, *, prune_first: bool) -> None:
        """What an engine does after a step, and everything that must be true then."""
        self.step += 1
        for action in (self._prune, self._emit) if prune_first else (self._emit, self._prune):
            action()

    def _emit(self) -> None:
        for token, extra in self.tree.emit():
            assert extra == f"logprobs of {token}"
            self.emitted.append(token)
        known = Oracle.of(self.script, *self.limits, whole=False)
        assert self.emitted == known.tokens, "all that is known is out, and nothing else"
        assert self.tree.end == known.end
        assert self.tree.num_emitted == len(known.tokens)
        assert self.tree.num_tokens == sum(node.num_tokens for node in self.tree.in_order())

    def _prune(self) -> None:
        in_vain = InVain(self.script, *self.limits).threads & self.nodes.keys()
        if in_vain:
            assert self.tree.needs_pruning()
        pruned = self.tree.prune()
        assert len(pruned) == len(in_vain)
        assert {id(node) for node in pruned} == {id(self.nodes[thread]) for thread in in_vain}
        for thread in in_vain:
            assert self.nodes.pop(thread).closed

    def spans(self) -> list[tuple[int, int | None, str, Script, int, int]]:
        return [(s.node, s.parent, s.kind, self.threads[s.thread], s.start, s.end) for s in self.tree.spans()]

    def run(self, random: Random, *, prune_first: bool) -> None:
        while self.nodes:
            for _ in range(random.randint(1, 4)):
                if self.nodes:
                    thread = random.choice(list(self.nodes))
                    for _ in range(random.randint(1, 3)):
                        if thread in self.nodes:
                            self.go_on(thread)
            self.finish_step(prune_first=prune_first)
        assert self.tree.end is not None, "no thread is left, so the answer has ended"
        assert all(node.closed for node in self.tree.in_order())


def scripts(depth: int = 3) -> st.SearchStrategy[Script]:
    token = st.integers(2, 99)
    items = token if depth == 0 else st.one_of(token, token, token, st.deferred(lambda: scripts(depth - 1)))
    endings = st.sampled_from(["eos"] * 8 + ["stop", "room"])
    return st.builds(Script, st.lists(items, max_size=6), endings)


@pytest.mark.parametrize("prune_first", [True, False])
@settings(max_examples=600, deadline=None)
@given(
    script=scripts(),
    max_tokens=st.one_of(st.integers(1, 12), st.just(1000)),
    max_forks=st.one_of(st.integers(0, 4), st.just(64)),
    random=st.randoms(use_true_random=False),
)
def test_any_interleaving_gives_the_sequential_answer_as_soon_as_it_is_known(
    script: Script, max_tokens: int, max_forks: int, random: Random, prune_first: bool
) -> None:
    growing = Growing(script, max_tokens, max_forks)
    growing.run(random, prune_first=prune_first)
    whole = Oracle.of(script, max_tokens, max_forks, whole=True)
    assert growing.emitted == whole.tokens
    assert growing.tree.end == whole.end
    assert growing.spans() == whole.spans()


def answer(script: Script, max_tokens: int = 99, max_forks: int = 9) -> tuple[list[int], End | None, list[list[int]]]:
    """Tokens, end, and [start, end) of every node, the same for twenty interleavings."""
    found = []
    for seed in range(20):
        for thread in script.all():
            thread.num_done = 0
        growing = Growing(script, max_tokens, max_forks)
        growing.run(Random(seed), prune_first=seed % 2 == 0)
        found.append((growing.emitted, growing.tree.end, [[s.start, s.end] for s in growing.tree.spans()]))
    assert all(each == found[0] for each in found)
    return found[0]


def test_the_max_tokens_th_token_may_be_the_final_eos() -> None:
    script = Script([10, Script([20]), 11])
    assert answer(script, max_tokens=4) == ([10, 20, 11, EOS], STOP, [[0, 1], [1, 2], [2, 4]])
    assert answer(script, max_tokens=3) == ([10, 20, 11], LENGTH, [[0, 1], [1, 2], [2, 3]])


def test_nodes_may_be_empty() -> None:
    script = Script([Script([]), Script([Script([])])])
    assert answer(script) == ([EOS], STOP, [[0, 0], [0, 0], [0, 0], [0, 0], [0, 0], [0, 0], [0, 1]])


def test_a_cut_at_a_fork_leaves_out_both_nodes_behind_it() -> None:
    script = Script([10, 11, Script([20]), 12])
    assert answer(script, max_tokens=2) == ([10, 11], LENGTH, [[0, 2]])
    assert answer(script, max_forks=0) == ([10, 11], LENGTH, [[0, 2]])


def test_a_cut_between_a_detail_and_its_sibling_ends_in_the_detail() -> None:
    assert answer(Script([10, Script([20, 21]), 11]), max_tokens=3) == ([10, 20, 21], LENGTH, [[0, 1], [1, 3]])


def test_forks_are_counted_along_the_answer_not_in_time() -> None:
    # In restored order the third [Fork] is the one inside the second child, whoever comes to its own first.
    script = Script([10, Script([20, Script([30]), 21]), 11, Script([40]), 12])
    assert answer(script, max_forks=2) == (
        [10, 20, 30, 21, 11],
        LENGTH,
        [[0, 1], [1, 2], [2, 3], [3, 4], [4, 5]],
    )


def test_a_stop_token_that_is_the_max_tokens_th_token_is_the_reason() -> None:
    script = Script([10, Script([20], "stop"), 11])
    assert answer(script, max_tokens=3) == ([10, 20, STOP_TOKEN], STOPPED, [[0, 1], [1, 3]])
    assert answer(script, max_tokens=2) == ([10, 20], LENGTH, [[0, 1], [1, 2]])


def test_a_child_without_room_for_a_token_cuts_where_its_first_token_would_be() -> None:
    assert answer(Script([10, Script([], "room"), 11])) == ([10], LENGTH, [[0, 1], [1, 1]])


def test_tokens_that_went_out_before_the_tree_was_kept_count() -> None:
    tree = ParagraphTree(max_tokens=4, max_forks=9)
    tree.already_emitted(2, first_step=5, last_step=6)
    detail, sibling = tree.fork(tree.root, child_thread=1, step=7)
    tree.append(sibling, 12, step=8)
    tree.append(detail, 10, step=8)
    assert tree.emit() == [(10, None)]
    # Two are out and the detail has one: the sibling's is the fourth at best, more of it are in vain.
    assert tree.needs_pruning()
    assert tree.prune() == [sibling]
    tree.append(detail, 11, step=9)
    assert tree.emit() == [(11, None)]
    assert tree.end == LENGTH
    assert tree.prune() == [detail]
    assert tree.spans() == [
        Span(0, None, "root", 0, 0, 2, first_step=5, last_step=6),
        Span(1, 0, "detail", 1, 2, 4, first_step=8, last_step=9),
    ]


def test_spans_tell_threads_and_steps() -> None:
    tree = ParagraphTree(max_tokens=99, max_forks=9)
    tree.append(tree.root, 10, step=3)
    detail, sibling = tree.fork(tree.root, child_thread=1, step=4)
    tree.append(sibling, 11, step=5)
    tree.append(detail, 20, step=6)
    tree.close(detail)
    tree.append(sibling, EOS, step=7)
    tree.close(sibling)
    assert [token for token, _ in tree.emit()] == [10, 20, 11, EOS]
    assert tree.spans() == [
        Span(0, None, "root", 0, 0, 1, first_step=3, last_step=3),
        Span(1, 0, "detail", 1, 1, 2, first_step=6, last_step=6),
        Span(2, 0, "sibling", 0, 2, 4, first_step=5, last_step=7),
    ]
