"""Answers to train heads on: Parquet rows as tree sequences, split into those to learn from and those held out.

Reads the columns prompt and response and, for a base that forks, `nodes` as `forq data extract` writes them: heads then
see what they will see, [Fork] and details included. Any other answer is one plain sequence. A finish reason `length`,
in a column `finish_reason` or `forq_finish_reason`, marks a cut answer, whose end is no end to learn.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apar import files
from apar.decoding.medusa_training.options import MedusaTrainingOptions
from apar.errors import InputError
from apar.options import engine_options
from apar.training.rows import by_prompt, left_out, num_held_out, read_rows
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
    rows = read_rows(options, (*(("nodes",) if forks else ()), *FINISH_COLUMNS))
    groups = by_prompt(options, rows, lambda row: _tree(row, options, vocabulary), data.skipped)
    number = num_held_out(groups, options.eval_share)
    data.held_out = [tree for group in groups[:number] for tree in group][:MOST_HELD_OUT]
    data.learned = [tree for group in groups[number:] for tree in group]
    if not data.learned:
        raise InputError(f"{options.data} has no answer to learn from{left_out(data.skipped)}")
    return data


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
