"""The threads of one answer and what their tokens do to it: forks, ends, limits, and the receipt.

Source: APAR paper, Algorithm 1 (section 3.4.5); restored order is `apar.tree`'s.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from apar.decoding.cache import SlotPool
from apar.decoding.drafting import Drafter
from apar.decoding.verification import Verifier
from apar.options import ControlTokens, ForkLimits
from apar.receipt import Holding, Receipt
from apar.tree import LENGTH, End, Node, ParagraphTree


@dataclass(slots=True, eq=False)
class Thread:
    """A decoding branch while it runs."""

    number: int
    address: tuple[int, ...]
    path: list[int]
    node: Node
    drafter: Drafter
    verify: Verifier
    seed: int
    banned: list[int]
    slots: list[int] = field(default_factory=list)
    """Where the keys and values of the path's first tokens are."""
    num_children: int = 0
    ended: bool = False

    @property
    def depth(self) -> int:
        return len(self.address)


@dataclass(frozen=True, slots=True)
class Rules:
    """What is the same for all threads of an answer."""

    control: ControlTokens | None
    """None: nothing forks."""
    limits: ForkLimits
    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    max_model_len: int

    def banned(self, depth: int, model_control: ControlTokens | None) -> list[int]:
        """Tokens a thread of this depth must not sample; [Child] is the engine's to write, never the model's."""
        if model_control is None:
            return []
        if self.control is None or depth >= self.limits.max_depth:
            return [model_control.child, model_control.fork]
        return [model_control.child]


Child = Callable[[Thread, int, Node, list[int]], Thread]
"""Makes a child: of this thread, with this number, for this detail, with this path."""


class Answer:
    """Threads by number, their tree and their receipt."""

    def __init__(self, rules: Rules, root: Thread, tree: ParagraphTree, pool: SlotPool, make_child: Child) -> None:
        self.threads = [root]
        self.tree = tree
        self.token_ids: list[int] = []
        self.receipt = Receipt(len(root.path), [(0, 0)])
        self._rules = rules
        self._pool = pool
        self._make_child = make_child

    def running(self) -> list[Thread]:
        """Who takes part in the next forward: the threads forked first, as many as may run at once."""
        alive = [thread for thread in self.threads if not thread.ended]
        running = alive[: self._rules.limits.max_width]
        self.receipt.max_width = max(self.receipt.max_width, len(running))
        return running

    def count_cache(self, running: Sequence[Thread]) -> None:
        """Take one forward into the receipt, before its tokens are taken: the running threads' paths are cached."""
        cached = {thread.number: len(thread.path) for thread in running}
        alive = [thread for thread in self.threads if not thread.ended]
        self.receipt.observe(Holding(t.number, cached.get(t.number, len(t.slots)), ()) for t in alive)
        self.receipt.peak_blocks = max(self.receipt.peak_blocks, self._pool.num_used)

    def take(self, thread: Thread, token: int, step: int) -> None:
        """A thread's next token. Its slots must hold its path as far as it has been computed."""
        rules, tree, node = self._rules, self.tree, thread.node
        self.receipt.sampled(len(thread.path), 1)
        thread.path.append(token)
        if rules.control is not None and token == rules.control.fork:
            self._fork(thread, rules.control, step)
        elif token in rules.eos_token_ids:
            if thread.depth == 0:  # of all EOS only the root thread's, the last in restored order, is output
                tree.append(node, token, step)
            self._end(thread, None)
            return
        else:
            tree.append(node, token, step)
            if token in rules.stop_token_ids:
                self._end(thread, End("stop", token))
                return
        if len(thread.path) >= rules.max_model_len:
            self._end(thread, LENGTH)

    def settle(self) -> None:
        """After a forward: what is known in restored order goes out, threads behind the answer's end stop."""
        self.token_ids += [token for token, _ in self.tree.emit()]
        if self.tree.end is not None:
            self._stop(self.threads)
        elif self.tree.needs_pruning():
            pruned = {id(node) for node in self.tree.prune()}
            self._stop(thread for thread in self.threads if id(thread.node) in pruned)

    def _fork(self, thread: Thread, control: ControlTokens, step: int) -> None:
        detail, thread.node = self.tree.fork(thread.node, len(self.threads), step)
        path = [*thread.path, control.child]
        child = self._make_child(thread, len(self.threads), detail, path)
        thread.num_children += 1
        self.threads.append(child)
        self.receipt.branches.append((thread.number, len(thread.path)))
        if len(path) >= self._rules.max_model_len:
            self._end(child, LENGTH)  # no room for its first token
            return
        child.slots = thread.slots[: len(thread.path)]
        self._pool.share(child.slots)

    def _end(self, thread: Thread, end: End | None) -> None:
        self.tree.close(thread.node, end)
        self._stop([thread])

    def _stop(self, threads: Iterable[Thread]) -> None:
        for thread in threads:
            if not thread.ended:
                thread.ended = True
                self._pool.release(thread.slots)
                thread.slots = []
