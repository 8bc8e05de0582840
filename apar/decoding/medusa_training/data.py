"""Answers to train heads on: Parquet rows as tree sequences, split into those to learn from and those held out.

Reads the columns prompt and response and, for a base that forks, `nodes` as `forq data extract` writes them: heads then
see what they will see, [Fork] and details included. Any other answer is one plain sequence. A finish reason `length`,
in a column `finish_reason` or `forq_finish_reason`, marks a cut answer, whose end is no end to learn.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apar import files
from apar.decoding.medusa_training.options import MedusaTrainingOptions
from apar.errors import InputError
from apar.options import engine_options
from apar.training.sequences import AnswerNode, TreeSequence, linearise
from apar.training.vocabulary import Vocabulary

MOST_HELD_OUT = 32
"""Answers: evaluating takes time from training."""
FINISH_COLUMNS = ("finish_reason", "forq_finish_reason")


@dataclass(slots=True)
class MedusaData:
    learned: list[TreeSequence] = field(default_factory=list)
    held_out: list[TreeSequence] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    """Rows left out, by reason."""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.learned))

    @property
    def num_trees(self) -> int:
        return sum(tree.is_structured for tree in self.learned)


def vocabulary_of(base: Path) -> tuple[Vocabulary, bool]:
    """The base's tokenizer with its own control tokens, and whether the base has any.

    Raises:
        InputError: no model folder, or a tokenizer that cannot be used.
    """
    config = files.read_json(base / "config.json")
    if not isinstance(config, dict):
        raise InputError(f"{base} is no model folder: it has no config.json")
    control = engine_options(config.get("apar"), None).control
    if control is None:
        return Vocabulary(base), False
    from transformers import AutoTokenizer

    try:
        tokens = AutoTokenizer.from_pretrained(base, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError):
        return Vocabulary(base), True  # says what is wrong with it
    fork, child = tokens.convert_ids_to_tokens([control.fork, control.child])
    vocabulary = Vocabulary(base, fork, child)
    if vocabulary.control != control:
        raise InputError(f"{base}: config.json's apar names tokens that the tokenizer does not have: mend either")
    return vocabulary, True


def load(options: MedusaTrainingOptions, vocabulary: Vocabulary, *, forks: bool) -> MedusaData:
    """Read and tokenise the whole file.

    Raises:
        InputError: no such file, a column is missing, or nothing is left to learn from.
    """
    data = MedusaData()
    by_prompt: dict[bytes, list[TreeSequence]] = {}
    for number, row in enumerate(_rows(options, forks)):
        if "nodes" in row and row["nodes"] is None:
            data.skipped["dropped by extraction"] += 1
            continue
        try:
            tree = _tree(row, options, vocabulary)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"row {number} of {options.data}: {error}: mend the row, or extract anew") from None
        if tree is None:
            data.skipped["no prompt or no answer"] += 1
        elif len(tree) > options.most_tokens:
            data.skipped[f"longer than {options.most_tokens} tokens"] += 1
        else:
            key = hashlib.blake2b(f"{options.seed}/{row[options.prompt_column]!r}".encode(), digest_size=16).digest()
            by_prompt.setdefault(key, []).append(tree)
    _split(data, by_prompt, options.eval_share)
    if not data.learned:
        skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(data.skipped.items()))
        raise InputError(f"{options.data} has no answer to learn from{f' ({skipped} left out)' if skipped else ''}")
    return data


def _rows(options: MedusaTrainingOptions, forks: bool) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(options.data)
    except FileNotFoundError:
        raise InputError(f"{options.data} does not exist: give a Parquet file of prompts and answers") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{options.data} is no Parquet file: {str(error).splitlines()[0][:200]}") from None
    with file:
        columns = file.schema_arrow.names
        wanted = [options.prompt_column, options.response_column]
        for flag, name in zip(("prompt", "response"), wanted, strict=True):
            if name not in columns:
                raise InputError(
                    f"{options.data} has no column {name}: give --{flag}-column, one of {', '.join(columns)}"
                )
        wanted += ["nodes"] if forks and "nodes" in columns else []
        wanted += [name for name in FINISH_COLUMNS if name in columns and name not in wanted]
        for batch in file.iter_batches(1024, columns=wanted):
            yield from batch.to_pylist()


def _tree(row: dict[str, Any], options: MedusaTrainingOptions, vocabulary: Vocabulary) -> TreeSequence | None:
    prompt, response = row[options.prompt_column], row[options.response_column]
    if not prompt or not response:
        return None
    nodes = row.get("nodes") or [{"text": response, "first_child": None, "next_sibling": None}]
    answer = [
        AnswerNode(vocabulary.encode_text(node["text"], follows=number > 0), node["first_child"], node["next_sibling"])
        for number, node in enumerate(nodes)
    ]
    return linearise(
        vocabulary.encode_prompt(prompt),
        answer,
        vocabulary.control,
        vocabulary.eos_token_id,
        complete=not any(row.get(name) == "length" for name in FINISH_COLUMNS),
    )


def _split(data: MedusaData, by_prompt: dict[bytes, list[TreeSequence]], eval_share: float) -> None:
    """Hold out whole prompts; which ones depends on prompts and seed alone."""
    groups: Sequence[list[TreeSequence]] = [by_prompt[key] for key in sorted(by_prompt)]
    num_held_out = round(eval_share * len(groups))
    if eval_share > 0 and len(groups) > 1:
        num_held_out = max(num_held_out, 1)
    data.held_out = [tree for group in groups[:num_held_out] for tree in group][:MOST_HELD_OUT]
    data.learned = [tree for group in groups[num_held_out:] for tree in group]
