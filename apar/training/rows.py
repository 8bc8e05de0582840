"""Rows to train on: a Parquet file of prompts and answers, as tree sequences by prompt.

Whole prompts are held out, so that no answer to a held-out prompt is learned from; which ones depends on prompts and
seed alone.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from apar.errors import InputError
from apar.training.run_options import RunOptions
from apar.training.sequences import TreeSequence

BATCH_ROWS = 1024


def by_prompt(
    options: RunOptions,
    rows: Iterator[dict[str, Any]],
    tree_of: Callable[[dict[str, Any]], TreeSequence | None],
    skipped: Counter[str],
) -> list[list[TreeSequence]]:
    """The answers to each prompt, in the order in which prompts are held out.

    Args:
        rows: an answer whose `nodes` are there and null was dropped by the extraction.
        tree_of: a row's sequence, or None where it has no prompt or no answer.
        skipped: counts what is left out, by reason.

    Raises:
        InputError: a row that cannot be used at all.
    """
    groups: dict[bytes, list[TreeSequence]] = {}
    for number, row in enumerate(rows):
        if "nodes" in row and row["nodes"] is None:
            skipped["dropped by extraction"] += 1
            continue
        try:
            tree = tree_of(row)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"row {number} of {options.data}: {error}: mend the row, or extract anew") from None
        if tree is None:
            skipped["no prompt or no answer"] += 1
        elif len(tree) > options.most_tokens:
            skipped[f"longer than {options.most_tokens} tokens"] += 1
        else:
            key = hashlib.blake2b(f"{options.seed}/{row[options.prompt_column]!r}".encode(), digest_size=16).digest()
            groups.setdefault(key, []).append(tree)
    return [groups[key] for key in sorted(groups)]


def num_held_out(groups: Sequence[object], eval_share: float) -> int:
    """How many prompts to hold out: where there are two and any is wanted, at least one."""
    number = round(eval_share * len(groups))
    return max(number, 1) if eval_share > 0 and len(groups) > 1 else number


def read_rows(
    options: RunOptions, more: Sequence[str], check: Callable[[Any], None] = lambda schema: None
) -> Iterator[dict[str, Any]]:
    """The rows of the file: prompt, response and those of the columns `more` that it has.

    Args:
        check: looks at the file's Arrow schema first.

    Raises:
        InputError: no such file, not Parquet, or a column is missing.
    """
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
        check(file.schema_arrow)
        wanted = [options.prompt_column, options.response_column]
        for flag, name in zip(("prompt", "response"), wanted, strict=True):
            if name not in columns:
                raise InputError(
                    f"{options.data} has no column {name}: give --{flag}-column, one of {', '.join(columns)}"
                )
        wanted += [name for name in more if name in columns and name not in wanted]
        for batch in file.iter_batches(BATCH_ROWS, columns=wanted):
            yield from batch.to_pylist()


def left_out(skipped: Counter[str]) -> str:
    """What was left out, as ` (3 longer than 64 tokens left out)`; nothing, where nothing was."""
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
    return f" ({counts} left out)" if counts else ""
