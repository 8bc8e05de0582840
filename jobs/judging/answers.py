"""A file of answers, open for reading: what its columns are for, and what its rows bring to a rubric."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.columns import to_python
from jobs.errors import BadInput
from jobs.faults import no_column
from jobs.judging.rubrics import VARIABLES, Kind
from jobs.source import Progress, first_line, is_jsonl, iter_batches

MAX_ROWS = 1_000_000
"""Items, pairs too, and their prompts are sorted in memory."""
DEFAULTS: dict[str, tuple[str, ...]] = {
    "prompt": ("prompt",),
    "response": ("response", "forq_output"),
    "reference": ("reference",),
    "response_a": ("response_a",),
    "response_b": ("response_b",),
    "prompt_2": ("prompt_2",),
    "response_2": ("response_2",),
    "reference_2": ("reference_2",),
    "response_a_2": ("response_a_2",),
    "response_b_2": ("response_b_2",),
    "messages": ("messages",),
    "model": ("model",),
    "model_a": ("model_a",),
    "model_b": ("model_b",),
    "category": ("category",),
    "id": ("id", "question_id"),
}
"""What columns are for, and the names they have by default, the first that is there."""
PARTS = ("prompt", "response", "reference", "response_a", "response_b")
"""Of a turn: roles that a second turn has again, with `_2` behind them."""


@dataclass(frozen=True)
class Answers:
    file: pq.ParquetFile
    path: Path
    kind: Kind
    roles: dict[str, str]
    """Names of columns, by what they are for."""

    @property
    def num_rows(self) -> int:
        return int(self.file.metadata.num_rows)

    @property
    def is_paired(self) -> bool:
        """Pairs are made of its rows, instead of a row being one."""
        return self.kind == "pairwise" and "response_a" not in self.roles

    @property
    def has_conversations(self) -> bool:
        """Its two turns are in a column of messages."""
        return "messages" in self.roles and "response" not in self.roles and not self._has_pairs

    @property
    def num_turns(self) -> int:
        return 2 if self.has_conversations or "prompt_2" in self.roles else 1

    @property
    def parts(self) -> tuple[str, ...]:
        """What every row must have, in each turn, to be judged."""
        return VARIABLES["pointwise" if self.is_paired else self.kind]

    @property
    def names(self) -> list[str]:
        """What an item brings to a rubric."""
        columns = [f.name for f in self.file.schema_arrow if self._is_for_rubrics(f.name)]
        more = [part for part in PARTS if part in self.roles]
        if self.is_paired:  # what is one answer's alone would be A's in either order
            roles = ("response", "response_2", "model", "messages")
            hidden = {*roles, *(self.roles[role] for role in roles if role in self.roles)}
            columns, more = ([name for name in some if name not in hidden] for some in (columns, more))
        return list(dict.fromkeys([*columns, *more, *VARIABLES[self.kind], "turns"]))

    def rows(self, names: Collection[str], report: Progress) -> Iterator[dict[str, Any]]:
        """The rows, with the columns of `names` and those that are for something.

        Raises:
            BadInput: the file is damaged.
        """
        kept = [f.name for f in self.file.schema_arrow if f.name in self.roles.values() or f.name in names]
        num_read = 0
        for batch in iter_batches(self.file, kept, self.path.name):
            columns = {name: to_python(batch.column(name)) for name in kept}
            for number in range(batch.num_rows):
                yield {name: values[number] for name, values in columns.items()}
            num_read += batch.num_rows
            if num_read > self.num_rows:
                break
            report("reading", num_read, self.num_rows)
        if num_read != self.num_rows:
            raise BadInput(f"{self.path.name} does not hold the {self.num_rows} rows that it says: write it again")

    @property
    def _has_pairs(self) -> bool:
        return self.kind == "pairwise" and "response_a" in self.roles

    def _is_for_rubrics(self, name: str) -> bool:
        """Trees and the like stay in the file."""
        return name in self.roles.values() or not name.startswith("forq_")


@contextmanager
def open_answers(path: Path, kind: Kind, names: Mapping[str, str]) -> Iterator[Answers]:
    """
    Args:
        names: column names by role (`DEFAULTS`), where they are not the defaults.

    Raises:
        BadInput: not a readable Parquet file, a column that is missing, a role nobody knows.
    """
    unknown = [role for role in names if role not in DEFAULTS]
    if unknown:
        raise BadInput(f"--column {unknown[0]}=…: there is no such role; use {', '.join(DEFAULTS)}")
    if is_jsonl(path):
        raise BadInput(f"{path.name} is JSONL: write the answers as Parquet")
    if not path.is_file():
        raise BadInput(f"{path}: no such file")
    try:
        # Small buffers, as in jobs/source.py.
        file = pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
        schema, num_rows = file.schema_arrow, file.metadata.num_rows
    except MemoryError:  # Arrow's is an ArrowException, too, and the file is not damaged
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path.name} is not a readable Parquet file ({first_line(error)}): write it again") from None
    with file:
        if not 0 < num_rows <= MAX_ROWS:
            raise BadInput(f"{path.name} has {num_rows} rows: 1 to {MAX_ROWS} can be judged at once; split it")
        if len(set(schema.names)) < len(schema.names):
            raise BadInput(f"{path.name} has a column name twice: rename one")
        answers = Answers(file, path, kind, _roles(path, schema.names, names))
        _check_roles(answers)
        yield answers


def _roles(path: Path, there: Sequence[str], names: Mapping[str, str]) -> dict[str, str]:
    for role, name in names.items():
        if name not in there:
            raise BadInput(f"for {role}: {no_column(path.name, name, there)}")
    found = {role: next((name for name in defaults if name in there), None) for role, defaults in DEFAULTS.items()}
    return {role: name for role, name in {**found, **names}.items() if name is not None}


def _check_roles(answers: Answers) -> None:
    roles = answers.roles
    needed = ["messages"] if answers.has_conversations else [part for part in answers.parts if part != "reference"]
    if answers.kind == "reference":
        needed.append("reference")
    if answers.num_turns == 2:
        needed += [f"{role}_2" for role in needed if role != "messages"]
    if answers.is_paired:
        needed.append("model")
    missing = [role for role in needed if role not in roles]
    if missing:
        is_pair = answers.kind == "pairwise"
        also = "; pairs are made of response_a and response_b, or of response and model" if is_pair else ""
        raise BadInput(
            f"{answers.path.name} has no column for {', '.join(missing)}: name it like --column {missing[0]}=NAME; its "
            f"columns are used for {', '.join(f'{role} ({name})' for role, name in roles.items()) or 'nothing'}{also}"
        )
