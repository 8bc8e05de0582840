"""Progressive Tree Drafting: the model drafts for itself, in the forward that also verifies.

A step's draft is a candidate tree, taken from the pool by the path's last token, and the drafting tree. Afterwards both
go back into the pool with the model's predictions in them, and the drafting tree grows. Its tokens are guesses of the
future without fixed places: however far the path came, the tree moves behind it.

Source: PTD paper, section 3; what it leaves open follows its authors' public description.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from apar.decoding.draft_pool import DraftPool, Trie
from apar.decoding.drafting import NO_PARENT, Draft, Outcome
from apar.decoding.pooled import PooledDrafter, PooledDrafting, check_whole
from apar.decoding.ptd_tree import DraftingTree

NUM_SEEDS = 2
"""Root children that a drafting tree starts with; the others are predictions."""
LONGEST_SEED = 2


@dataclass(frozen=True, slots=True)
class PtdOptions:
    width: int = 4
    """w: children of a node, and root children."""
    depth: int = 6
    """d: a subtree this high steps."""
    max_nodes: int = 128
    """Nodes that a thread has in one forward at most, drafting and candidate tree together."""
    pool_nodes: int = 60
    """Nodes kept behind one key token: the largest candidate tree."""

    def __post_init__(self) -> None:
        check_whole("ptd", self, width=1, depth=1, max_nodes=8, pool_nodes=1)

    @property
    def max_candidates(self) -> int:
        """Candidates have up to half of the nodes for certain, and all that the drafting tree leaves."""
        return min(self.pool_nodes, self.max_nodes // 2)


class PtdDrafter(PooledDrafter[PtdOptions, DraftPool]):
    @staticmethod
    def make_pool(options: PtdOptions) -> DraftPool:
        return DraftPool(options.pool_nodes)

    def _begin(self, path: Sequence[int]) -> None:
        options = self._options
        self._tree = DraftingTree(
            options.width, options.depth, options.max_nodes - options.max_candidates, self._eos_token_ids
        )
        self._tree.seed(self._seeds(path))

    def propose(self) -> Draft:
        nodes, parents = self._tree.nodes()
        candidates, candidate_parents = self._pool.candidates(self._last_token, self._options.max_nodes - len(nodes))
        offset = len(candidates)
        return Draft(
            token_ids=candidates + [node.token_id for node in nodes],
            parents=candidate_parents + [NO_PARENT if parent == NO_PARENT else parent + offset for parent in parents],
            num_candidates=offset,
        )

    def observe(self, outcome: Outcome) -> None:
        predictions = outcome.predictions[outcome.draft.num_candidates :]
        for key, trie in self._verified(outcome):
            self._pool.merge(key, trie)
        tries = self._tree.tries(predictions)
        self._tree.grow(predictions, outcome.next_token)
        if self._tree.has_stepped:  # before, it holds little more than random tokens
            for key, trie in tries:
                self._pool.merge(key, trie)
        self._last_token = outcome.path[-1]

    def _verified(self, outcome: Outcome) -> list[tuple[int, Trie]]:
        """Per candidate, and first for the path's last token, its token and what is behind it with the predictions."""
        draft = outcome.draft
        behind_path: Trie = {outcome.next_token: {}}
        tries: list[Trie] = [{} for _ in range(draft.num_candidates)]
        for index, parent in enumerate(draft.parents[: draft.num_candidates]):
            (behind_path if parent == NO_PARENT else tries[parent])[draft.token_ids[index]] = tries[index]
        for index, trie in enumerate(tries):
            if draft.token_ids[index] not in self._eos_token_ids:
                trie.setdefault(outcome.predictions[index], {})
        return [(self._last_token, behind_path), *zip(draft.token_ids, tries, strict=False)]

    def _seeds(self, path: Sequence[int]) -> list[list[int]]:
        tokens = [token_id for token_id in path if token_id not in self._eos_token_ids]
        firsts = list(dict.fromkeys(tokens))
        firsts = self._random.sample(firsts, min(NUM_SEEDS, self._options.width, len(firsts)))
        longest = min(LONGEST_SEED, self._options.depth)  # a longer one would have to step at once
        return [[first, *self._random.choices(tokens, k=self._random.randrange(longest))] for first in firsts]


class PtdDrafting(PooledDrafting[PtdOptions, DraftPool]):
    drafter = PtdDrafter
