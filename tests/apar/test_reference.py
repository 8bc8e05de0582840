"""The sequential-thread decoder against answers written by hand, and against itself without a cache on a real model."""

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import CHILD as TINY_CHILD
from tiny_models import EOS as TINY_EOS
from tiny_models import FORK as TINY_FORK
from tiny_models import MAX_MODEL_LEN, make_tiny_model, random_prompts
from transformers import AutoModelForCausalLM

from apar.options import ControlTokens, ForkLimits
from apar.reference import Node, ReferenceDecoder, ReferenceResult, greedy

EOS, FORK, CHILD, DULL, VOCAB_SIZE = 0, 1, 2, 3, 32
PROMPT = [4, 5, 6]
CONTROL = ControlTokens(FORK, CHILD)

Script = list[Any]
"""What a thread samples: a token, or for [Fork] the child's own script."""

LIST = [10, [20, 21, EOS], 11, [22, EOS], 12, EOS]
NESTED = [10, [20, [30, EOS], 21, EOS], 11, EOS]


class ScriptedModel:
    """Prefers [Child] everywhere, then what the script says at this path, then `DULL`. Its cache is the path itself,
    changed in place as caches are: a child that shares it with its parent, or a token fed twice, leaves the script."""

    device = torch.device("cpu")

    def __init__(self, script: Script, prompt: list[int] = PROMPT) -> None:
        self._wanted = dict(wanted_tokens(script, tuple(prompt)))
        self.num_computed = 0

    def __call__(self, *, input_ids: torch.Tensor, past_key_values: deque[int] | None, use_cache: bool) -> Any:
        cache: deque[int] = deque() if past_key_values is None else past_key_values
        logits = torch.zeros(1, input_ids.shape[1], VOCAB_SIZE)
        logits[..., CHILD], logits[..., DULL] = 3.0, 1.0
        for i, token in enumerate(input_ids[0].tolist()):
            cache.append(token)
            logits[0, i, self._wanted.get(tuple(cache), EOS)] = 2.0
        self.num_computed += input_ids.shape[1]
        return SimpleNamespace(logits=logits, past_key_values=cache)


def wanted_tokens(script: Script, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int]]:
    for item in script:
        token = FORK if isinstance(item, list) else item
        yield path, token
        path = (*path, token)
        if isinstance(item, list):
            yield from wanted_tokens(item, (*path, CHILD))


def decode(script: Script, *, max_tokens: int = 1000, max_model_len: int = 1000, **options: Any) -> ReferenceResult:
    limits = ForkLimits(max_forks=options.pop("max_forks", 64), max_depth=options.pop("max_depth", 2))
    control, eos = options.pop("control", CONTROL), options.pop("eos_token_ids", [EOS])
    decoder = ReferenceDecoder(ScriptedModel(script), control, limits, eos, max_model_len)
    return decoder.decode(PROMPT, max_tokens=max_tokens, **options)


# ---------------------------------------------------------------------------------------------------------------------
# Threads, order, tree


def test_details_come_between_a_node_and_its_sibling() -> None:
    result = decode(LIST)
    assert result.token_ids == [10, 20, 21, 11, 22, 12, EOS]
    assert (result.finish_reason, result.stop_token_id, result.num_forks) == ("stop", None, 2)
    assert result.nodes == [
        Node(0, None, "root", 0, 0, 1),
        Node(1, 0, "detail", 1, 1, 3),
        Node(2, 0, "sibling", 0, 3, 4),
        Node(3, 2, "detail", 2, 4, 5),
        Node(4, 2, "sibling", 0, 5, 7),
    ]


def test_a_thread_sees_its_own_path_only() -> None:
    threads = decode(LIST).threads
    assert [thread.address for thread in threads] == [(), (0,), (1,)]
    assert [list(thread.path) for thread in threads] == [
        [*PROMPT, 10, FORK, 11, FORK, 12, EOS],
        [*PROMPT, 10, FORK, CHILD, 20, 21, EOS],
        [*PROMPT, 10, FORK, 11, FORK, CHILD, 22, EOS],
    ]


