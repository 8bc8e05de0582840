"""The command `forq check`: what would happen to a file, without an engine and without storing anything."""

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jobs.console import print_json, print_table, progress
from jobs.settings import ModelAlias, Settings, get_settings

if TYPE_CHECKING:
    from worker.backend import EngineFacts

MAX_SHOWN = 20
CPU_BLOCK_SIZE, GPU_BLOCK_SIZE = 32, 16


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--model", metavar="ALIAS", help="Which configured model.  [default: the configured default]")
@click.option("--prompt-column", metavar="C", help="Column of prompts.")
@click.option("--messages-column", metavar="C", help="Column of conversations.")
@click.option(
    "--template", "template_file", metavar="T.j2", type=click.Path(path_type=Path, dir_okay=False, exists=True)
)
@click.option("--id-column", metavar="C", help="Column that names the rows.")
@click.option("--max-tokens", type=int, metavar="N", help="Longest answer, in tokens.")
@click.option("--tokens-per-second", type=float, metavar="F", help="For the ETA.  [default: as the last jobs ran]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(
    file: Path,
    model: str | None,
    template_file: Path | None,
    max_tokens: int | None,
    tokens_per_second: float | None,
    as_json: bool,
    **columns: Any,
) -> int:
    """Dry run: count the prompts' tokens and find the rows that cannot run.

    Nothing is stored and no engine is started. Exit code 1 if any row would fail.

    \b
    Example:
      forq check questions.parquet --model smollm2-135m
    """
    settings = get_settings()
    alias_name = model or settings.default_model
    template = template_file.read_text(encoding="utf-8") if template_file is not None else None
    report = _check(settings, alias_name, file, template, max_tokens, columns)
    rate = tokens_per_second or _measured_rate(settings, alias_name)
    report["tokens_per_second"] = rate
    report["eta_s_at_most"] = round(report["output_tokens_at_most"] / rate, 1) if rate else None
    if as_json:
        print_json(report)
    else:
        _print(report)
    return 1 if report["rows_that_fail"] else 0


def _check(
    settings: Settings, model: str, file: Path, template: str | None, max_tokens: int | None, columns: dict[str, Any]
) -> dict[str, Any]:
    import tempfile

    from jobs.results import PendingRow, RowResult
    from jobs.rows import RowReader, columns_of, make_mapping
    from jobs.sampling import Sampling
    from jobs.source import check_suffix, is_jsonl, iter_batches, jsonl_to_parquet, open_parquet
    from jobs.submit import SubmitOptions, check_options
    from worker.generation import prepare
    from worker.models import resolve_model
    from worker.prompts import PromptEncoder

    said = {"max_tokens": max_tokens} if max_tokens is not None else {}
    base = check_options(settings, SubmitOptions(model=model, sampling=said))
    check_suffix(file)
    alias = settings.model(model)
    with tempfile.TemporaryDirectory(prefix="forq-check-") as scratch:
        parquet = file
        if is_jsonl(file):
            parquet = Path(scratch) / f"{file.stem}.parquet"
            jsonl_to_parquet(file, parquet, settings.limits)
        with open_parquet(parquet, settings.limits) as source:
            mapping = make_mapping(source.schema_arrow, file, template=template, **columns)
            files = resolve_model(model, settings, report=lambda line: click.echo(line, err=True))
            encoder = PromptEncoder.load(files.path)
            facts = _planned_facts(alias, files.path)
            reader = RowReader(mapping, source.schema_arrow, settings.limits, model)
            errors: list[dict[str, Any]] = []
            codes: Counter[str] = Counter()
            lengths: list[int] = []
            num_output = index = 0
            with progress() as advance:
                for batch in iter_batches(source, columns_of(mapping), file.name):
                    for row in reader.prepare(batch):
                        code, message = row.error_code, row.error
                        if code is None:
                            assert row.payload is not None
                            own = Sampling.model_validate_json(row.sampling) if row.sampling else Sampling()
                            pending = PendingRow(index, index, json.loads(row.payload), own.over(base), 0)
                            ready = prepare(pending, encoder, facts, alias.default_max_tokens, "check")
                            if isinstance(ready, RowResult):
                                code, message = ready.error_code, ready.error
                            else:
                                lengths.append(ready.num_prompt_tokens)
                                num_output += sum(sample.max_tokens for sample in ready.samples)
                        if code is not None:
                            codes[code] += 1
                            if len(errors) < MAX_SHOWN:
                                errors.append({"row": index, "id": row.custom_id, "code": code, "message": message})
                        index += 1
                    advance("checking", index, source.metadata.num_rows)
    lengths.sort()
    return {
        "file": str(file),
        "model": model,
        "rows": index,
        "rows_that_fail": sum(codes.values()),
        "errors_by_code": dict(codes),
        "errors": errors,
        "prompt_tokens": sum(lengths),
        "longest_prompt_tokens": lengths[-1] if lengths else 0,
        "median_prompt_tokens": lengths[len(lengths) // 2] if lengths else 0,
        "output_tokens_at_most": num_output,
        "max_model_len": facts.max_model_len,
        "kv_budget": str(alias.kv_budget) if alias.kv_budget else None,
    }


def _planned_facts(alias: ModelAlias, model_path: Path) -> "EngineFacts":
    """The limits an engine for this alias would report, worked out from the model's own configuration."""
    from transformers import AutoConfig

    from worker.backend import EngineFacts
    from worker.engine import engine_args, on_cpu

    config = AutoConfig.from_pretrained(model_path).get_text_config()
    block_size = engine_args(alias, str(model_path)).get("block_size", CPU_BLOCK_SIZE if on_cpu() else GPU_BLOCK_SIZE)
    context = config.max_position_embeddings
    limit = min(context, alias.max_model_len or context)
    budget = alias.kv_budget
    num_blocks = -(-limit // block_size)
    if budget is not None:
        if budget.unit == "bytes":
            heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            bytes_per_value = 4 if alias.dtype == "float32" else 2
            num_blocks = budget.amount // (
                2 * config.num_hidden_layers * heads * head_dim * bytes_per_value * block_size
            )
        else:
            num_blocks = budget.amount if budget.unit == "blocks" else budget.amount // block_size
        limit = min(limit, num_blocks * block_size)
    return EngineFacts("planned", "", block_size, num_blocks, limit, context, 1)


def _measured_rate(settings: Settings, model: str) -> float | None:
    """Output tokens per second of the last completed job of this model, or None."""
    from datetime import datetime

    from jobs.context import open_service
    from jobs.service import list_jobs

    with open_service() as (_, database):
        for job in list_jobs(database, state="completed"):
            if job["model"] == model and job["output_tokens"] and job["started_at"] and job["finished_at"]:
                started, finished = (datetime.fromisoformat(job[name]) for name in ("started_at", "finished_at"))
                seconds = (finished - started).total_seconds()
                return round(job["output_tokens"] / seconds, 1) if seconds > 0 else None
    return None


def _print(report: dict[str, Any]) -> None:
    rows = [
        [name.replace("_", " "), value] for name, value in report.items() if name not in ("errors", "errors_by_code")
    ]
    print_table(None, ["", report["file"]], rows[1:])
    if report["errors"]:
        errors = [[error["row"], error["code"], error["message"]] for error in report["errors"]]
        print_table("rows that would fail", ["row", "code", "why"], errors)
