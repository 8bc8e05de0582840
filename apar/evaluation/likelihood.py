"""Log-likelihood of answers under a causal model, teacher-forced in batches of like length.

Shapes: B rows of a batch, L tokens of its longest row, V tokens of the vocabulary.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from apar.errors import InputError
from apar.evaluation.answers import Likelihood

BATCH_TOKENS = {"cpu": 2048, "cuda": 16_384}
"""Padded tokens of one forward pass: the logits of these are in memory, 4 bytes times V each."""

Dtype = Literal["float32", "bfloat16"]


class Forced(NamedTuple):
    """What the model is given, and the part of it that is scored."""

    prompt_ids: list[int]
    answer_ids: list[int]


class Scorer:
    """A model that scores; free it before the next one is loaded."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._device = str(model.device).partition(":")[0]

    @classmethod
    def load(cls, folder: Path, dtype: Dtype | None = None) -> "Scorer":
        """Load a model folder: onto a GPU in bfloat16 if there is one, else in float32 on the CPU.

        Raises:
            InputError: transformers cannot load the folder.
        """
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = dtype or scoring_dtype()
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, dtype), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # transformers raises what it likes here
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"the base in {folder} cannot be loaded to score answers: {reason}") from error
        return cls(model.to(device).eval())

    @property
    def max_tokens(self) -> int | None:
        """Longest sequence that the model was made for, where its configuration says so."""
        found: int | None = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        return found

    def score(
        self,
        sequences: Sequence[Forced],
        *,
        batch_tokens: int | None = None,
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[Likelihood]:
        """Sum over each answer's tokens of the log-probability behind everything before them.

        The log-softmax is float32 whatever the model's own type. An answer that reaches over the model's longest
        sequence is scored up to there. `progress` gets the number of answers done.
        """
        limit = self.max_tokens
        if limit is not None:
            sequences = [Forced(prompt, answer[: max(0, limit - len(prompt))]) for prompt, answer in sequences]
        found = [Likelihood(0.0, 0)] * len(sequences)
        done = sum(not answer for _, answer in sequences)
        for batch in batches(
            [len(prompt) + len(answer) if answer else 0 for prompt, answer in sequences],
            batch_tokens or BATCH_TOKENS.get(self._device, BATCH_TOKENS["cpu"]),
        ):
            for index, value in zip(batch, self._score_batch([sequences[i] for i in batch]), strict=True):
                found[index] = value
            done += len(batch)
            progress(done)
        return found

    def _score_batch(self, batch: Sequence[Forced]) -> list[Likelihood]:
        import torch

        # The last token is only ever predicted. Padding stands behind: a causal model does not look at it.
        rows = [(prompt + answer)[:-1] for prompt, answer in batch]
        longest = max(map(len, rows))
        ids_bl = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=self._model.device)
        mask_bl = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=self._model.device)
        likelihoods = []
        with torch.inference_mode():
            logits_blv = self._model(input_ids=ids_bl, attention_mask=mask_bl, use_cache=False).logits
            for logits_lv, (prompt, answer) in zip(logits_blv, batch, strict=True):
                own_lv = logits_lv[len(prompt) - 1 : len(prompt) - 1 + len(answer)].float()
                target_l = torch.tensor(answer, device=own_lv.device)
                chosen_l = own_lv.gather(1, target_l[:, None])[:, 0] - own_lv.logsumexp(-1)
                likelihoods.append(Likelihood(float(chosen_l.double().sum()), len(answer)))
        return likelihoods


def scoring_dtype() -> Dtype:
    """What `Scorer.load` computes in: bfloat16 on a GPU, float32 on a CPU."""
    import torch

    return "bfloat16" if torch.cuda.is_available() else "float32"


def batches(lengths: Sequence[int], most_tokens: int) -> list[list[int]]:
    """Indices of sequences that go through the model together: the longest first, so that memory runs out at once or
    never, and of like length, so that little is padding. Sequences of length 0 are left out.

    A sequence longer than `most_tokens` is a batch of its own.
    """
    found: list[list[int]] = []
    room = 0
    for index in sorted((i for i, length in enumerate(lengths) if length), key=lambda i: (-lengths[i], i)):
        if not found or len(found[-1]) >= room:
            found.append([])
            room = max(1, most_tokens // lengths[index])
        found[-1].append(index)
    return found