def test_details_fork_in_turn() -> None:
    result = decode(NESTED)
    assert result.token_ids == [10, 20, 30, 21, 11, EOS]
    assert [thread.address for thread in result.threads] == [(), (0,), (0, 0)]
    assert result.nodes == [
        Node(0, None, "root", 0, 0, 1),
        Node(1, 0, "detail", 1, 1, 2),
        Node(2, 1, "detail", 2, 2, 3),
        Node(3, 1, "sibling", 1, 3, 4),
        Node(4, 0, "sibling", 0, 4, 6),
    ]


def test_nodes_and_threads_may_be_empty() -> None:
    result = decode([[EOS], [EOS], EOS])
    assert result.token_ids == [EOS]
    assert [(node.start, node.end) for node in result.nodes] == [(0, 0), (0, 0), (0, 0), (0, 0), (0, 1)]


def test_an_answer_without_forks_is_one_node() -> None:
    result = decode([10, 11, EOS])
    assert (result.token_ids, result.nodes) == ([10, 11, EOS], [Node(0, None, "root", 0, 0, 3)])
    assert len(result.threads) == 1


def test_attended_tokens_are_the_positions_of_all_sampled_tokens() -> None:
    # prompt 3; the root thread samples 10 [Fork] 11 EOS at 4..7; the child's [Child] is at 6, then 20 EOS at 7 and 8
    assert decode([10, [20, EOS], 11, EOS]).attended_tokens == (4 + 5 + 6 + 7) + (7 + 8)


def test_a_child_computes_two_tokens_before_its_own() -> None:
    model = ScriptedModel(LIST)
    ReferenceDecoder(model, CONTROL, ForkLimits(), [EOS], 1000).decode(PROMPT, max_tokens=100)
    root, children = len(PROMPT) + 5, [2 + 2, 2 + 1]  # a thread's last token is never computed
    assert model.num_computed == root + sum(children)


# ---------------------------------------------------------------------------------------------------------------------
# Where an answer ends


@pytest.mark.parametrize("script", [LIST, NESTED])
def test_max_tokens_cuts_the_restored_answer_wherever_it_falls(script: Script) -> None:
    whole = decode(script)
    for max_tokens in range(1, len(whole.token_ids)):
        result = decode(script, max_tokens=max_tokens)
        assert result.token_ids == whole.token_ids[:max_tokens]
        assert (result.finish_reason, result.nodes[-1].end) == ("length", max_tokens)
    assert decode(script, max_tokens=len(whole.token_ids)) == whole


def test_nodes_behind_the_cut_are_not_there() -> None:
    assert decode(LIST, max_tokens=2).nodes == [Node(0, None, "root", 0, 0, 1), Node(1, 0, "detail", 1, 1, 2)]


def test_every_end_of_sequence_token_ends_a_thread() -> None:
    result = decode([10, [20, 9, 21], 11, 9], eos_token_ids=[EOS, 9])
    assert (result.token_ids, result.finish_reason, result.stop_token_id) == ([10, 20, 11, 9], "stop", None)


def test_end_of_sequence_can_be_ignored() -> None:
    result = decode([10, [20, EOS, 21, 22], 11], eos_token_ids=[], max_tokens=5)
    assert (result.token_ids, result.finish_reason) == ([10, 20, EOS, 21, 22], "length")


def test_a_stop_token_ends_the_answer_in_any_thread() -> None:
    for max_tokens in (3, 100):
        result = decode(LIST, stop_token_ids=[21, 12], max_tokens=max_tokens)
        assert result.token_ids == [10, 20, 21]
        assert (result.finish_reason, result.stop_token_id) == ("stop", 21)


def test_end_of_sequence_among_the_stop_tokens_still_ends_only_its_thread() -> None:
    assert decode(LIST, stop_token_ids=[EOS]) == decode(LIST)


def test_one_fork_too_many_cuts_the_answer_where_it_was_sampled() -> None:
    result = decode(LIST, max_forks=1)
    assert (result.token_ids, result.finish_reason, result.num_forks) == ([10, 20, 21, 11], "length", 1)
    assert result.threads[0].path == (*PROMPT, 10, FORK, 11, FORK)
    assert decode(LIST, max_forks=2) == decode(LIST)
    assert FORK not in decode(LIST, max_forks=0).threads[0].path


