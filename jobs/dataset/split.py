"""Which side of the split a conversation is on: a matter of what was asked first, and of nothing else."""

import hashlib
from collections.abc import Sequence

from jobs.dataset.duplicates import normal_form


def is_test(messages: Sequence[dict[str, str]], share: float) -> bool:
    """Whether a conversation belongs to the test side, of which `share` of all first questions do.

    All samples of a row are on one side, and so is every other row that asks the same; the next run, or one with more
    rows, puts them there again.
    """
    asked = next((message["content"] for message in messages if message["role"] == "user"), None)
    if asked is None:
        asked = "\n".join(message["content"] for message in messages)
    digest = hashlib.blake2b(normal_form(asked).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) < share * (1 << 64)
