"""Finds texts that were there before: the same text, or one nearly like it. The first of each is kept.

Both look at a text's normal form (`normal_form`), in which letter case, width and white space do not count. Both must
remember every text they have kept, as a hash or a sketch, never the text itself: per million texts 0.2 GiB for
`ExactDuplicates` and 6 GiB for `NearDuplicates`, as benchmarks/duplicates.py measures.
"""

import hashlib
import re
import unicodedata
from typing import Any

NUM_PERMUTATIONS = 128
"""Of a sketch. The estimate of two texts' likeness is off by 0.035 (standard deviation, at 0.8)."""
LEAST_RECALL = 0.95
LEAST_THRESHOLD = 0.05
"""Below 0.024 not even bands of one value would keep `LEAST_RECALL`."""
SHINGLE_WORDS, SHINGLE_CHARS = 3, 5
SKETCH_SEED = 1


def normal_form(text: str) -> str:
    """Compatible forms of characters, letter case and white space made one."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


class ExactDuplicates:
    """Remembers 16 bytes of every text: two different ones among 10^9 look alike once in 10^20 runs."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def is_new(self, text: str) -> bool:
        """Whether no text before had the same normal form; it is remembered."""
        digest = hashlib.blake2b(normal_form(text).encode("utf-8", "surrogatepass"), digest_size=16).digest()
        known = digest in self._seen
        self._seen.add(digest)
        return not known


class NearDuplicates:
    """Finds texts whose sets of shingles are alike, by MinHash sketches in a locality-sensitive index.

    The index proposes those that share a band of their sketches; a proposal counts when the sketches agree in at least
    `threshold` of their places, which estimates the Jaccard similarity of the two sets. Of pairs right at the threshold
    the index misses one in twenty, of those above it fewer. Whether a text is kept depends
    on what was kept before it, so the order of the rows matters, and on nothing else: the sketch's hash functions are
    the same in every run.

    Source: Broder 1997, On the resemblance and containment of documents; the index is that of the library datasketch.
    """

    def __init__(self, threshold: float, shingles_of: str = "words") -> None:
        from datasketch import MinHashLSH

        self._threshold = threshold
        self._shingles_of = shingles_of
        # Bands are kept as 8 bytes each: two different ones that look alike only make a proposal more.
        self._index: Any = MinHashLSH(
            num_perm=NUM_PERMUTATIONS,
            params=bands(threshold),
            hashfunc=lambda band: hashlib.blake2b(band, digest_size=8).digest(),
        )
        self._sketches: list[Any] = []
        """Hash values of those kept, in 4 bytes each."""

    def is_new(self, text: str) -> bool:
        """Whether no text that was kept is like this one; it is remembered if so."""
        import numpy as np

        sketch = self._sketch(text)
        values = sketch.hashvalues.astype(np.uint32)
        least = self._threshold * NUM_PERMUTATIONS
        for number in self._index.query(sketch):
            if np.count_nonzero(self._sketches[number] == values) >= least:
                return False
        self._index.insert(len(self._sketches), sketch, check_duplication=False)
        self._sketches.append(values)
        return True

    def _sketch(self, text: str) -> Any:
        from datasketch import MinHash

        sketch = MinHash(num_perm=NUM_PERMUTATIONS, seed=SKETCH_SEED)
        found = shingles(text, self._shingles_of)
        sketch.update_batch([shingle.encode("utf-8", "surrogatepass") for shingle in found])
        return sketch


def bands(threshold: float) -> tuple[int, int]:
    """How many bands of how many hash values the index has: as long as may be, for few proposals, while two texts right
    at the threshold share one with a probability of `LEAST_RECALL`.

    The library's own choice weighs misses and needless proposals alike, and finds 4 of 10 pairs at a threshold of 0.8;
    proposals are looked at here anyway.
    """
    for length in range(NUM_PERMUTATIONS // 2, 1, -1):
        number = NUM_PERMUTATIONS // length
        if 1 - (1 - threshold**length) ** number >= LEAST_RECALL:
            return number, length
    return NUM_PERMUTATIONS, 1


def shingles(text: str, of: str) -> set[str]:
    """The runs of 3 words or of 5 characters in a text's normal form; a shorter text is one shingle.

    Words are runs of letters and digits. Texts in scripts without spaces need `chars`.
    """
    form = normal_form(text)
    if of == "chars":
        return {form[start : start + SHINGLE_CHARS] for start in range(max(1, len(form) - SHINGLE_CHARS + 1))}
    words = re.findall(r"\w+", form)
    if not words:
        return {form}
    starts = range(max(1, len(words) - SHINGLE_WORDS + 1))
    return {" ".join(words[start : start + SHINGLE_WORDS]) for start in starts}
