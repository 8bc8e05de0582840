"""One prompt's two answers and everything that is counted of each."""

from dataclasses import dataclass

from apar.evaluation.text_quality import TextQuality, text_quality


@dataclass(frozen=True, slots=True)
class AnswerNode:
    """A paragraph node, its span [start, end) in tokens and [text_start, text_end) in characters of the answer."""

    node: int
    parent: int | None
    kind: str
    thread: int
    start: int
    end: int
    first_step: int
    last_step: int
    text_start: int
    text_end: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A restored answer with its memory receipt; definitions in docs/statistics.md."""

    text: str
    finish_reason: str
    """`stop`: it ended by itself. `length`: it was cut."""
    prompt_tokens: int
    output_tokens: int
    threads: int
    steps: int
    peak_cached_tokens: int
    attended_tokens: int
    nodes: tuple[AnswerNode, ...] = ()
    """Depth first, node 0 the root."""

    @property
    def forks(self) -> bool:
        return self.threads >= 2

    @property
    def was_cut(self) -> bool:
        return self.finish_reason != "stop"

    @property
    def sequential_peak_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @property
    def sequential_attended_tokens(self) -> int:
        return self.output_tokens * self.prompt_tokens + self.output_tokens * (self.output_tokens + 1) // 2

    @property
    def empty_threads(self) -> int:
        """Detail nodes without tokens, or with nothing but white space.

        Where the answer was cut, a detail that begins at the cut does not count: nobody knows what it would have held.
        """
        return sum(
            node.kind == "detail"
            and not self.text[node.text_start : node.text_end].strip()
            and not (self.was_cut and node.end >= self.output_tokens)
            for node in self.nodes
        )


@dataclass(frozen=True, slots=True)
class Likelihood:
    """What another model thinks of an answer."""

    log_likelihood: float
    """Natural logarithm, summed over `num_tokens`."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Measured:
    """An answer with its figures."""

    answer: Answer
    quality: TextQuality
    likelihood: Likelihood | None = None

    @classmethod
    def of(cls, answer: Answer, likelihood: Likelihood | None = None) -> "Measured":
        return cls(answer, text_quality(answer.text), likelihood)


@dataclass(frozen=True, slots=True)
class EvaluatedRow:
    """A prompt that both models answered."""

    row: int
    """Its number in the file of prompts, from 0."""
    prompt: str
    category: str
    model: Measured
    base: Measured
