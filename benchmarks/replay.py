"""Real answers through the real engine, stock and forked, in one run: what forking is worth under a KV budget.

    python -m benchmarks.replay --answers FILE --kv-blocks min,36,60,120,400 --block-size 32 --rows 80 --json

The model has dummy weights and every token is forced (`replaying.forced`), so that both sides give exactly the answers
of the file: vLLM's own scheduler one after the other, the forking scheduler in the threads that the answers' own lists
and paragraphs suggest. Both get the same engine options and alternate, each in a process of its own. A figure is only
printed once every output has been compared with its answer, token by token.

One JSON line per budget. Steps, preemptions and token counts repeat exactly; the seconds are the machine's.
`--plot DIR` adds the paper's two curves as PNG, as measured under these budgets and as projected for a GPU at shares of
its cache (`replaying.projection`), with the projection's figures in `projected.json`.
"""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random

import click

from benchmarks.replaying.limits import limits
from benchmarks.replaying.plots import draw_curves
from benchmarks.replaying.projection import Gpu, Point, gpu_of, measured_times, point, projected_times
from benchmarks.replaying.report import Pair, measured_line, projected_report
from benchmarks.replaying.shapes import SHAPES, model_config, write_model
from benchmarks.replaying.sides import Setup, run_side
from benchmarks.replaying.workload import Request, Tokenizer, read_requests

PROJECTION_SHAPE = "ghost"
PROJECTION_ROUNDS = 3
"""Requests of the projection, in multiples of its concurrency: one third warms up, one is counted, one drains."""
PROJECTION_MAX_NUM_SEQS = 2048


