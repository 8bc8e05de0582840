"""How sure a judge was: the probability of each label at its verdict's place, from the tokens' log probabilities."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jobs.judging.verdicts import ReplyForm

MAX_LABEL_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Probabilities:
    of: dict[str, float]
    """By label; they add up to 1."""
    mass: float
    """What the labels had of the whole probability; the rest went to tokens that begin no label."""

    @property
    def expected(self) -> float:
        """The mean score."""
        return sum(int(label) * probability for label, probability in self.of.items())


def can_tell(form: ReplyForm) -> bool:
    """Whether the first token of a label says which one it is: not on a scale where 1 may become 10."""
    return not any(
        other != label and other.startswith(label[:1]) for label in form.labels for other in form.labels
    )  # fmt: skip


def probabilities(tokens: Sequence[dict[str, Any]] | None, label: str, form: ReplyForm) -> Probabilities | None:
    """
    Args:
        tokens: of the reply, each with its `token` and its likeliest `top` tokens with `logprob`, as exported.
        label: the verdict that was read from the reply; it stands at its end.

    Returns None where the verdict's place is not found, or its tokens do not tell labels apart.
    """
    place = _place(tokens, label) if tokens else None
    if tokens is None or place is None:
        return None
    found = dict.fromkeys(form.labels, 0.0)
    for one in tokens[place]["top"] or ():
        text = one["token"].strip()
        meant = [known for known in form.labels if text and known.startswith(text)]
        if len(meant) > 1:
            return None
        if meant:
            found[meant[0]] += math.exp(one["logprob"])
    mass = sum(found.values())
    if not mass > 0:
        return None
    return Probabilities({known: value / mass for known, value in found.items()}, min(mass, 1.0))


def _place(tokens: Sequence[dict[str, Any]], label: str) -> int | None:
    """Where the label at the reply's end begins. The end-of-sequence token may stand behind it."""
    texts = [token["token"] for token in tokens]
    for end in (len(texts) - 1, len(texts)):
        for start in range(end - 1, max(-1, end - 1 - MAX_LABEL_TOKENS), -1):
            if "".join(texts[start:end]).strip() == label:
                return start
    return None
