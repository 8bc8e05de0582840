"""The receipt and the drafting figures of an answer, recounted from its trace."""

import pytest
from decoding_support import Guessing, decoder
from tiny_models import CHILD, EOS, FORK, random_prompts

from apar.decoding import DecodingResult, TreeModel

PROMPTS = random_prompts(8, seed=9)


def recounted(prompt: list[int], result: DecodingResult) -> tuple[int, int, int]:
    """Peak cached positions, attended tokens and widest forward, from who took how many tokens in which forward."""
    parent_of = {thread.address: thread.address[:-1] for thread in result.threads if thread.address}
    number_of = {thread.address: number for number, thread in enumerate(result.threads)}
    starts = {}
    for address in parent_of:
        written = result.threads[number_of[address]].path
        starts[address] = len(written) - 1 - written[::-1].index(CHILD) + 1
    lengths = [len(prompt)] + [0] * (len(result.threads) - 1)
    born = [True] + [False] * (len(result.threads) - 1)
    peak = attended = widest = 0
    for forward in result.trace:
        running = [step.thread for step in forward]
        for number in running:
            if not born[number]:
                born[number], lengths[number] = True, starts[result.threads[number].address]
        # Everything a running thread has is cached in this forward; a position is its path up to there.
        cached = {result.threads[number].path[:end] for number in running for end in range(1, lengths[number] + 1)}
        peak, widest = max(peak, len(cached)), max(widest, len(running))
        for step in forward:
            attended += sum(range(lengths[step.thread] + 1, lengths[step.thread] + step.num_taken + 1))
            lengths[step.thread] += step.num_taken
    assert [lengths[i] for i in range(len(lengths)) if born[i]] == [
        len(thread.path) for thread, there in zip(result.threads, born, strict=True) if there
    ]
    return peak, attended, widest


@pytest.mark.parametrize("drafts", [False, True])
def test_the_receipt_is_what_the_trace_says(tree_model: TreeModel, drafts: bool) -> None:
    forks = 0
    for prompt in PROMPTS:
        result = decoder(tree_model, Guessing() if drafts else None).decode(prompt, max_tokens=150)
        stats = result.stats
        assert recounted(prompt, result) == (
            stats["peak_cached_tokens"],
            stats["attended_tokens"],
            stats["max_width"],
        )
        assert stats["steps"] == len(result.trace) == result.drafting.forwards
        assert (stats["threads"], stats["forks"]) == (len(result.threads), result.num_forks)
        assert stats["peak_blocks"] >= stats["peak_cached_tokens"]
        assert stats["sequential_peak_tokens"] == len(prompt) + len(result.token_ids)
        forks += result.num_forks
    assert forks > 5


def test_an_answer_without_forks_costs_what_sequential_decoding_costs(tree_model: TreeModel) -> None:
    prompt = PROMPTS[0]
    result = decoder(tree_model, forks=False).decode(prompt, max_tokens=40)
    stats, num_tokens = result.stats, len(result.token_ids)
    assert stats["peak_cached_tokens"] == stats["peak_blocks"] == len(prompt) + num_tokens - 1
    assert stats["attended_tokens"] == stats["sequential_attended_tokens"]
    assert stats["steps"] == num_tokens
    assert result.decoding_efficiency == 1.0


def test_steps_of_nodes_are_forwards(tree_model: TreeModel) -> None:
    for prompt in PROMPTS:
        result = decoder(tree_model).decode(prompt, max_tokens=150)
        for node in result.nodes:
            assert 0 <= node.first_step <= node.last_step < len(result.trace)
            took = [i for i, forward in enumerate(result.trace) for step in forward if step.thread == node.thread]
            if node.end > node.start:
                assert {node.first_step, node.last_step} <= set(took)


def test_hit_rate_and_acceptance_length_multiply_to_tokens_per_forward(tree_model: TreeModel) -> None:
    """DE = HR x AL + (1 - HR), PTD paper, section 4.1; without forks, and but for EOS in the middle of a draft."""
    for prompt in PROMPTS:
        result = decoder(tree_model, Guessing(), forks=False).decode(prompt, max_tokens=60, ignore_eos=True)
        drafting = result.drafting
        steps = [step for forward in result.trace for step in forward]
        assert drafting.hits == sum(step.num_candidates > 0 for step in steps)
        assert drafting.accepted == sum(step.num_taken - 1 for step in steps)
        hr, al = drafting.hit_rate, drafting.acceptance_length
        taken = sum(step.num_taken for step in steps)
        assert taken / drafting.forwards == pytest.approx(hr * al + (1 - hr))
        # The last forward may take more than the answer has room for.
        assert taken - steps[-1].num_taken < len(result.token_ids) <= taken
        assert drafting.draft_nodes == sum(step.num_draft_nodes for step in steps)
        assert drafting.verify_nodes == sum(step.num_candidates for step in steps)


def test_a_child_starts_with_what_its_parent_has_cached(tree_model: TreeModel) -> None:
    """In the worked example of docs/statistics.md a fork costs the child two positions: [Fork] again, and [Child]."""
    for prompt in PROMPTS:
        run = decoder(tree_model).start(prompt, max_tokens=150)
        before = 0
        while run.step():
            threads = run._answer.threads
            for child in threads[before:]:
                if not child.ended and child.address:
                    assert child.path[len(child.slots) :] == [FORK, CHILD]
                    assert EOS not in child.path[len(prompt) :]
            before = len(threads)