@click.command()
@click.option("--answers", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True)
@click.option("--where", "conditions", multiple=True, metavar="COLUMN=VALUE", help="Only rows like model=vicuna-13b.")
@click.option("--kv-blocks", default="min,2min,4min", show_default=True, help="Budgets; min: the fewest possible.")
@click.option("--block-size", default=32, show_default=True, help="Tokens per KV block.")
@click.option("--rows", default=80, show_default=True, help="Requests; behind the file's last row it starts over.")
@click.option("--order", type=int, metavar="SEED", help="Shuffle the requests. Default: in the file's order.")
@click.option("--shape", default="light", show_default=True, help=f"{', '.join(SHAPES)}, or a config.json.")
@click.option("--dtype", default="auto", show_default=True)
@click.option("--max-depth", default=1, show_default=True, help="1: details do not fork again.")
@click.option("--max-model-len", type=int, help="Default: what the longest request needs, in whole blocks.")
@click.option("--max-num-seqs", default=256, show_default=True, help="vLLM's limit of rows per step.")
@click.option("--concurrency", type=int, help="Requests in the engine at once. Default: all.")
@click.option("--repeats", default=1, show_default=True, help="Runs per side and budget; seconds are their median.")
@click.option("--warm-up", type=click.IntRange(min=1), help="Requests that run before the clock does. Default: all.")
@click.option("--cpu-threads", type=int, help="OpenMP threads of both engines. Default: vLLM's choice.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line per budget.")
@click.option("--plot", "plot_folder", type=click.Path(file_okay=False, path_type=Path), help="Draw PNGs there.")
@click.option("--gpu", "gpu_values", multiple=True, metavar="NAME=VALUE", help="Of the projection: row_us=50, …")
@click.option("--gpu-shares", default="0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9", show_default=True)
@click.option("--gpu-concurrency", default=180, show_default=True, help="The paper: 350 for 7B, 180 for 13B.")
def main(
    answers: Path,
    conditions: tuple[str, ...],
    kv_blocks: str,
    block_size: int,
    rows: int,
    order: int | None,
    shape: str,
    dtype: str,
    max_depth: int,
    max_model_len: int | None,
    max_num_seqs: int,
    concurrency: int | None,
    repeats: int,
    warm_up: int | None,
    cpu_threads: int | None,
    as_json: bool,
    plot_folder: Path | None,
    gpu_values: tuple[str, ...],
    gpu_shares: str,
    gpu_concurrency: int,
) -> None:
    """Replay real answers, stock and forked, under each KV budget."""
    gpu, where, tokenizer = gpu_of(gpu_values), _where(conditions), Tokenizer.bundled()

    with tempfile.TemporaryDirectory(prefix="forq-replay-") as name:
        folder = Path(name)
        config = model_config(shape, tokenizer.eos)
        requests = read_requests(answers, where, rows, tokenizer, config["vocab_size"], max_depth)
        if order is not None:
            requests = Random(order).sample(requests, len(requests))
        setup = Setup(
            model=write_model(folder / "model", config),
            tokenizer=tokenizer.folder,
            dtype=dtype,
            block_size=block_size,
            max_model_len=max_model_len or _blocks_needed(requests, block_size) * block_size,
            max_num_seqs=max_num_seqs,
            concurrency=concurrency or rows,
            cpu_threads=cpu_threads,
            warm_up=warm_up or rows,
        )
        bounds = limits([(len(request.prompt), request.forked) for request in requests], block_size)
        pairs = []
        for budget in _budgets(kv_blocks, -(-setup.max_model_len // block_size)):
            pairs.append(_pair(setup, budget, requests, repeats, folder))
            line = measured_line(pairs[-1], bounds)
            print(
                json.dumps(line) if as_json else "  ".join(f"{key} {value}" for key, value in line.items()), flush=True
            )
        if plot_folder is None:
            return
        _draw_measured(plot_folder, pairs)

        config = model_config(PROJECTION_SHAPE, tokenizer.eos)
        num_rows = PROJECTION_ROUNDS * gpu_concurrency
        requests = read_requests(answers, where, num_rows, tokenizer, config["vocab_size"], max_depth)
        setup = replace(
            setup,
            model=write_model(folder / "projection-model", config),
            max_num_seqs=PROJECTION_MAX_NUM_SEQS,
            max_model_len=_blocks_needed(requests, block_size) * block_size,
            concurrency=gpu_concurrency,
            cpu_threads=1,  # the model is too small to share out
            warm_up=1,  # its seconds are no figure
        )
        _project(plot_folder, setup, gpu, [float(share) for share in gpu_shares.split(",")], requests, folder)


def _pair(setup: Setup, kv_blocks: int, requests: list[Request], repeats: int, folder: Path) -> Pair:
    """Stock and forked by turns, each first in every other round, so that a slow spell does not fall on one alone."""
    pair = Pair(kv_blocks, [], [])
    for repeat in range(repeats):
        for side in ("stock", "apar") if repeat % 2 == 0 else ("apar", "stock"):
            outcome = run_side(side, setup, kv_blocks, requests, folder)
            (pair.stock if side == "stock" else pair.apar).append(outcome)
            log = outcome.log
            figures = f"{outcome.seconds:.1f} s, {log.num_steps} steps, {log.preemptions} preemptions"
            _say(f"{kv_blocks} blocks, {side}: {figures}, {log.recomputed_tokens} tokens recomputed")
    return pair


def _draw_measured(plot_folder: Path, pairs: list[Pair]) -> None:
    curves = {
        side: [point(pair.kv_blocks, runs[0], measured_times(runs[0])) for pair, runs in sides]
        for side, sides in (
            ("stock", [(pair, pair.stock) for pair in pairs]),
            ("apar", [(pair, pair.apar) for pair in pairs]),
        )
    }
    blocks = [pair.kv_blocks for pair in pairs]
    _say(f"drawn: {draw_curves(plot_folder / 'measured.png', 'Measured here', 'KV blocks', blocks, curves)}")


def _project(
    plot_folder: Path, setup: Setup, gpu: Gpu, shares: list[float], requests: list[Request], folder: Path
) -> None:
    """The schedule of each share is the real engine's; a model that costs nothing stands in for the GPU's."""
    curves: dict[str, list[Point]] = {"stock": [], "apar": []}
    for share in shares:
        budget = gpu.kv_blocks(share, setup.block_size)
        pair = _pair(setup, budget, requests, 1, folder)
        for side, outcome in (("stock", pair.stock[0]), ("apar", pair.apar[0])):
            curves[side].append(point(budget, outcome, projected_times(outcome.log, gpu)))
    report = projected_report(gpu, setup.concurrency, shares, curves["stock"], curves["apar"])
    title = f"Projected: {gpu.weights_gb:g} GB of weights, {gpu.bandwidth_gb_s:g} GB/s"
    _say(f"drawn: {draw_curves(plot_folder / 'projected.png', title, 'share of the cache', shares, curves)}")
    (plot_folder / "projected.json").write_text(json.dumps(report, indent=1) + "\n")
    _say(json.dumps(report))


def _blocks_needed(requests: list[Request], block_size: int) -> int:
    """Of the longest request, with room for one more token, so that its EOS does not end at the context's end."""
    return -(-max(request.num_tokens + 1 for request in requests) // block_size)


def _budgets(text: str, smallest: int) -> list[int]:
    """`"min,2min,400"`: KV blocks, `min` being the fewest that hold `max_model_len`: vLLM accepts no fewer."""
    budgets = []
    for part in (part.strip() for part in text.split(",")):
        number = part.removesuffix("min")
        if not (number.isdecimal() or part == "min"):
            raise click.BadParameter(f"{part!r} is neither a number of blocks nor a multiple of min, as in 2min")
        budgets.append(int(number or 1) * (smallest if part.endswith("min") else 1))
    if min(budgets) < smallest:
        raise click.BadParameter(f"{min(budgets)} blocks: vLLM needs {smallest} for its longest request (write min)")
    return budgets


def _where(pairs: tuple[str, ...]) -> dict[str, str]:
    conditions = {}
    for pair in pairs:
        column, equals, value = pair.partition("=")
        if not equals:
            raise click.BadParameter(f"{pair!r}: write COLUMN=VALUE")
        conditions[column] = value
    return conditions


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
