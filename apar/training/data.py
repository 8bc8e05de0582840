"""Training answers: rows of `forq data extract` as tree sequences, split into those to learn from and those held out.

Reads columns prompt, response and `nodes` (and `finish_reason`, where there is one: `length` marks a cut answer).
Prompts are texts, or lists of messages with role and content.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from apar.errors import InputError
from apar.training.options import TrainingOptions
from apar.training.rows import by_prompt, left_out, num_held_out, read_rows
from apar.training.sequences import AnswerNode, TreeSequence, linearise
from apar.training.vocabulary import Vocabulary

MOST_HELD_OUT = 64
"""Answers of each sort: evaluating takes time from training."""


@dataclass(slots=True)
class TrainingData:
    structured: list[TreeSequence] = field(default_factory=list)
    unstructured: list[TreeSequence] = field(default_factory=list)
    held_out: list[TreeSequence] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    """Rows left out, by reason."""

    @property
    def trees(self) -> list[TreeSequence]:
        return [*self.structured, *self.unstructured]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.trees))

    @property
    def num_path_tokens(self) -> int:
        """What the same answers take as one plain sequence per root-to-leaf path."""
        return sum(tree.num_path_tokens() for tree in self.trees)


def load(options: TrainingOptions, vocabulary: Vocabulary) -> TrainingData:
    """Read and tokenise the whole file.

    Raises:
        InputError: no such file, a column is missing, or nothing is left to learn forking from.
    """
    data = TrainingData()
    rows = read_rows(options, ("nodes", "finish_reason"), partial(_check_nodes, options))
    groups = by_prompt(options, rows, lambda row: _tree(row, options, vocabulary), data.skipped)
    _split(data, groups, options.eval_share)
    _check(data, options)
    return data


def _check_nodes(options: TrainingOptions, schema: Any) -> None:
    import pyarrow as pa

    if "nodes" not in schema.names:
        raise InputError(f"{options.data} has no column nodes: run `forq data extract` first")
    found = schema.field("nodes").type
    node = found.value_type if pa.types.is_list(found) or pa.types.is_large_list(found) else None
    names = [field.name for field in node] if node is not None and pa.types.is_struct(node) else []
    missing = sorted({"first_child", "next_sibling", "text"} - set(names))
    if missing:
        raise InputError(
            f"{options.data}: the nodes are {found}, without {', '.join(missing)}: run `forq data extract` anew"
        )


def _tree(row: dict[str, Any], options: TrainingOptions, vocabulary: Vocabulary) -> TreeSequence | None:
    prompt, response, nodes = row[options.prompt_column], row[options.response_column], row["nodes"]
    if not prompt or not response or not nodes:
        return None
    if not isinstance(prompt, str) and not _are_messages(prompt):
        raise ValueError("its prompt is neither a text nor messages with role and content")
    answer = [
        AnswerNode(
            vocabulary.encode_text(node["text"], follows=number > 0),
            node["first_child"],
            node["next_sibling"],
        )
        for number, node in enumerate(nodes)
    ]
    tree = linearise(
        vocabulary.encode_prompt(prompt),
        answer,
        vocabulary.control,
        vocabulary.eos_token_id,
        complete=row.get("finish_reason") != "length",
    )
    if _restored(nodes) != response:
        raise ValueError("its nodes do not give the answer back")
    return tree


def _are_messages(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(
        isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        for message in prompt
    )


def _restored(nodes: Sequence[dict[str, Any]]) -> str:
    texts: list[str] = []
    stack = [0]
    while stack:
        node = nodes[stack.pop()]
        texts.append(node["text"])
        stack += [node[name] for name in ("next_sibling", "first_child") if node[name] is not None]
    return "".join(texts)


def _split(data: TrainingData, groups: Sequence[list[TreeSequence]], eval_share: float) -> None:
    """Hold out whole prompts, structured and unstructured ones alike."""
    for structured in (True, False):
        mine = [group for group in groups if group[0].is_structured is structured]
        number = num_held_out(mine, eval_share)
        data.held_out += [tree for group in mine[:number] for tree in group][:MOST_HELD_OUT]
        # An answer of the other sort to the same prompt goes where the prompt goes.
        for tree in (tree for group in mine[number:] for tree in group):
            (data.structured if tree.is_structured else data.unstructured).append(tree)


def _check(data: TrainingData, options: TrainingOptions) -> None:
    left = left_out(data.skipped)
    if not data.trees:
        raise InputError(f"{options.data} has no answer to learn from{left}")
    if options.structured_share > 0 and not data.structured:
        raise InputError(f"{options.data} has no structured answer{left}: nothing teaches the model to fork")
    if options.structured_share < 1 and not data.unstructured:
        raise InputError(
            f"{options.data} has no unstructured answer{left}, and --structured-share is {options.structured_share}: "
            "add some, or give 1"
        )
