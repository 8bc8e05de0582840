"""`structured` and `logprobs` of sampling: what may be said, how rows say it, and how log probabilities come out."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from batches import acquire, drain, requests_of, sample, submit_table

from db.session import Database
from jobs import results, service
from jobs.errors import BadInput
from jobs.export import LOGPROBS_FIELD, TREE_FIELD, export_job
from jobs.sampling import MAX_CHOICE_CHARS, MAX_CHOICES, MAX_REGEX_CHARS, MAX_SCHEMA_CHARS, Sampling, parse_sampling
from jobs.settings import Settings


def parse(**values: Any) -> Sampling:
    return parse_sampling(values, max_n=4, max_max_tokens=100)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"properties": schema}
    return schema


@pytest.mark.parametrize(
    ("structured", "message"),
    [
        ({}, "structured says nothing: say one of choice, regex, json_schema"),
        ({"choice": ["a"], "regex": "b"}, "structured says choice and regex: say one of"),
        ({"choice": []}, "structured.choice has 0 texts"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, f"has 257 texts: 1 to {MAX_CHOICES} are allowed"),
        ({"choice": ["a", ""]}, "structured.choice has an empty text"),
        ({"choice": ["a" * MAX_CHOICE_CHARS, "b"]}, f"the limit is {MAX_CHOICE_CHARS}"),
        ({"choice": ["\ud800"]}, "half of a surrogate pair"),
        ({"choice": "yes"}, "structured.choice is 'yes'"),
        ({"choice": [1]}, "structured.choice.0 is 1"),
        ({"regex": ""}, "structured.regex has 0 characters"),
        ({"regex": "a" * (MAX_REGEX_CHARS + 1)}, "structured.regex has 4097 characters"),
        ({"regex": "a\0"}, "holds a NUL"),
        ({"json_schema": "{"}, "structured.json_schema is not valid JSON"),
        ({"json_schema": "[" * 100_000}, "structured.json_schema is not valid JSON"),
        ({"json_schema": "[1]"}, "structured.json_schema is"),
        ({"json_schema": nested(40)}, "nested deeper than 32 levels"),
        ({"json_schema": {"enum": ["x" * MAX_SCHEMA_CHARS]}}, f"the limit is {MAX_SCHEMA_CHARS}"),
        ({"json_schema": {"minimum": float("nan")}}, "holds what JSON has no value for"),
        ({"json_schema": {"const": "\ud800"}}, "half of a surrogate pair"),
        ({"grammar": "root ::= x"}, "structured.grammar is not a sampling value: use choice, json_schema, regex"),
        ("yes", "structured is 'yes'"),
    ],
)
def test_a_structure_beyond_its_limits_is_refused_in_one_line(structured: Any, message: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse(structured=structured)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("value", [-1, 21, 1.5, True, "3", float("nan")])
def test_log_probabilities_are_bounded(value: Any) -> None:
    with pytest.raises(BadInput, match="logprobs"):
        parse(logprobs=value)
    assert parse(logprobs=0).logprobs == 0
    assert parse(logprobs=20).said() == {"logprobs": 20}


def test_a_schema_may_be_an_object_or_its_json_text() -> None:
    schema = {"type": "object", "properties": {"a": {"const": None}}}
    assert parse(structured={"json_schema": json.dumps(schema)}) == parse(structured={"json_schema": schema})
    assert parse(structured={"json_schema": schema, "regex": None}).said() == {"structured": {"json_schema": schema}}


def test_a_rows_structure_lies_over_the_jobs_as_a_whole_and_stays_what_it_is() -> None:
    base = parse(structured={"choice": ["a", "b"]}, seed=3)
    merged = parse(structured={"regex": "c"}).over(base)
    assert merged == parse(structured={"regex": "c"}, seed=3)
    assert parse(seed=4).over(base) == parse(structured={"choice": ["a", "b"]}, seed=4)
    assert Sampling.model_validate_json(merged.model_dump_json()) == merged


def test_rows_of_a_file_say_it_in_their_sampling_struct(database: Database, settings: Settings) -> None:
    structured = pa.struct([("choice", pa.list_(pa.string())), ("regex", pa.string()), ("json_schema", pa.string())])
    kind = pa.struct([("structured", structured), ("logprobs", pa.int64())])
    rows = [
        {"structured": {"choice": ["x", "y"]}, "logprobs": 2},
        {"structured": {"json_schema": '{"type": "integer"}'}},
        {"structured": None},
        {"structured": {"choice": None}},
        {"structured": {"regex": "a" * 5000}},
        None,
    ]
    job = submit_table(database, settings, {"prompt": ["q"] * 6, "sampling": pa.array(rows, kind)},
                       sampling={"structured": {"regex": "z"}})  # fmt: skip
    assert job.num_refused == 1
    found = [(row.error_code, row.sampling) for row in requests_of(database, job.job_id)]
    assert [code for code, _ in found] == [None, None, None, None, "invalid_sampling", None]
    loaded = [row.sampling for row in results.load(database, acquire(database)).rows]
    loaded += [row.sampling for row in results.load(database, acquire(database)).rows]
    assert [row.structured.model_dump(exclude_none=True) for row in loaded if row.structured] == [
        {"choice": ["x", "y"]}, {"json_schema": {"type": "integer"}}, {"regex": "z"}, {"regex": "z"}, {"regex": "z"}
    ]  # fmt: skip


def test_log_probabilities_are_exported_when_asked_for(database: Database, settings: Settings, tmp_path: Path) -> None:
    job_id = submit_table(database, settings, {"prompt": ["one", "two"]}).job_id
    told = [{"token": "a\0", "logprob": -0.5, "top": [{"token": "a", "logprob": -0.5}]}]

    def answer(row: results.PendingRow) -> results.RowResult:
        own = {"logprobs": json.dumps(told), "cached_tokens": 2} if row.row_index else {}
        return results.RowResult(row.request_id, (replace(sample("a"), **own),))

    drain(database, answer)
    plain, full, lines = (tmp_path / name for name in ("plain.parquet", "full.parquet", "full.jsonl"))
    export_job(database, settings, job_id, plain)
    export_job(database, settings, job_id, full, with_logprobs=True, with_trees=True)
    export_job(database, settings, job_id, lines, format="jsonl", with_logprobs=True)
    assert LOGPROBS_FIELD.name not in pq.read_schema(plain).names
    table = pq.read_table(full)
    assert table.schema.names[-2:] == [LOGPROBS_FIELD.name, TREE_FIELD.name]
    assert table["forq_logprobs"].to_pylist() == [None, told]
    assert table["forq_cached_tokens"].to_pylist() == [None, 2]
    assert [json.loads(line)["forq_logprobs"] for line in lines.read_text().splitlines()] == [None, told]


def test_the_hit_rate_counts_prompts_whose_engine_says_what_its_cache_served(
    database: Database, settings: Settings
) -> None:
    job_id = submit_table(database, settings, {"prompt": ["one", "two", "three"]}).job_id
    cached = [None, 0, 6]

    def answer(row: results.PendingRow) -> results.RowResult:
        reply = replace(sample("a", prompt_tokens=8), cached_tokens=cached[row.row_index])
        return results.RowResult(row.request_id, (reply,))

    drain(database, answer)
    stats = service.job_stats(database, job_id)
    assert (stats["prompt_tokens"], stats["cached_prompt_tokens"]) == (24, 6)
    assert stats["prefix_cache_hit_rate"] == round(6 / 16, 4)
