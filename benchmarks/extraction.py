"""How many answers of real files become trees, by either set of rules, and whether every tree gives its answer back.

    python -m benchmarks.extraction FILE.parquet... [--code never|outside|whole] [--show N] [--seed S]

One JSON line per file and set of rules. `--show` prints N random trees of the `markdown` rules to be read by eye: `N` a
node's text, `D` its detail.
"""

import json
import random
from pathlib import Path
from typing import Any

import click
import pyarrow.parquet as pq

from apar.extraction.extract import extract
from apar.extraction.options import RULES, Options
from apar.extraction.report import Report
from apar.extraction.structure import TreeNode, restore


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--code", type=click.Choice(["never", "outside", "whole"]), default="never", show_default=True)
@click.option("--show", default=0, help="Trees to print per file.")
@click.option("--seed", default=0)
def main(files: tuple[Path, ...], code: Any, show: int, seed: int) -> None:
    """Extract the column `response` of FILES."""
    for file in files:
        texts = [text for text in pq.read_table(file, columns=["response"])["response"].to_pylist() if text is not None]
        trees: list[tuple[str, list[TreeNode]]] = []
        for rules in RULES:
            report, trees = Report(rules), []
            for text in texts:
                outcome = extract(text, rules, Options(code=code))
                report.count(outcome)
                if outcome.nodes is not None and outcome.kind != "unstructured":
                    trees.append((text, outcome.nodes))
            exact = sum(restore(text, nodes) == text for text, nodes in trees)
            figures = {name: value for name, value in report.to_dict().items() if name != "outcomes"}
            click.echo(json.dumps({"file": file.name, "code": code, "restored": exact, "trees": len(trees), **figures}))
        for text, nodes in random.Random(seed).sample(trees, min(show, len(trees))):
            click.echo("=" * 40)
            details = {node.first_child for node in nodes}
            for number, node in enumerate(nodes):
                click.echo(f"{'  D' if number in details else 'N'} {text[node.start : node.end]!r}")


if __name__ == "__main__":
    main()
