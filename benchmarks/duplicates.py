"""What looking for duplicates costs: memory and time per million texts.

    python -m benchmarks.duplicates --texts 20000 --words 100 --json

Every text is another one, which is the worst case: all are remembered. The figures per million are the measured ones
scaled up; the dictionaries behind them double at certain sizes, so they are right within that factor.
"""

import json
import random
import time
from typing import Any

import click
import psutil

from jobs.dataset.duplicates import ExactDuplicates, NearDuplicates

VOCABULARY = 20_000


@click.command()
@click.option("--texts", default=20_000, show_default=True)
@click.option("--words", default=100, show_default=True, help="Of a text.")
@click.option("--json", "as_json", is_flag=True)
def main(texts: int, words: int, as_json: bool) -> None:
    """Measure exact and near duplicates, over texts that are all different."""
    chance = random.Random(1)
    NearDuplicates(0.8).is_new("load the library first")
    report: dict[str, Any] = {"texts": texts, "words": words}
    for name, finder in (("exact", ExactDuplicates()), ("near", NearDuplicates(0.8))):
        before, seconds = psutil.Process().memory_info().rss, 0.0
        for _ in range(texts):
            text = " ".join(f"w{chance.randrange(VOCABULARY)}" for _ in range(words))
            started = time.perf_counter()
            assert finder.is_new(text)
            seconds += time.perf_counter() - started
        grown = psutil.Process().memory_info().rss - before
        report[name] = {
            "bytes_per_text": grown // texts,
            "gib_per_million": round(grown / texts * 1e6 / 2**30, 2),
            "seconds_per_million": round(seconds / texts * 1e6),
        }
    print(json.dumps(report) if as_json else "\n".join(f"{name}: {value}" for name, value in report.items()))


if __name__ == "__main__":
    main()
