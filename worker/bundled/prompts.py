"""Writes the prompts that the bundled APAR model was made from: templates over topics, none from a data set.

    python -m worker.bundled.prompts OUT.parquet [--rows N] [--seed S] [--mix general|points|writing]

Templates and topics are in `prompts.toml`. Columns: `prompt`, `category`.
"""

import itertools
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random

import click

SOURCE = Path(__file__).with_name("prompts.toml")
MIXES = ("general", "points", "writing")


def prompts(num_rows: int, seed: int, mix: str = "general") -> list[tuple[str, str]]:
    """`num_rows` different prompts with their categories, in random order, the same for the same arguments.

    Fewer, where the templates give no more.
    """
    source = tomllib.loads(SOURCE.read_text("utf-8"))
    kinds = source[mix]
    random = Random(seed)  # noqa: S311  no secret depends on it
    streams = {name: _shuffled(kind["templates"], source["topics"], random) for name, kind in kinds.items()}
    rows: list[tuple[str, str]] = []
    while len(rows) < num_rows and streams:
        (name,) = random.choices(list(streams), [kinds[name]["weight"] for name in streams])
        text = next(streams[name], None)
        if text is None:
            del streams[name]
        else:
            rows.append((text, name))
    return rows


def _shuffled(templates: list[str], topics: Mapping[str, list[str]], random: Random) -> Iterator[str]:
    """All prompts of one kind once, in random order."""
    texts = sorted({text for template in templates for text in _filled(template, topics)})
    random.shuffle(texts)
    return iter(texts)


def _filled(template: str, topics: Mapping[str, list[str]]) -> Iterator[str]:
    names = [name for name in topics if f"{{{name}}}" in template]
    for values in itertools.product(*(topics[name] for name in names)):
        text = template
        for name, value in zip(names, values, strict=True):
            text = text.replace(f"{{{name}}}", value)
        yield text[0].upper() + text[1:]


@click.command()
@click.argument("out", type=click.Path(dir_okay=False))
@click.option("--rows", default=1800, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=1, show_default=True)
@click.option("--mix", type=click.Choice(MIXES), default="general", show_default=True)
def main(out: str, rows: int, seed: int, mix: str) -> None:
    """Write prompts to OUT, a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    made = prompts(rows, seed, mix)
    pq.write_table(pa.table({"prompt": [text for text, _ in made], "category": [kind for _, kind in made]}), out)
    click.echo(f"{len(made)} prompts written to {out}")


if __name__ == "__main__":
    main()
