"""One answer on its way: its decoder's run, and its text as vLLM would have it, where stop strings are looked for."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from apar.decoding import DecodingResult, DecodingRun
from worker.backend import Finished, Receipt, Sample
from worker.forking import read_receipt
from worker.texts import TextStream


class Answer:
    def __init__(
        self, sample: Sample, run: DecodingRun, stream: TextStream, ends: Collection[int], stops: Sequence[str]
    ) -> None:
        """
        Args:
            ends: tokens that end an answer and are no text.
            stops: strings that end the text in front of them.
        """
        self._sample = sample
        self._run = run
        self._stream = stream
        self._ends = ends
        self._stops = stops
        self._text = ""
        self._num_read = 0

    @property
    def key(self) -> str:
        return self._sample.key

    def step(self) -> Finished | None:
        """One forward; the finished sample, if that was its last.

        A forward may bring several tokens. They are read one by one, so that a stop string cuts where it would cut if
        they had come one by one.
        """
        goes_on = self._run.step()
        for token_id in self._run.token_ids[self._num_read :]:
            self._num_read += 1
            stopped_at = self._read(token_id)
            if stopped_at is not None:
                self._text = self._text[:stopped_at]
                return self._finished("stop")
        return None if goes_on else self._finished(None)

    def _read(self, token_id: int) -> int | None:
        """Take a token into the text; where the text ends, if that completed a stop string."""
        if token_id in self._ends:
            return None
        new = self._stream.step(token_id)
        self._text += new
        if not new:
            return None
        found = []
        for stop in self._stops:
            start = self._text.find(stop, max(0, len(self._text) - len(new) - len(stop) + 1))
            if start != -1:
                found.append((start + len(stop), start))
        # The one that is complete first; of several with the same end, vLLM takes the first that was named.
        return min(found, key=lambda place: place[0])[1] if found else None

    def _finished(self, reason: str | None) -> Finished:
        result = self._run.result()
        token_ids = tuple(result.token_ids[: self._num_read])
        return Finished(
            key=self.key,
            text=self._text,
            finish_reason=reason or result.finish_reason,
            token_ids=token_ids,
            receipt=_receipt(result, len(self._sample.token_ids), len(token_ids)),
        )


def _receipt(result: DecodingResult, num_prompt_tokens: int, num_tokens: int) -> Receipt:
    told = {"stats": result.stats, "nodes": result.nodes}
    receipt = read_receipt(told, num_prompt_tokens, num_tokens)
    assert receipt is not None
    drafting = result.drafting
    stats = replace(
        receipt.stats,
        forwards=drafting.forwards,
        hit_rate=drafting.hit_rate,
        acceptance_length=drafting.acceptance_length,
        decoding_efficiency=num_tokens / drafting.forwards,  # of the answer as a stop string has cut it
        draft_nodes=drafting.draft_nodes,
        verify_nodes=drafting.verify_nodes,
    )
    return replace(receipt, stats=stats)
