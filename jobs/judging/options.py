"""What a user may say about a judging, and what follows from it and the rubric."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jobs.errors import BadInput
from jobs.judging.probabilities import can_tell
from jobs.judging.rubrics import Kind, Rubric
from jobs.judging.verdicts import ReplyForm, pair_form, score_form


@dataclass(frozen=True)
class JudgeOptions:
    kind: Kind
    models: tuple[str, ...]
    """The judges: aliases."""
    rubric: str | None = None
    scale: tuple[int, int] | None = None
    columns: dict[str, str] = field(default_factory=dict)
    reasons: bool = False
    logprobs: bool = False
    constrained: bool = True
    ordered: bool = True
    turns: str = "second"
    """Of two turns: `second` or `each` is judged."""
    inconsistent: str = "tie"
    """What a pair counts whose two orders disagree: `tie`, or `null`, nothing."""
    limit: int | None = None
    seed: int = 0
    """Of the bootstrap."""
    priority: int = 0

    def form(self, rubric: Rubric) -> ReplyForm:
        """How the judge is to reply. Raises BadInput: what was said does not fit the rubric."""
        if self.kind == "pairwise" and self.scale is not None:
            raise BadInput("--scale stands beside --kind pairwise, whose verdicts are A, B and tie: leave it out")
        form = pair_form(self.reasons) if self.kind == "pairwise" else score_form(*rubric.scale, self.reasons)
        if self.logprobs and not can_tell(form):
            raise BadInput(
                f"--logprobs needs scores that differ in their first digit, the scale is {rubric.scale[0]}-"
                f"{rubric.scale[1]}: use one within 0-9"
            )
        return form

    def judged_turns(self, num_turns: int) -> tuple[int, ...]:
        return (1,) if num_turns == 1 else (1, 2) if self.turns == "each" else (2,)


def parse_columns(said: Sequence[str]) -> dict[str, str]:
    """Read `ROLE=NAME` values. Raises BadInput."""
    found: dict[str, str] = {}
    for text in said:
        role, equals, name = text.partition("=")
        if not (role and equals and name):
            raise BadInput(f"--column is {text!r}: write what a column is for and its name, like prompt=question")
        if role in found:
            raise BadInput(f"--column names {role} twice: {found[role]} and {name}")
        found[role] = name
    return found