def test_forks_are_counted_in_restored_order() -> None:
    script = [10, [20, [30, EOS], 21, EOS], 11, [22, EOS], 12, EOS]
    assert decode(script, max_forks=2).token_ids == [10, 20, 30, 21, 11]


def test_a_thread_that_fills_the_context_cuts_the_answer() -> None:
    result = decode(
        LIST, max_model_len=len(PROMPT) + 5
    )  # 10 [Fork] 11 [Fork] 12, and in the child 10 [Fork] [Child] 20 21
    assert (result.token_ids, result.finish_reason) == ([10, 20, 21], "length")
    assert decode(LIST, max_model_len=len(PROMPT) + 7) == decode(LIST)


def test_a_child_without_room_cuts_the_answer_before_its_first_token() -> None:
    for room in (2, 3):  # for 10 [Fork], and for [Child]
        result = decode(LIST, max_model_len=len(PROMPT) + room)
        assert (result.token_ids, result.finish_reason) == ([10], "length")
        assert result.nodes == [Node(0, None, "root", 0, 0, 1), Node(1, 0, "detail", 1, 1, 1)]


@pytest.mark.parametrize(("prompt", "max_tokens"), [([], 1), ([4] * 8, 1), ([4], 0)])
def test_what_cannot_be_decoded_is_refused(prompt: list[int], max_tokens: int) -> None:
    decoder = ReferenceDecoder(ScriptedModel([EOS]), CONTROL, ForkLimits(), [EOS], max_model_len=8)
    with pytest.raises(ValueError, match="use "):
        decoder.decode(prompt, max_tokens=max_tokens)


# ---------------------------------------------------------------------------------------------------------------------
# What a thread may sample


def test_a_thread_at_the_greatest_depth_does_not_fork() -> None:
    assert decode(NESTED, max_depth=1).token_ids == [10, 20, DULL, 11, EOS]
    assert decode(NESTED, max_depth=0).token_ids == [10, DULL, EOS]


def test_a_request_may_forbid_forks() -> None:
    result = decode(NESTED, fork=False)
    assert (result.token_ids, len(result.threads)) == ([10, DULL, EOS], 1)


def test_without_control_tokens_every_token_is_plain() -> None:
    assert decode([10], control=None, max_tokens=3).token_ids == [CHILD, CHILD, CHILD]


def test_the_choice_never_sees_a_banned_token() -> None:
    banned: list[list[int]] = []

    def choose(logits_v: torch.Tensor) -> int:
        banned.append((logits_v == -torch.inf).nonzero().flatten().tolist())
        return greedy(logits_v)

    decoder = ReferenceDecoder(ScriptedModel([[20, EOS], EOS]), CONTROL, ForkLimits(max_depth=1), [EOS], 100, choose)
    assert decoder.decode(PROMPT, max_tokens=100).token_ids == [20, EOS]
    assert banned == [[CHILD], [FORK, CHILD], [FORK, CHILD], [CHILD]]


# ---------------------------------------------------------------------------------------------------------------------
# Random trees


def scripts(max_depth: int) -> st.SearchStrategy[Script]:
    plain = st.integers(10, 15)
    items = plain if max_depth == 0 else plain | scripts(max_depth - 1)
    return st.lists(items, max_size=5).map(lambda thread: [*thread, EOS])


def in_restored_order(script: Script, num_before: int, is_root: bool = True) -> Iterator[tuple[int, int, bool]]:
    """Every sampled token, its position from 1, and whether the root thread sampled it."""
    for position, item in enumerate(script, start=num_before + 1):
        yield FORK if isinstance(item, list) else item, position, is_root
        if isinstance(item, list):
            yield from in_restored_order(item, position + 1, False)


def restore(nodes: list[Node], token_ids: list[int], at: int = 0) -> list[int]:
    """Node, first child, next sibling, by the nodes' pointers."""
    restored = token_ids[nodes[at].start : nodes[at].end]
    for kind in ("detail", "sibling"):
        for node in nodes:
            if node.parent == at and node.kind == kind:
                restored += restore(nodes, token_ids, node.node)
    return restored


