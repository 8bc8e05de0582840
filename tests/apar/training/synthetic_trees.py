"""Bases that know no control tokens, and made-up answers with trees, in the form that `forq data extract` writes."""

from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tiny_models import CHILD, FORK, MAX_MODEL_LEN, PAIRS, VOCAB_SIZE, tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from apar.options import ControlTokens
from apar.training.sequences import AnswerNode

CONTROL = ControlTokens(FORK, CHILD)
WORDS = [a + b for a in PAIRS[:6] for b in PAIRS[6:12]]
_NODE = pa.struct(
    [*((name, pa.int32()) for name in ("node", "first_child", "next_sibling", "start", "end")), ("text", pa.string())]
)
SCHEMA = pa.schema(
    [("prompt", pa.string()), ("response", pa.string()), ("kind", pa.string()), ("nodes", pa.list_(_NODE))]
)


def make_base(folder: Path, *, tied: bool = False, seed: int = 1, hidden: int = 32, dtype: str = "float32") -> Path:
    """Write a small random Llama with the tiny models' tokenizer; returns `folder`."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def random_nodes(
    random: Random, forks: int, first_token: int = 5, last_token: int = VOCAB_SIZE - 1
) -> list[AnswerNode]:
    """Any tree: each fork falls to a random leaf; nodes have 0 to 6 tokens, details at least 1."""
    pointers: list[tuple[int, int] | None] = [None]
    details = set[int]()
    for _ in range(forks):
        leaf = random.choice([number for number, pointer in enumerate(pointers) if pointer is None])
        child = len(pointers)
        pointers[leaf] = (child, child + 1)
        details.add(child)
        pointers += [None, None]
    nodes = []
    for number, pointer in enumerate(pointers):
        length = random.randint(1 if number in details else 0, 6)
        text = [random.randint(first_token, last_token) for _ in range(length)]
        nodes.append(AnswerNode(text, *(pointer or (None, None))))
    return nodes


def list_row(prompt: str, heads: list[str], details: list[str], tail: str = "") -> dict[str, Any]:
    texts = []
    for number, (head, detail) in enumerate(zip(heads, details, strict=True)):
        texts += [f"\n{number + 1}. {head}:", f" {detail}"]
    nodes, start = [], 0
    for number, text in enumerate([*texts, tail]):
        points = number % 2 == 0 and number < len(texts)
        pointers = (number + 1, number + 2) if points else (None, None)
        nodes.append(
            {
                "node": number, "first_child": pointers[0], "next_sibling": pointers[1],
                "start": start, "end": start + len(text), "text": text,
            }
        )  # fmt: skip
        start += len(text)
    return {"prompt": prompt, "response": "".join([*texts, tail]), "kind": "list", "nodes": nodes}


def plain_row(prompt: str, text: str) -> dict[str, Any]:
    node = {"node": 0, "first_child": None, "next_sibling": None, "start": 0, "end": len(text), "text": text}
    return {"prompt": prompt, "response": text, "kind": "unstructured", "nodes": [node]}


def made_up_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Lists answer prompts that begin with `list`, plain sentences those that begin with `say`."""
    random = Random(seed)

    def words(least: int, most: int) -> str:
        return " ".join(random.choices(WORDS, k=random.randint(least, most)))

    rows = []
    for number in range(count):
        if number % 2 == 0:
            points = random.randint(3, 4)
            heads, details = [words(1, 2) for _ in range(points)], [words(2, 5) for _ in range(points)]
            rows.append(list_row(f"list {words(1, 3)}", heads, details))
        else:
            rows.append(plain_row(f"say {words(1, 3)}", words(3, 8) + "."))
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path)
    return path
