"""The loop that every decoder here is: draft, one forward, verify, take.

In: a model, a way of drafting, control tokens or none. Out: a `DecodingRun` per prompt, stepped forward by forward.
Plain decoding drafts nothing; Vanilla-APAR runs all threads of an answer in the same forward (APAR paper, section
3.4.7); the others draft a tree behind every thread's path.
"""

import random
from collections.abc import Collection, Sequence
from typing import Any

import torch

from apar.decoding.drafting import DrafterFactory, Outcome
from apar.decoding.errors import DecodingError
from apar.decoding.model import Computed, TreeModel, Work
from apar.decoding.result import DecodingResult, DraftFigures, ThreadPath, ThreadStep
from apar.decoding.sampling import SamplingOptions
from apar.decoding.threads import Answer, Rules, Thread
from apar.decoding.verification import SamplingVerifier, Verifier, verify_greedily
from apar.options import MAX_SEED, ControlTokens, ForkLimits, child_seed
from apar.tree import Node, ParagraphTree

GREEDY = SamplingOptions()


class Decoder:
    """One way of decoding with one model; keeps nothing between answers."""

    def __init__(
        self,
        model: TreeModel,
        drafting: DrafterFactory,
        control: ControlTokens | None,
        limits: ForkLimits,
        eos_token_ids: Collection[int],
        max_model_len: int,
        *,
        forks: bool,
    ) -> None:
        """
        Args:
            control: the model's control tokens; None for a model that cannot fork.
            eos_token_ids: each ends a thread.
            max_model_len: longest path of a thread, in tokens, the prompt included.
            forks: False bans [Fork].

        Raises:
            DecodingError: it is to fork and has no control tokens, or the model is shorter than `max_model_len`.
        """
        if forks and control is None:
            raise DecodingError("the model has no control tokens, so it cannot fork: use a decoder without apar")
        if not 1 < max_model_len <= model.max_model_len:
            raise DecodingError(f"max_model_len is {max_model_len}: use 2 to {model.max_model_len}")
        self.model = model
        self.drafting = drafting
        self.control = control
        self.limits = limits
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_model_len = max_model_len
        self.forks = forks

    def start(
        self,
        prompt_token_ids: Sequence[int],
        *,
        max_tokens: int,
        sampling: SamplingOptions = GREEDY,
        stop_token_ids: Collection[int] = (),
        ignore_eos: bool = False,
    ) -> "DecodingRun":
        """Begin an answer of at most `max_tokens` restored tokens.

        Args:
            stop_token_ids: end the whole answer, in whichever thread they come. EOS among them is still only EOS.
            ignore_eos: EOS is a token like any other.

        Raises:
            DecodingError: no prompt, a prompt that leaves no room for a token or has a token out of the vocabulary, or
                `max_tokens` below 1.
        """
        if not 0 < len(prompt_token_ids) < self.max_model_len:
            raise DecodingError(f"the prompt has {len(prompt_token_ids)} tokens: use 1 to {self.max_model_len - 1}")
        strange = [token for token in prompt_token_ids if not 0 <= token < self.model.vocab_size]
        if strange:
            raise DecodingError(
                f"the prompt has token {strange[0]}: the vocabulary is 0 to {self.model.vocab_size - 1}"
            )
        if max_tokens < 1:
            raise DecodingError(f"max_tokens is {max_tokens}: use at least 1")
        rules = Rules(
            self.control if self.forks else None,
            self.limits,
            frozenset() if ignore_eos else self.eos_token_ids,
            frozenset(stop_token_ids),
            self.max_model_len,
        )
        return DecodingRun(self, list(prompt_token_ids), rules, max_tokens, sampling)

    def decode(self, prompt_token_ids: Sequence[int], **options: Any) -> DecodingResult:
        """`start`, with its options and errors, and all steps."""
        run = self.start(prompt_token_ids, **options)
        while run.step():
            pass
        return run.result()


