"""What is decoded: rows of a Parquet file, or one of the sets that lie here, as a model's chat template wants them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from apar.decoding.errors import DecodingError

SETS = ("maths", "code")
"""Prompts of our own, one per line, in files of these names beside this one."""


@dataclass(frozen=True, slots=True)
class Prompt:
    number: int
    category: str
    token_ids: list[int]


def load(source: str, tokenizer: Any) -> list[Prompt]:
    """Prompts of a set, or of a Parquet file's column `prompt` (a text) or `messages`; `category` may be there, too.

    Raises:
        DecodingError: there is no such set, file or column.
    """
    if source in SETS:
        lines = Path(__file__).with_name(f"{source}.txt").read_text("utf-8").splitlines()
        rows: list[dict[str, Any]] = [{"prompt": line.replace("\\n", "\n"), "category": source} for line in lines]
    else:
        rows = _rows(source)
    prompts = []
    for number, row in enumerate(rows):
        messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
        said = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        prompts.append(Prompt(number, str(row.get("category") or "none"), list(said["input_ids"])))
    return prompts


def random_prompts(num_rows: int, num_tokens: int, vocab_size: int, seed: int = 0) -> list[Prompt]:
    """For models with random weights, which have no tokenizer."""
    random = Random(seed)
    return [
        Prompt(number, "random", [random.randrange(vocab_size) for _ in range(num_tokens)])
        for number in range(num_rows)
    ]


def spread(prompts: Sequence[Prompt], num_rows: int | None) -> list[Prompt]:
    """So many prompts, as evenly from all categories as they come; all of them for None."""
    if num_rows is None:
        return list(prompts)
    seen: dict[str, int] = {}
    ranked = []
    for prompt in prompts:
        ranked.append((seen.setdefault(prompt.category, 0), prompt.number, prompt))
        seen[prompt.category] += 1
    return sorted((prompt for _, _, prompt in sorted(ranked)[:num_rows]), key=lambda prompt: prompt.number)


def _rows(source: str) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(source)
    except (OSError, ValueError) as error:
        raise DecodingError(f"{source} is no Parquet file, and no set of ours ({', '.join(SETS)}): {error}") from error
    if not {"prompt", "messages"} & set(table.column_names):
        raise DecodingError(f"{source} has no column prompt or messages: it has {', '.join(table.column_names)}")
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows
