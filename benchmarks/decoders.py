"""The papers' decoders side by side at batch 1: tokens per forward, hit rate, acceptance, speed, and equality.

    python -m benchmarks.decoders --model smollm2-135m-apar --prompts P.parquet --decoders ar,apar,ptd,apar+ptd --json

The decoders take turns on every prompt, so that a slow minute of the machine hits all of them. A decoder may carry
settings (`ptd:width=2:depth=6`). `--records FILE` keeps every run; the same command goes on where it stopped, and
`--from FILE` draws up the figures of such files without running anything.

Without the service, on any machine with torch and transformers: `--model` is a Hugging Face folder, or with
`--shape vicuna-7b` (or a config.json) a model with random weights, for pure timing; `--costs 0,8,16,32,64,128` then
says what a forward with so many drafted nodes costs, which with DE (the same on every machine) gives the speed-up.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from apar.decoding import Decoder, DecodingError, TreeModel, load_model
from apar.options import ControlTokens, ForkLimits, engine_options
from benchmarks.decoding import costs, figures, plots, prompts
from benchmarks.decoding.contenders import Contender, build, parse

SHAPE_PROMPT_TOKENS = 128


@click.command()
@click.option("--model", help="A Hugging Face folder, or an alias of the service.")
@click.option("--shape", help=f"Random weights instead of --model: {', '.join(costs.SHAPES)}, or a config.json.")
@click.option(
    "--prompts", "source", help=f"A Parquet file, or {' or '.join(prompts.SETS)}: 50 prompts of our own each."
)
@click.option("--rows", type=click.IntRange(1), help="So many prompts, from all categories. Default: all.")
@click.option("--decoders", default="ar,lade,ptd", show_default=True, help="Names, with settings like ptd:width=2.")
@click.option("--max-tokens", default=256, show_default=True, type=click.IntRange(2))
@click.option("--medusa", type=click.Path(path_type=Path), help="Folder of Medusa heads trained for the model.")
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16", "float16"]))
@click.option("--device", default="cpu", show_default=True)
@click.option("--cpu-threads", type=int)
@click.option("--records", type=click.Path(dir_okay=False, path_type=Path), help="Keep every run there, and go on.")
@click.option("--from", "others", multiple=True, type=click.Path(exists=True, path_type=Path), help="Records to read.")
@click.option("--costs", "nodes", help="Time forwards with so many drafted nodes, e.g. 0,8,16,32,64,128.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line per decoder and category.")
@click.option("--plot", "folder", type=click.Path(file_okay=False, path_type=Path), help="Draw PNGs there.")
def main(
    model: str | None,
    shape: str | None,
    source: str | None,
    rows: int | None,
    decoders: str,
    max_tokens: int,
    medusa: Path | None,
    dtype: str,
    device: str,
    cpu_threads: int | None,
    records: Path | None,
    others: tuple[Path, ...],
    nodes: str | None,
    as_json: bool,
    folder: Path | None,
) -> None:
    try:
        contenders = [parse(spelled) for spelled in decoders.split(",")]
        if others:
            runs = figures.read(others)
        else:
            loaded, tokenizer = _load(model, shape, dtype, device, cpu_threads)
            if nodes is not None:
                _print_costs(loaded, [int(number) for number in nodes.split(",")], as_json)
                return
            if tokenizer is None:
                asked = prompts.random_prompts(rows or 4, SHAPE_PROMPT_TOKENS, loaded.vocab_size)
            else:
                if source is None:
                    raise click.UsageError("--prompts is missing: a Parquet file, or maths or code")
                asked = prompts.spread(prompts.load(source, tokenizer), rows)
            built = [(contender, _build(contender, loaded, medusa)) for contender in contenders]
            runs = _run(built, asked, max_tokens, records)
    except DecodingError as error:
        raise click.ClickException(str(error)) from error
    table = figures.summarise(runs)
    for row in table:
        click.echo(json.dumps(row) if as_json else _line(row))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        plots.plot_categories(table, folder / "decoders.png", f"{len({run.row for run in runs})} prompts, batch 1")
        plots.plot_sweep(table, folder / "ptd_sweep.png", "Progressive Tree Drafting: width and depth")


def _load(
    model: str | None, shape: str | None, dtype: str, device: str, cpu_threads: int | None
) -> tuple[TreeModel, Any]:
    """The model, and its tokenizer unless its weights are random."""
    import torch
    from transformers import AutoTokenizer

    if cpu_threads is not None:
        torch.set_num_threads(cpu_threads)
    if (model is None) == (shape is None):
        raise click.UsageError("name one of --model and --shape")
    if shape is not None:
        return costs.random_model(shape, dtype, device), None
    assert model is not None
    path = Path(model) if Path(model).is_dir() else _alias(model)
    return load_model(path, dtype, device), AutoTokenizer.from_pretrained(path)


def _alias(name: str) -> Path:
    """A model that the service knows; its rooms are not needed for a folder."""
    from jobs.errors import ForqError
    from jobs.settings import get_settings
    from worker.models import resolve_model

    try:
        return resolve_model(name, get_settings(), report=lambda line: click.echo(line, err=True)).path
    except ForqError as error:
        raise DecodingError(f"{name} is no folder and no model of the service: {error}") from error


def _build(contender: Contender, model: TreeModel, medusa: Path | None) -> Decoder:
    said = engine_options(getattr(model.hf.config, "apar", None), None)
    control: ControlTokens | None = said.control
    limits: ForkLimits = said.limits
    return build(contender, model, control, limits, _eos_ids(model), medusa)


def _eos_ids(model: TreeModel) -> list[int]:
    said = getattr(model.hf.generation_config, "eos_token_id", None) or model.config.eos_token_id
    return [said] if isinstance(said, int) else list(said or [])


def _run(
    decoders: Sequence[tuple[Contender, Decoder]],
    asked: Sequence[prompts.Prompt],
    max_tokens: int,
    keep: Path | None,
) -> list[figures.Record]:
    """Run every decoder on every prompt, turn by turn, except what `keep` has already."""
    runs = figures.read([keep]) if keep is not None and keep.exists() else []
    done = {(run.row, run.decoder) for run in runs}
    with click.progressbar(asked, label="prompts", file=sys.stderr) as bar:
        for turn, prompt in enumerate(bar):
            first = turn % len(decoders)
            for contender, decoder in (*decoders[first:], *decoders[:first]):
                if (prompt.number, contender.spelled) in done:
                    continue
                run = decoder.start(prompt.token_ids, max_tokens=max_tokens)
                started = time.perf_counter()
                going = run.step()
                prefilled = time.perf_counter()
                while going:
                    going = run.step()
                seconds = (prefilled - started, time.perf_counter() - prefilled)
                record = figures.record_of(
                    prompt.number, prompt.category, contender.spelled, contender.compared_with, seconds, run.result()
                )
                runs.append(record)
                if keep is not None:
                    with keep.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(asdict(record)) + "\n")
    return runs


def _print_costs(model: TreeModel, nodes: Sequence[int], as_json: bool) -> None:
    for cost in costs.measure(model, nodes):
        click.echo(
            json.dumps(cost)
            if as_json
            else "{nodes:5} nodes: {ms_per_forward:8.2f} ms per forward, {relative:5.2f} of plain".format(**cost)
        )


def _line(row: dict[str, Any]) -> str:
    return (
        "{decoder:24} {category:16} {rows:3} rows {tokens:6} tokens {forwards:6} forwards  DE {de:5.2f}  HR {hr:4.2f}  "
        "AL {al:4.2f}  {nodes_per_step:5.1f} nodes/step {tokens_per_s:7.1f} tokens/s  x{speedup}  identical {identical}"
    ).format(**row)


if __name__ == "__main__":
    main()
