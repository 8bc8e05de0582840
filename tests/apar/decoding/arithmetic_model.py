"""A language model that is a sum, and the loop around a drafter, small enough to see through."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from apar.decoding.drafting import NO_PARENT, Draft, Drafter, DrafterFactory, Outcome

Model = Callable[[Sequence[int]], int]
"""The next token behind a text."""


def repeating(text: Sequence[int]) -> int:
    """Depends on the last two tokens, and so that the text soon comes round to where it was."""
    return (3 * text[-1] + text[-2] % 2 + 2) % 31 if len(text) > 1 else 1


def context(path: Sequence[int], draft: Draft, node: int) -> list[int]:
    """What a node of a draft sees, itself included."""
    behind: list[int] = []
    while node != NO_PARENT:
        behind.append(draft.token_ids[node])
        node = draft.parents[node]
    return [*path, *reversed(behind)]


@dataclass
class Run:
    token_ids: list[int] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)

    @property
    def decoding_efficiency(self) -> float:
        return len(self.token_ids) / len(self.drafts)


def plain(model: Model, prompt: Sequence[int], num_tokens: int) -> list[int]:
    text = list(prompt)
    for _ in range(num_tokens):
        text.append(model(text))
    return text[len(prompt) :]


def outcome_of(model: Model, path: Sequence[int], draft: Draft, limit: int | None = None) -> Outcome:
    """Verify greedily and take at most `limit` tokens."""
    predictions = [model(context(path, draft, node)) for node in range(len(draft))]
    accepted: list[int] = []
    token, alike = model(path), [NO_PARENT]
    taken = [token]
    while alike := [
        node for node in range(draft.num_candidates) if draft.parents[node] in alike and draft.token_ids[node] == token
    ]:
        accepted.append(alike[0])
        token = predictions[alike[0]]
        taken.append(token)
    taken = taken[:limit]
    return Outcome(draft, [*path, *taken], taken, accepted[: len(taken) - 1], model(path), predictions, None)


def decode(model: Model, drafting: DrafterFactory, prompt: Sequence[int], num_tokens: int, seed: int = 0) -> Run:
    return continue_with(model, drafting.start(prompt, seed), prompt, num_tokens)


def continue_with(model: Model, drafter: Drafter, prompt: Sequence[int], num_tokens: int) -> Run:
    path, run = list(prompt), Run()
    while len(run.token_ids) < num_tokens:
        draft = drafter.propose()
        run.drafts.append(draft)
        outcome = outcome_of(model, path, draft, num_tokens - len(run.token_ids))
        run.token_ids += outcome.taken
        path = list(outcome.path)
        drafter.observe(outcome)
    return run


def assert_well_formed(draft: Draft) -> None:
    """Parents come first, and candidates and drafting tree do not hang from each other."""
    assert len(draft.parents) == len(draft.token_ids)
    for node, parent in enumerate(draft.parents):
        assert NO_PARENT <= parent < node
        if parent != NO_PARENT:
            assert (node < draft.num_candidates) == (parent < draft.num_candidates)
