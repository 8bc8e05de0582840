"""Training answers: rows of `forq data extract` as tree sequences, split into those to learn from and those held out.

Reads columns prompt, response and `nodes` (and `finish_reason`, where there is one: `length` marks a cut answer).
Prompts are texts, or lists of messages with role and content.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from apar.errors import InputError
from apar.training.options import TrainingOptions
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
    by_prompt: dict[bytes, list[TreeSequence]] = {}
    for number, row in enumerate(_rows(options)):
        if row["nodes"] is None:
            data.skipped["dropped by extraction"] += 1
            continue
        try:
            tree = _tree(row, options, vocabulary)
        except ValueError as error:
            raise InputError(f"row {number} of {options.data}: {error}: mend the row, or extract anew") from None
        if tree is None:
            data.skipped["no prompt or no answer"] += 1
        elif len(tree) > options.most_tokens:
            data.skipped[f"longer than {options.most_tokens} tokens"] += 1
        else:
            key = hashlib.blake2b(f"{options.seed}/{row[options.prompt_column]!r}".encode(), digest_size=16).digest()
            by_prompt.setdefault(key, []).append(tree)
    _split(data, by_prompt, options.eval_share)
    _check(data, options)
    return data


def _rows(options: TrainingOptions) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(options.data)
    except FileNotFoundError:
        raise InputError(f"{options.data} does not exist: give the Parquet file of `forq data extract`") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{options.data} is no Parquet file: {str(error).splitlines()[0][:200]}") from None
    with file:
        columns = file.schema_arrow.names
        if "nodes" not in columns:
            raise InputError(f"{options.data} has no column nodes: run `forq data extract` first")
        for flag, name in (("prompt", options.prompt_column), ("response", options.response_column)):
            if name not in columns:
                raise InputError(
                    f"{options.data} has no column {name}: give --{flag}-column, one of {', '.join(columns)}"
                )
        _check_nodes(options, file.schema_arrow.field("nodes").type)
        wanted = [options.prompt_column, options.response_column, "nodes"]
        wanted += [name for name in ("finish_reason",) if name in columns]
        for batch in file.iter_batches(1024, columns=wanted):
            yield from batch.to_pylist()


def _check_nodes(options: TrainingOptions, found: Any) -> None:
    import pyarrow as pa

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


def _split(data: TrainingData, by_prompt: dict[bytes, list[TreeSequence]], eval_share: float) -> None:
    """Hold out whole prompts, so that no answer to a held-out prompt is learned from.

    Which ones depends on prompts and seed alone; structured and unstructured ones are held out alike.
    """
    groups = [by_prompt[key] for key in sorted(by_prompt)]
    for structured in (True, False):
        mine = [group for group in groups if group[0].is_structured is structured]
        num_held_out = round(eval_share * len(mine))
        if eval_share > 0 and len(mine) > 1:
            num_held_out = max(num_held_out, 1)
        data.held_out += [tree for group in mine[:num_held_out] for tree in group][:MOST_HELD_OUT]
        # An answer of the other sort to the same prompt goes where the prompt goes.
        for tree in (tree for group in mine[num_held_out:] for tree in group):
            (data.structured if tree.is_structured else data.unstructured).append(tree)


def _check(data: TrainingData, options: TrainingOptions) -> None:
    skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(data.skipped.items()))
    left = f" ({skipped} left out)" if skipped else ""
    if not data.trees:
        raise InputError(f"{options.data} has no answer to learn from{left}")
    if options.structured_share > 0 and not data.structured:
        raise InputError(f"{options.data} has no structured answer{left}: nothing teaches the model to fork")
    if options.structured_share < 1 and not data.unstructured:
        raise InputError(
            f"{options.data} has no unstructured answer{left}, and --structured-share is {options.structured_share}: "
            "add some, or give 1"
        )
