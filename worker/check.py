"""The dry run behind `forq check`: what each row of a file would cost, with no engine and nothing stored."""

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jobs.results import PendingRow, RowResult
from jobs.rows import PreparedRow, RowReader, columns_of, make_mapping
from jobs.sampling import Sampling
from jobs.settings import Settings
from jobs.source import iter_batches, open_source
from jobs.submit import SubmitOptions, check_options
from worker.forking import Forking, load_encoder
from worker.generation import RowInFlight, prepare
from worker.models import resolve_model
from worker.planned import planned_facts

MAX_SHOWN = 20
"""Failing rows that are listed one by one; all are counted."""


class DryRun:
    """Counts rows as they are fed to it."""

    def __init__(self, settings: Settings, model: str, base: Sampling, say: Callable[[str], None]) -> None:
        """Find the model's tokenizer and limits.

        Raises:
            Unavailable: the model is nowhere to be found.
        """
        self._alias = settings.model(model)
        self._base = base
        files = resolve_model(model, settings, report=say)
        self._encoder, self.forking = load_encoder(self._alias, files.path)
        self.facts = planned_facts(self._alias, files.path)
        self.num_rows = 0
        self.num_output_tokens = 0
        self.prompt_lengths: list[int] = []
        self.codes: Counter[str] = Counter()
        self.errors: list[dict[str, Any]] = []

    def add(self, row: PreparedRow) -> None:
        outcome = self._try(row)
        if isinstance(outcome, RowInFlight):
            self.prompt_lengths.append(outcome.num_prompt_tokens)
            # The prompts of later turns hold answers, which no dry run knows: only the first is counted.
            self.num_output_tokens += outcome.num_turns * sum(sample.max_tokens for sample in outcome.samples)
        else:
            code, message = outcome
            self.codes[code] += 1
            if len(self.errors) < MAX_SHOWN:
                error = {"row": self.num_rows, "id": row.custom_id, "code": code, "message": message}
                self.errors.append(error)
        self.num_rows += 1

    def _try(self, row: PreparedRow) -> RowInFlight | tuple[str, str]:
        if row.payload is None:
            return row.error_code or "", row.error or ""
        own = Sampling.model_validate_json(row.sampling) if row.sampling else Sampling()
        pending = PendingRow(self.num_rows, self.num_rows, json.loads(row.payload), own.over(self._base), 0)
        ready = prepare(pending, self._encoder, self.facts, self._alias.default_max_tokens, "check")
        return (ready.error_code or "", ready.error or "") if isinstance(ready, RowResult) else ready

    def report(self) -> dict[str, Any]:
        lengths = sorted(self.prompt_lengths)
        budget = self._alias.kv_budget
        return {
            "rows": self.num_rows,
            "rows_that_fail": self.codes.total(),
            "prompt_tokens": sum(lengths),
            "median_prompt_tokens": lengths[len(lengths) // 2] if lengths else 0,
            "longest_prompt_tokens": lengths[-1] if lengths else 0,
            "output_tokens_at_most": self.num_output_tokens,
            "max_model_len": self.facts.max_model_len,
            "kv_budget": str(budget) if budget is not None else None,
            "forks": _forks(self.forking),
            "errors_by_code": dict(self.codes),
            "errors": self.errors,
        }


def check_file(
    settings: Settings,
    model: str,
    path: Path,
    *,
    max_tokens: int | None,
    columns: dict[str, Any],
    say: Callable[[str], None],
    progress: Callable[[str, int, int], None],
) -> dict[str, Any]:
    """Run a file's rows through everything but the engine; `columns` are `make_mapping`'s choices.

    Raises:
        BadInput: the file or an option cannot be used, as at submit.
        Unavailable: the model is nowhere to be found.
    """
    said = {} if max_tokens is None else {"max_tokens": max_tokens}
    base = check_options(settings, SubmitOptions(model=model, sampling=said))
    with (
        tempfile.TemporaryDirectory(prefix="forq-check-") as scratch,
        open_source(path, settings.limits, Path(scratch)) as source,
    ):
        mapping = make_mapping(source.file.schema_arrow, path, **columns)
        dry_run = DryRun(settings, model, base, say)
        # As submit reads it, with whatever decoding will be said there.
        names = (model, None, settings.model(model).hub_id)
        reader = RowReader(mapping, source.file.schema_arrow, settings.limits, *names)
        for batch in iter_batches(source.file, columns_of(mapping), path.name):
            for row in reader.prepare(batch):
                dry_run.add(row)
            progress("checking", dry_run.num_rows, source.file.metadata.num_rows)
    return {"file": str(path), "model": model, **dry_run.report()}


def _forks(forking: Forking | None) -> dict[str, Any] | None:
    """Control tokens and limits, or None for a model that cannot fork."""
    if forking is None:
        return None
    return {
        "fork_token": forking.fork_token,
        "fork_token_id": forking.fork_token_id,
        "child_token": forking.child_token,
        "child_token_id": forking.child_token_id,
        **asdict(forking.limits),
    }