class DecodingRun:
    """One answer on its way."""

    def __init__(
        self, decoder: Decoder, prompt: list[int], rules: Rules, max_tokens: int, sampling: SamplingOptions
    ) -> None:
        self._model = decoder.model
        self._control = decoder.control
        self._rules = rules
        self._sampling = sampling
        self._cache = decoder.model.new_cache()
        self._trace: list[list[ThreadStep]] = []
        tree = ParagraphTree(max_tokens, rules.limits.max_forks)
        seed = random.SystemRandom().randrange(MAX_SEED) if sampling.seed is None else sampling.seed
        # Drafts change no greedy answer, so that a fixed seed makes its speed repeatable, too.
        drafter = decoder.drafting.start(prompt, 0 if sampling.seed is None else sampling.seed)
        banned = rules.banned(0, self._control)
        root = Thread(0, (), prompt, tree.root, drafter, self._verifier(seed), seed, banned)
        self._answer = Answer(rules, root, tree, self._cache.pool, self._child)

    @property
    def token_ids(self) -> list[int]:
        """The restored answer as far as it is known, in order; grows at its end only."""
        return self._answer.token_ids

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def step(self) -> bool:
        """One forward for all threads that run. Returns False, and does nothing, when the answer has ended."""
        answer = self._answer
        if answer.tree.end is not None:
            return False
        running = answer.running()
        works = []
        for thread in running:
            works.append(Work(thread.slots, thread.path[len(thread.slots) :], thread.drafter.propose()))
        computed = self._model.forward(self._cache, works)
        answer.count_cache(running)
        steps = [self._advance(*parts) for parts in zip(running, works, computed, strict=True)]
        self._trace.append(steps)
        answer.settle()
        return answer.tree.end is None

    def result(self) -> DecodingResult:
        """What there is; before the answer has ended, what is known of it in order, which ends with `stop`."""
        answer, end = self._answer, self._answer.tree.end
        steps = [step for forward in self._trace for step in forward]
        hits = [step for step in steps if step.num_candidates]
        stop_token_id = None if end is None else end.stop_token_id
        return DecodingResult(
            token_ids=list(answer.token_ids),
            finish_reason="length" if end is not None and end.reason == "length" else "stop",
            stop_token_id=stop_token_id if isinstance(stop_token_id, int) else None,
            nodes=answer.tree.spans(),
            threads=[ThreadPath(thread.address, tuple(thread.path)) for thread in answer.threads],
            num_forks=answer.tree.num_forks,
            stats=answer.receipt.stats(len(answer.token_ids), answer.tree.num_forks, len(self._trace)),
            drafting=DraftFigures(
                forwards=len(self._trace),
                thread_steps=len(steps),
                hits=len(hits),
                accepted=sum(step.num_taken - 1 for step in hits),
                draft_nodes=sum(step.num_draft_nodes for step in steps),
                verify_nodes=sum(step.num_candidates for step in steps),
            ),
            trace=self._trace,
        )

    def _advance(self, thread: Thread, work: Work, computed: Computed) -> ThreadStep:
        """Verify a thread's draft and take the tokens that come of it."""
        draft, logits_nv, num_pending = work.draft, computed.logits_nv, len(work.pending)
        if thread.banned:
            logits_nv[:, thread.banned] = -torch.inf
        best: list[int] = logits_nv.argmax(dim=-1).tolist()
        verdict = thread.verify(draft, logits_nv, best)
        kept = computed.slots[:num_pending] + [computed.slots[num_pending + node] for node in verdict.accepted]
        thread.slots = [*thread.slots, *kept]  # a new list: a child may hold the old one
        self._cache.pool.release(set(computed.slots) - set(kept))
        taken: list[int] = []
        for token in (*(draft.token_ids[node] for node in verdict.accepted), verdict.token):
            if thread.ended:
                break
            self._answer.take(thread, token, len(self._trace))
            taken.append(token)
        if not thread.ended:
            hidden = computed.hidden_nh[1 + verdict.accepted[-1] if verdict.accepted else 0]
            thread.drafter.observe(
                Outcome(
                    draft=draft,
                    path=thread.path,
                    taken=taken,
                    accepted=verdict.accepted,
                    next_token=best[0],
                    predictions=best[1:],
                    hidden_h=hidden if thread.drafter.needs_hidden else None,
                )
            )
        num_drafts = len(draft) - draft.num_candidates
        return ThreadStep(thread.number, num_drafts, draft.num_candidates, len(taken))

    def _child(self, parent: Thread, number: int, detail: Node, path: list[int]) -> Thread:
        seed = child_seed(parent.seed, parent.num_children)
        address = (*parent.address, parent.num_children)
        banned = self._rules.banned(len(address), self._control)
        drafter = parent.drafter.fork(path)
        return Thread(number, address, path, detail, drafter, self._verifier(seed), seed, banned)

    def _verifier(self, seed: int) -> Verifier:
        if self._sampling.greedy:
            return verify_greedily
        return SamplingVerifier(self._sampling, torch.Generator().manual_seed(seed))