@given(scripts(2))
def test_a_random_tree_is_restored_and_counted(script: Script) -> None:
    result = decode(script)
    sampled = list(in_restored_order(script, len(PROMPT)))
    num_forks = sum(token == FORK for token, _, _ in sampled)
    assert (result.num_forks, len(result.threads), len(result.nodes)) == (num_forks, num_forks + 1, 2 * num_forks + 1)
    assert result.attended_tokens == sum(position for _, position, _ in sampled)
    assert restore(result.nodes, result.token_ids) == result.token_ids
    assert [node.start for node in result.nodes[1:]] == [node.end for node in result.nodes[:-1]]
    assert {(node.thread, node.kind) for node in result.nodes if node.kind != "sibling"} == {
        (i, "detail" if i else "root") for i in range(num_forks + 1)
    }


@given(
    scripts(2),
    st.integers(1, 40) | st.just(1000),
    st.integers(1, 6) | st.just(1000),
    st.integers(len(PROMPT) + 1, 16) | st.just(1000),
    st.frozensets(st.integers(10, 15), max_size=2),
)
def test_a_random_tree_is_cut_at_the_first_limit_in_restored_order(
    script: Script, max_tokens: int, max_forks: int, max_model_len: int, stop_token_ids: frozenset[int]
) -> None:
    result = decode(
        script,
        max_tokens=max_tokens,
        max_forks=max_forks,
        max_model_len=max_model_len,
        stop_token_ids=stop_token_ids,
    )
    tokens: list[int] = []
    reason, num_forks = "length", 0
    for token, position, is_root in in_restored_order(script, len(PROMPT)):
        if position > max_model_len or len(tokens) == max_tokens:
            break
        if token == FORK:
            if num_forks == max_forks:
                break
            num_forks += 1
        elif token != EOS or is_root:
            tokens.append(token)
            if token in stop_token_ids or token == EOS:
                reason = "stop"
                break
    assert (result.token_ids, result.finish_reason) == (tokens, reason)
    assert (result.nodes[-1].end, restore(result.nodes, tokens)) == (len(tokens), tokens)


# ---------------------------------------------------------------------------------------------------------------------
# A real model


class Uncached:
    """Recomputes the whole path for every token; its "cache" is the path."""

    def __init__(self, model: Any) -> None:
        self._model, self.device = model, model.device

    def __call__(self, *, input_ids: torch.Tensor, past_key_values: torch.Tensor | None, use_cache: bool) -> Any:
        path = input_ids if past_key_values is None else torch.cat([past_key_values, input_ids], dim=1)
        return SimpleNamespace(logits=self._model(input_ids=path, use_cache=False).logits, past_key_values=path)


@pytest.fixture(autouse=True)
def one_core() -> Iterator[None]:
    """Tiny matrices are slower on many cores, and very slow on busy ones."""
    num_cores = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_cores)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def test_the_cache_changes_no_token_of_a_real_model(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    options = ControlTokens(TINY_FORK, TINY_CHILD), ForkLimits(), [TINY_EOS], MAX_MODEL_LEN
    cached, uncached = ReferenceDecoder(model, *options), ReferenceDecoder(Uncached(model), *options)
    results = [cached.decode(prompt, max_tokens=60) for prompt in random_prompts(12, seed=1)]
    assert results == [uncached.decode(prompt, max_tokens=60) for prompt in random_prompts(12, seed=1)]
    assert any(len(thread.address) == 2 for result in results for thread in result.threads), "no thread is nested"


def test_tiny_models_are_the_same_every_time_and_lively(tiny_model: Path, tmp_path: Path) -> None:
    again, other = make_tiny_model(tmp_path / "again"), make_tiny_model(tmp_path / "other", seed=4)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (tiny_model, again, other)]
    assert weights[0] == weights[1] != weights[2]
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    decoder = ReferenceDecoder(model, ControlTokens(TINY_FORK, TINY_CHILD), ForkLimits(), [TINY_EOS], MAX_MODEL_LEN)
    results = [decoder.decode(prompt, max_tokens=300) for prompt in random_prompts(40, seed=2)]
    threads = [len(result.threads) for result in results]
    assert 3 <= sum(threads) / len(threads) <= 7
    assert 0.1 < sum(number == 1 for number in threads) / len(threads) < 0.6
    assert sum(result.finish_reason == "stop" for result in results) > 25
