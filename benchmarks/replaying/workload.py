"""Reads answers and makes the requests of both sides from them.

Receives a Parquet file with `prompt` and `response`; hands on `Request`s: the same prompt tokens and the same answer
tokens for both sides, forked for one and plain for the other.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.replaying.scripts import Replay, Script, encode_tree, flatten, num_threads
from benchmarks.replaying.trees import text_tree
from jobs.settings import DEFAULT_MODEL, get_settings
from worker.models import resolve_model

FORK_TOKEN_ID = 5
CHILD_TOKEN_ID = 6
"""Two unused rows of the tokenizer's vocabulary (SmolLM2's markers for repositories)."""
_PROMPT = "USER: {prompt} ASSISTANT:"
_FIRST_TEXT_TOKEN_ID = 17
"""SmolLM2's special tokens come before it."""


@dataclass(frozen=True)
class Tokenizer:
    """The bundled model's tokenizer, whose folder vLLM gets too."""

    folder: Path
    eos: int
    _backend: Any

    @classmethod
    def bundled(cls) -> "Tokenizer":
        """Found, or fetched, as the service finds the bundled model."""
        from tokenizers import Tokenizer as Backend

        folder = resolve_model(DEFAULT_MODEL, get_settings(), report=print).path
        config = json.loads((folder / "tokenizer_config.json").read_text())
        backend = Backend.from_file(str(folder / "tokenizer.json"))
        eos = backend.token_to_id(config["eos_token"])
        assert eos is not None, "a tokenizer knows its own EOS"
        return cls(folder, eos, backend)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids


@dataclass(frozen=True)
class Request:
    """`forked` flattens to the very tokens of `plain`."""

    prompt: list[int]
    forked: Script
    plain: list[int]
    eos: int

    @property
    def num_threads(self) -> int:
        return num_threads(self.forked)

    @property
    def num_tokens(self) -> int:
        """Prompt and answer with its EOS, sequentially."""
        return len(self.prompt) + len(self.plain) + 1

    def replay(self, *, forked: bool) -> str:
        """What the request's `extra_args` carry (see `forced`)."""
        script: Script = self.forked if forked else [*self.plain]
        return Replay(script, len(self.prompt), FORK_TOKEN_ID, CHILD_TOKEN_ID, self.eos).to_text()


def read_requests(
    file: Path, where: dict[str, str], num_rows: int, tokenizer: Tokenizer, vocab_size: int, max_depth: int = 1
) -> list[Request]:
    """`num_rows` requests from the file's rows in order; behind the last row they repeat under other prompts.

    `where` keeps the rows whose columns have these values. Tokens beyond `vocab_size` are folded into it: a small
    vocabulary makes a cheap model, and neither side cares which tokens they are.

    Raises:
        click.ClickException: no row is left, or a column is missing.
    """
    table = pq.read_table(file)
    for column, value in where.items():
        if column not in table.column_names:
            raise click.ClickException(f"{file} has no column {column!r}: it has {', '.join(table.column_names)}")
        table = table.filter(pc.equal(pc.cast(table[column], "string"), value))
    for column in ("prompt", "response"):
        if column not in table.column_names:
            raise click.ClickException(f"{file} has no column {column!r}, which the replay reads")
    rows = [row for row in table.select(["prompt", "response"]).to_pylist() if row["prompt"] and row["response"]]
    if not rows:
        raise click.ClickException(f"{file} has no row with a prompt and a response where {where}")

    def fold(text: str) -> list[int]:
        span = vocab_size - _FIRST_TEXT_TOKEN_ID
        return [_FIRST_TEXT_TOKEN_ID + (token - _FIRST_TEXT_TOKEN_ID) % span for token in tokenizer.encode(text)]

    requests = []
    for number in range(num_rows):
        lap, row = number // len(rows), rows[number % len(rows)]
        prompt = row["prompt"] if lap == 0 else f"({lap + 1}) {row['prompt']}"
        script = encode_tree(text_tree(row["response"], max_depth), fold)
        requests.append(Request(fold(_PROMPT.format(prompt=prompt)), script, flatten(script), tokenizer.eos))
    return requests
