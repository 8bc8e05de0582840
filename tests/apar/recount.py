"""A request's receipt counted again, with explicit sets, from the log of an engine's steps."""

import itertools
from dataclasses import dataclass, field
from typing import Any

from engines import Watch
from tiny_models import CHILD, EOS, FORK


@dataclass
class Segment:
    """What a thread wrote between two forks."""

    made_at: int
    steps: list[int] = field(default_factory=list)
    """Of its tokens; [Fork] and a child's own EOS are none."""
    fork_at: int | None = None
    """The length of the path that its [Fork] ends."""


class Recount:
    """One request's figures from the log alone."""

    def __init__(self, watch: Watch, root: str) -> None:
        self.root = root
        self.names = [name for name in watch.prompts if self.is_mine(name)]
        self.prompts = watch.prompts
        self.steps = watch.steps
        self.paths = {name: list(watch.prompts[name]) for name in self.names}
        self.segments: dict[str, list[Segment]] = {name: [Segment(0)] for name in self.names}
        self.preempted = [name for name in watch.preempted if self.is_mine(name)]
        self.sampled_at: list[int] = []
        self.attended = self.forks = 0
        for at, step in enumerate(self.steps):
            for name, tokens in step.sampled.items():
                for token in tokens if self.is_mine(name) else ():
                    self.take(at, name, token)

    def is_mine(self, name: str) -> bool:
        return name.split("#")[0] == self.root

    def take(self, at: int, name: str, token: int) -> None:
        path, segments = self.paths[name], self.segments[name]
        path.append(token)
        self.sampled_at.append(at)
        self.attended += len(path)
        if token == FORK:
            self.forks += 1
            segments[-1].fork_at = len(path)
            segments.append(Segment(at))
            if (child := self.child_at(name, len(path))) is not None:
                self.segments[child] = [Segment(at)]
        elif token != EOS or name == self.root:
            segments[-1].steps.append(at)

    def child_at(self, name: str, length: int) -> str | None:
        """The child forked at the end of so many tokens of a path; None when it never ran."""
        start = [*self.paths[name][:length], CHILD]
        return next((other for other in self.names if self.prompts[other] == start), None)

    def stats(self, num_output_tokens: int) -> dict[str, int]:
        prompt, output = len(self.prompts[self.root]), num_output_tokens
        recomputed, prefilled, copied = self.computed_again()
        held = [{n: h for n, h in step.held.items() if self.is_mine(n)} for step in self.steps]
        positions = self.positions()
        return {
            "threads": 1 + self.forks,
            "forks": self.forks,
            "max_width": max(map(len, held)),
            "steps": max(self.sampled_at) - min(self.sampled_at) + 1,
            "peak_cached_tokens": max(
                len(set(itertools.chain.from_iterable(positions[n][:end] for n, (end, _) in now.items())))
                for now in held
            ),
            "peak_blocks": max(len({block for _, blocks in now.values() for block in blocks}) for now in held),
            "attended_tokens": self.attended,
            "sequential_peak_tokens": prompt + output,
            "sequential_attended_tokens": sum(prompt + i for i in range(1, output + 1)),
            "preemptions": len(self.preempted),
            "recomputed_tokens": recomputed,
            "fork_prefill_tokens": prefilled,
            "copied_forks": copied,
        }

    def positions(self) -> dict[str, list[int]]:
        """A number for each place in the tree of paths: the same place, the same number."""
        numbers: dict[tuple[int, int], int] = {}
        places: dict[str, list[int]] = {}
        for name, path in self.paths.items():
            at, places[name] = -1, []
            for token in path:
                at = numbers.setdefault((at, token), len(numbers))
                places[name].append(at)
        return places

    def computed_again(self) -> tuple[int, int, int]:
        recomputed = prefilled = copied = 0
        had, reached = dict.fromkeys(self.names, 0), dict.fromkeys(self.names, 0)
        begun: set[str] = set()
        for step in self.steps:
            for name, (start, end) in step.computed.items():
                if not self.is_mine(name):
                    continue
                if name in step.started:
                    had[name] = max(had[name], reached[name])
                reached[name] = end
                recomputed += max(0, min(end, had[name]) - start)
                if name not in begun and name != self.root:
                    # What its first start left to compute, whether or not it got to the end of it.
                    left = len(self.prompts[name]) - start
                    prefilled += left
                    copied += left <= 2
                begun.add(name)
        return recomputed, prefilled, copied

    def node_steps(self, nodes: list[list[Any]]) -> list[list[int]]:
        """First and last step of each reported node, by its place in the tree and its number of tokens."""
        first, found = min(self.sampled_at), []
        stack: list[tuple[str | None, int]] = [(self.root, 0)]
        for node in nodes:
            name, number = stack.pop()
            segment = Segment(0) if name is None else self.segments[name][number]
            num_tokens = node[5] - node[4]
            if name is None:
                found.append(node[6:8])  # a child that never ran: when it was made is known from its parent alone
                assert num_tokens == 0
                continue
            steps = segment.steps[:num_tokens] if num_tokens else [segment.made_at]
            assert len(steps) == max(num_tokens, 1)
            if name == self.root and number == 0 and not num_tokens:
                found.append([0, 0])  # forks at once
            else:
                found.append([steps[0] - first, steps[-1] - first])
            if segment.fork_at is not None:
                stack += [(name, number + 1), (self.child_at(name, segment.fork_at), 0)]
        return found


def assert_right(watch: Watch, root: str, found: dict[str, Any], num_tokens: int) -> None:
    recount, nodes = Recount(watch, root), found["nodes"]
    assert found["stats"] == recount.stats(num_tokens)
    assert [node[6:8] for node in nodes] == recount.node_steps(nodes)
    assert nodes[-1][5] == num_tokens
