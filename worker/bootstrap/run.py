"""The run: stage after stage, each taken up where an earlier run stopped."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from apar.extraction.files import extract_file
from apar.extraction.structure import TreeNode, attended_share
from apar.training.loop import Event
from apar.training.run import train
from db.session import Database
from jobs import store
from jobs.console import Advance
from jobs.errors import BadInput, ForqError
from jobs.settings import Settings
from jobs.source import open_parquet, require_column
from jobs.submit import SubmitOptions
from worker.bootstrap.answering import export_answers, forq, serving, submit_prompts
from worker.bootstrap.recipe import Recipe
from worker.bootstrap.record import Record
from worker.bootstrap.selecting import count_words, select
from worker.models import resolve_model


class Interrupted(ForqError):
    """The user stopped the run; the same command goes on with it."""


Say = Callable[[str], None]
STAGES = ("split", "answers", "selection", "trees", "training", "report")
ALWAYS_NEGATIVE = ("code", "maths")
"""Reasons of extraction that make an answer an example of what must not fork, whatever its length."""


@dataclass(frozen=True)
class Request:
    """What a run is asked for."""

    base: str
    """Alias of the instruction model."""
    prompts: Path
    out: Path
    prompt_column: str = "prompt"
    category_column: str | None = None
    """Carried along to the report, where the file has it."""
    answers: Path | None = None
    """Answers that exist already, as `forq export` writes them, instead of new ones."""
    report_prompts: Path | None = None
    """A file of its own for the report; else some prompts are held out."""
    recipe: Recipe = field(default_factory=Recipe)


def bootstrap(database: Database, settings: Settings, request: Request, say: Say, progress: Advance) -> dict[str, Any]:
    """Make a forking model of `request.base` in `request.out`; returns the record's stages.

    Raises:
        BadInput: prompts, options or the folder cannot be used.
        Unavailable: the service or the base model cannot be started.
    """
    base = resolve_model(request.base, settings, report=say)
    record = Record(request.out, _identity(request))
    # Refused now rather than after an hour.
    request.recipe.training_options(base.path, request.out / "trees.parquet", request.out / "training")
    run = _Run(database, settings, request, base.path, say, progress)
    found = {}
    for number, name in enumerate(STAGES, start=1):
        done = record.stage(name)
        title = f"[{number}/{len(STAGES)}] {name}"
        if done is None:
            say(title)
            facts = getattr(run, name)()
            done = record.finish(name, **facts)
            say(f"{title}: " + ", ".join(f"{key} {value}" for key, value in done.items()))
        else:
            say(f"{title}: done before")
        found[name] = done
    return found


def _identity(request: Request) -> dict[str, Any]:
    return {
        "base": request.base,
        "prompts": _digest(request.prompts),
        "prompt_column": request.prompt_column,
        "category_column": request.category_column,
        "answers": _digest(request.answers),
        "report_prompts": _digest(request.report_prompts),
        "recipe": request.recipe.model_dump(mode="json"),
    }


@dataclass(frozen=True)
class _Run:
    """The stages. Each writes its file whole or not at all, and returns facts for the record."""

    database: Database
    settings: Settings
    request: Request
    base: Path
    say: Say
    progress: Advance

    def split(self) -> dict[str, Any]:
        """Prompts to learn from and prompts of the report."""
        asked = self.request
        table = _prompts(asked.prompts, asked.prompt_column, asked.category_column)
        if asked.report_prompts is not None:
            held = _prompts(asked.report_prompts, asked.prompt_column, asked.category_column)
        else:
            num_held = min(asked.recipe.report.rows, table.num_rows // 5)
            if num_held == 0:
                raise BadInput(f"{asked.prompts} has {table.num_rows} prompts: a run needs at least 5")
            chosen = {i * table.num_rows // num_held for i in range(num_held)}
            held = table.take(sorted(chosen))
            table = table.take([i for i in range(table.num_rows) if i not in chosen])
        self._write(table, "prompts.parquet")
        self._write(held, "report-prompts.parquet")
        return {"prompts": table.num_rows, "report_prompts": held.num_rows}

    def answers(self) -> dict[str, Any]:
        """The base model's answers, through the service."""
        out = self.request.out / "answers.parquet"
        if self.request.answers is not None:
            table = pq.read_table(self.request.answers)
            for name in ("prompt", "forq_output", "forq_finish_reason"):
                require_column(table.schema, name, self.request.answers)
            # Answers to prompts of the report would make it a report on what was learnt by heart.
            mine = pq.read_table(self.request.out / "prompts.parquet", columns=["prompt"])["prompt"].combine_chunks()
            table = table.filter(pc.is_in(table["prompt"], value_set=mine))
            if table.num_rows == 0:
                raise BadInput(f"{self.request.answers} has no answer to a prompt of {self.request.prompts}")
            self._write(table, out.name)
            return {"answers": table.num_rows, "from": str(self.request.answers)}
        values = self.request.recipe.answers
        options = SubmitOptions(
            model=self.request.base,
            prompt_column="prompt",
            sampling={"max_tokens": values.max_tokens, "temperature": values.temperature, "top_p": values.top_p,
                      "seed": values.seed},
            name="bootstrap",
            dedupe=True,
        )  # fmt: skip
        prompts = self.request.out / "prompts.parquet"
        job_id = submit_prompts(self.database, self.settings, prompts, options, self.progress)
        with serving(self.settings, self.request.base):
            counts = export_answers(self.database, self.settings, job_id, out, self.progress)
        return {"answers": counts["completed"], "failed": counts["failed"], "job": job_id}

    def selection(self) -> dict[str, Any]:
        """Answers worth learning from, and why the others are not."""
        table = pq.read_table(self.request.out / "answers.parquet")
        values = self.request.recipe.answers
        judged = [
            select(text, reason, max_repetition=values.max_repetition, min_words=values.min_words)
            for text, reason in zip(
                table["forq_output"].to_pylist(), table["forq_finish_reason"].to_pylist(), strict=True
            )
        ]
        kept = [i for i, answer in enumerate(judged) if answer.reason is None]
        columns = {name: table[name].take(kept) for name in ("prompt", "category") if name in table.schema.names}
        columns["response"] = pa.array([judged[i].text for i in kept], pa.string())
        # As training reads it: an answer that was cut teaches nothing about ending where it was cut.
        columns["finish_reason"] = pa.array(["stop" if judged[i].complete else "length" for i in kept], pa.string())
        self._write(pa.table(columns), "selected.parquet")
        reasons = [answer.reason for answer in judged if answer.reason is not None]
        return {
            "kept": len(kept),
            "complete": sum(judged[i].complete for i in kept),
            **{reason: reasons.count(reason) for reason in ("failed", "empty", "repetitive", "cut")},
        }

    def trees(self) -> dict[str, Any]:
        """Paragraph trees, and the answers that teach not to fork."""
        out = self.request.out
        values = self.request.recipe.trees
        extracted = extract_file(
            out / "selected.parquet",
            out / "extracted.parquet",
            values.rules,
            advance=lambda done, total: self.progress("trees", done, total),
        )
        table = pq.read_table(out / "extracted.parquet")
        columns = (table[name].to_pylist() for name in ("response", "finish_reason", "kind", "reason", "nodes"))
        forks = []
        """Of each answer that is kept."""
        kept = []
        for i, (text, finish_reason, kind, reason, nodes) in enumerate(zip(*columns, strict=True)):
            tree = [TreeNode(node["start"], node["end"], node["first_child"], node["next_sibling"]) for node in nodes]
            num_forks = sum(node.first_child is not None for node in tree)
            forks_enough = num_forks >= values.min_forks and attended_share(tree) <= values.max_attended_share
            is_short = finish_reason == "stop" and count_words(text) <= values.max_plain_words
            is_negative = reason in ALWAYS_NEGATIVE or is_short
            if forks_enough if kind != "unstructured" else is_negative:
                kept.append(i)
                forks.append(num_forks)
        structured = sum(num_forks > 0 for num_forks in forks)
        if structured == 0:
            raise BadInput(
                f"none of {extracted.num_rows} answers has a structure that forks enough: ask for advice, explanations"
                ", lists, or raise max_attended_share and lower min_forks of [trees]"
            )
        self._write(table.take(kept), "trees.parquet")
        return {
            "structured": structured,
            "unstructured": len(kept) - structured,
            "left_out": extracted.num_rows - len(kept),
            "forks_per_tree": round(sum(forks) / structured, 2),
        }

    def training(self) -> dict[str, Any]:
        """The model, in `model/`, and with LoRA its adapter, in `adapter/`."""
        out = self.request.out
        options = self.request.recipe.training_options(self.base, out / "trees.parquet", out / "training")

        def report(event: Event) -> None:
            if event.text:
                self.say(event.text)
            if event.step is not None and event.steps is not None:
                self.progress("training", event.step, event.steps)

        result = train(options, report)
        if not result.finished:
            raise Interrupted(f"stopped at step {result.step} of {result.steps}: give the same command to go on")
        return {"steps": result.step, **(result.held_out or {}), **result.figures}

    def report(self) -> dict[str, Any]:
        """Savings and quality beside the base's, on prompts that were not trained on."""
        out = self.request.out
        forq(
            "eval", str(out / "training" / "model"), "--base", self.request.base,
            "--prompts", str(out / "report-prompts.parquet"),
            "--max-tokens", str(self.request.recipe.report.max_tokens), "--out", str(out / "report"), shown=True,
        )  # fmt: skip
        return {"folder": str(out / "report")}

    def _write(self, table: pa.Table, name: str) -> None:
        target = self.request.out / name
        temporary = store.temporary_beside(target)
        try:
            pq.write_table(table, temporary, compression="zstd")
            store.publish(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)


def _prompts(path: Path, prompt_column: str, category_column: str | None) -> pa.Table:
    """The prompts as the column `prompt`, with `category` where the file has it.

    Raises:
        BadInput: not Parquet, no such column, or a prompt that is no text.
    """
    with open_parquet(path, None) as file:
        schema = file.schema_arrow
        require_column(schema, prompt_column, path)
        if category_column is not None:
            require_column(schema, category_column, path)
        category = category_column or ("category" if "category" in schema.names else None)
        table = file.read([name for name in (prompt_column, category) if name])
    columns = {"prompt": table[prompt_column]}
    kind = columns["prompt"].type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)) or columns["prompt"].null_count:
        raise BadInput(f"column {prompt_column!r} of {path.name} must hold a text in every row")
    if category is not None:
        columns["category"] = table[category]
    return pa.table(columns)


def _digest(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}") from None
