"""Scores both models' answers under the base."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from apar.evaluation import Answer, EvaluatedRow
from apar.evaluation.likelihood import Forced, Scorer
from jobs.console import Advance
from jobs.errors import BadInput
from worker.evaluation.contestants import Contestant
from worker.forking import load_encoder
from worker.prompts import PromptEncoder, PromptError, load_tokenizer

_ANCHOR = "\n"
"""Stands before an answer while it is tokenised: tokenizers that put a space before a text put it before this."""


def score(rows: Sequence[EvaluatedRow], base: Contestant, *, advance: Advance) -> list[EvaluatedRow]:
    """Give every answer, the model's and the base's own, its log-likelihood under the base.

    The text is tokenised by the base's tokenizer, behind the base's own prompt. The end of sequence is one more token
    where the answer ended by itself; where it was cut, half a character at its end is left out.

    Raises:
        BadInput: a prompt cannot be asked of the base.
        apar.errors.InputError: the base's weights cannot be loaded.
    """
    encoder = AnswerEncoder(load_encoder(base.alias, base.path)[0], load_tokenizer(base.path))
    sequences = []
    for row in rows:
        try:
            prompt_ids = encoder.prompts.encode_prompt(row.prompt)
        except PromptError as error:
            raise BadInput(f"row {row.row} cannot be scored: {error}") from None
        sequences += [Forced(prompt_ids, encoder.encode(side.answer)) for side in (row.model, row.base)]
    scorer = Scorer.load(base.path)
    found = scorer.score(sequences, progress=lambda done: advance("scoring", done, len(sequences)))
    return [
        replace(
            row,
            model=replace(row.model, likelihood=of_model),
            base=replace(row.base, likelihood=of_base),
        )
        for row, of_model, of_base in zip(rows, found[::2], found[1::2], strict=True)
    ]


class AnswerEncoder:
    """Tokenises answers as they stand behind a prompt; text of control tokens stays text."""

    def __init__(self, prompts: PromptEncoder, tokenizer: Any) -> None:
        self.prompts = prompts
        self._bos, self._eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self._anchor_ids = prompts.encode_text(_ANCHOR)

    def encode(self, answer: Answer) -> list[int]:
        """An answer's tokens, and its end if it has one."""
        text = answer.text.rstrip("\ufffd") if answer.was_cut else answer.text
        end = [] if answer.was_cut or self._eos is None else [self._eos]
        ids, anchor_ids = self.prompts.encode_text(_ANCHOR + text), self._anchor_ids
        if ids[: len(anchor_ids)] == anchor_ids:
            return ids[len(anchor_ids) :] + end
        ids = self.prompts.encode_text(text)  # the tokenizer joins the anchor with what follows
        return ids[ids[:1] == [self._bos] :] + end
