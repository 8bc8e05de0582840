"""What the threads of one answer sample, token by token: the form in which an answer is replayed.

A `Script` is one thread: an `int` is a token it samples, a list is a fork, and that list is the child's script. Every
item is exactly one sampled token (a fork is [Fork]), and the thread's EOS comes after the last item, unwritten. The
scripts of both sides flatten to the same tokens.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from benchmarks.replaying.trees import TextTree

Script = list["int | Script"]

EXTRA_ARGS_KEY = "replay"
"""Where a request's `SamplingParams.extra_args` carries its `Replay`, as text."""


def encode_tree(tree: TextTree, encode: Callable[[str], list[int]]) -> Script:
    """The tree's script; every piece of text is tokenised by itself."""
    script: Script = []
    for piece in tree:
        if isinstance(piece, str):
            script.extend(encode(piece))
        else:
            script.append(encode_tree(piece, encode))
    return script


def flatten(script: Script) -> list[int]:
    """The restored answer: each child's tokens where its parent forked, no control tokens, no EOS."""
    return list(_flat(script))


def num_threads(script: Script) -> int:
    return 1 + sum(num_threads(item) for item in script if isinstance(item, list))


def _flat(script: Script) -> Iterator[int]:
    for item in script:
        if isinstance(item, int):
            yield item
        else:
            yield from _flat(item)


@dataclass(frozen=True)
class Replay:
    """One request's script with what is needed to find a thread's place in it.

    `num_prompt_tokens` is the root thread's prompt; a child's prompt is that and the path to the child.
    """

    script: Script
    num_prompt_tokens: int
    fork: int
    child: int
    eos: int

    def to_text(self) -> str:
        """As JSON text: vLLM copies a request's sampling parameters deeply, and a text costs nothing to copy."""
        values = [self.script, self.num_prompt_tokens, self.fork, self.child, self.eos]
        return json.dumps(values, separators=(",", ":"))

    def forced_tokens(self, prompt: list[int]) -> list[int]:
        """All tokens that the thread with this prompt samples, [Fork]s and the EOS included.

        `prompt` is the root's prompt, or for a child the path to it: a [Fork] that is followed by [Child] was the way
        into that fork's child, any other was passed by.

        Raises:
            ValueError: the path is not one of this script.
        """
        items, place = self.script, 0
        for token in prompt[self.num_prompt_tokens :]:
            if token == self.child:
                entered = items[place - 1] if place else None
                if not isinstance(entered, list):
                    raise ValueError(f"[Child] at item {place} of a thread follows no fork of the script")
                items, place = entered, 0
                continue
            expected = items[place] if place < len(items) else self.eos
            if token != (self.fork if isinstance(expected, list) else expected):
                raise ValueError(f"the path has token {token} at item {place} of a thread, the script another")
            place += 1
        return [self.fork if isinstance(item, list) else item for item in items[place:]] + [self.eos]


@lru_cache(maxsize=4096)
def read_replay(text: str) -> Replay:
    """The inverse of `Replay.to_text`, remembered: all threads of a request bring the same text."""
    values: list[Any] = json.loads(text)
    return Replay(*values)
