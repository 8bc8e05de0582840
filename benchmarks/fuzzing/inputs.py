"""Whole inputs of every kind, to be damaged: a file, and what is said about it."""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.fuzzing.mutations import mutate

PROMPTS = [
    "What is rain?",
    "",
    "é" * 30,
    "[Fork] [Child] <|im_start|>",
    "a\x00b",
    "x" * 5000,
    "{{ 7 * 7 }}",
    "\u202e\ufeff",
]


@dataclass(frozen=True)
class Input:
    kind: str
    name: str
    data: bytes
    template: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    job_toml: bytes | None = None


def make(kind: str, random: Random) -> Input:
    """An input of this kind, damaged."""
    return KINDS[kind](random)


def _parquet(columns: Any, random: Random) -> bytes:
    sink = io.BytesIO()
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    pq.write_table(
        table,
        sink,
        compression=random.choice(("snappy", "none", "zstd", "gzip")),
        use_dictionary=random.random() < 0.5,
        row_group_size=random.choice((1, 3, 1000)),
    )
    return sink.getvalue()


def _rows(random: Random) -> list[str]:
    return [random.choice(PROMPTS) for _ in range(random.randint(1, 12))]


def _prompts(random: Random) -> Input:
    columns = {"prompt": _rows(random)}
    return Input("parquet", "in.parquet", mutate(_parquet(columns, random), random))


def _messages(random: Random) -> Input:
    turns = [
        [{"role": random.choice(("system", "user", "assistant", "tool", "")), "content": text}]
        for text in _rows(random)
    ]
    data = _parquet({"messages": turns}, random)
    if random.random() < 0.5:  # as JSON text, which is damaged before it is packed
        texts = [mutate(json.dumps(turn).encode(), random).decode("utf-8", "replace") for turn in turns]
        data = _parquet({"messages": texts}, random)
    return Input("messages", "in.parquet", data if random.random() < 0.5 else mutate(data, random))


def _types(random: Random) -> Input:
    """Columns of types that nobody means by a prompt."""
    value: Any = random.choice(
        (
            1,
            1.5,
            float("nan"),
            True,
            None,
            b"\xff\xfe",
            [1, 2],
            [["a"]],
            {"a": 1},
            {"role": "user"},
            [{"role": 1, "content": 2}],
        )
    )
    name = random.choice(("prompt", "messages", "sampling", "forq_output", "Prompt", "prompt "))
    columns = {name: [value] * random.randint(1, 4)}
    if random.random() < 0.5:
        columns.setdefault("prompt", ["a"] * len(columns[name]))
    return Input("types", "in.parquet", _parquet(columns, random))


def _jsonl(random: Random) -> Input:
    lines = []
    for number, text in enumerate(_rows(random)):
        body: Any = random.choice(
            (
                {"prompt": text},
                {"messages": [{"role": "user", "content": text}]},
                {"prompt": text, "n": 10**9},
                [],
                None,
                {},
                {"prompt": text, "temperature": -1},
                {"prompt": [text]},
                {"prompt": text, "stop": ["x"] * 500},
            )
        )
        line = {"custom_id": random.choice((f"row-{number}", "same", "", 7)), "method": "POST", "body": body}
        line["url"] = random.choice(("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "../x"))
        lines.append(json.dumps(line))
    data = "\n".join(lines).encode()
    return Input("jsonl", "in.jsonl", data if random.random() < 0.3 else mutate(data, random))


def _template(random: Random) -> Input:
    texts = (
        "{{ prompt }}",
        "{% for x in prompt %}{{ x }}{% endfor %}",
        "{{ prompt.__class__.__mro__ }}",
        "{{ prompt|upper }}",
        "{{ prompt.format(prompt) }}",
        "{% set x = prompt * 1000000 %}{{ x }}",
        "{{ ''.join(prompt) }}",
        "{{ 2 ** 9999 }}",
        "{{ self }}{{ cycler }}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}{{ prompt }}",
        "{{ prompt[10**9] }}",
        "{% include 'etc' %}",
        "{{ prompt.center(10**9) }}",
        "{{ prompt|attr('__init__') }}",
        "{{ lipsum(n=500) }}{{ prompt }}",
        "{% for a in range(99999) %}{% for b in range(99) %}{% endfor %}{% endfor %}{{ prompt }}",
        "{{ namespace() }}{{ prompt }}",
    )
    text = random.choice(texts)
    if random.random() < 0.6:
        text = mutate(text.encode(), random).decode("utf-8", "replace")
    return Input("template", "in.parquet", _parquet({"prompt": _rows(random)}, random), template=text)


_VALUES: tuple[Any, ...] = (
    0,
    1,
    -1,
    10**9,
    10**30,
    0.0,
    0.5,
    -0.5,
    2.0,
    1e308,
    float("nan"),
    float("inf"),
    True,
    None,
    "",
    "1",
    "x" * 9999,
    [],
    [1],
    ["a"],
    ["a"] * 99,
    [""],
    {},
    {"a": 1},
    b"x",
    "[Fork]",
    "\x00",
)


def _sampling(random: Random) -> Input:
    names = (
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "n",
        "stop",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logprobs",
        "prompt",
        "extra_args",
        "",
    )
    said = {random.choice(names): random.choice(_VALUES) for _ in range(random.randint(1, 4))}
    data = _parquet({"prompt": ["a"]}, random)
    if random.random() < 0.5:  # by row, as text or as a struct
        try:
            value: Any = said if random.random() < 0.5 else json.dumps(said, default=str)
            data = _parquet({"prompt": ["a", "b"], "sampling": [value, None]}, random)
            return Input("sampling", "in.parquet", data)
        except (pa.ArrowException, TypeError, OverflowError, ValueError):
            pass  # no Parquet file can hold that
    return Input("sampling", "in.parquet", data, sampling=said)


_TOML = b"""model = "smollm2-135m"
prompt_column = "prompt"
max_tokens = 64
temperature = 0.7
seed = 3
name = "a job"
priority = 2
[sampling]
top_k = 5
stop = ["x"]
"""


def _job_toml(random: Random) -> Input:
    return Input("job_toml", "in.parquet", _parquet({"prompt": ["a"]}, random), job_toml=mutate(_TOML, random))


KINDS: dict[str, Callable[[Random], Input]] = {
    "parquet": _prompts,
    "messages": _messages,
    "types": _types,
    "jsonl": _jsonl,
    "template": _template,
    "sampling": _sampling,
    "job_toml": _job_toml,
}
