"""Sampling values of a job and of its rows: which are refused, and which win."""

import json
from typing import Any

import pyarrow as pa
import pytest
from batches import MODEL, acquire, requests_of, submit_table

from db.session import Database
from jobs import results
from jobs.errors import BadInput
from jobs.settings import Settings
from jobs.submit import SubmitOptions, check_options

BAD_UTF8 = b"caf\xe9"


BAD_SAMPLING: list[tuple[str, Any, str]] = [
    ("temperature", float("nan"), "temperature: must be a finite number, not nan"),
    ("temperature", float("inf"), "temperature"),
    ("temperature", -0.1, "temperature is -0.1: it should be greater than or equal to 0"),
    ("temperature", 2.1, "temperature is 2.1: it should be less than or equal to 2"),
    ("temperature", True, "temperature: must be a number, not true or false"),
    ("top_p", 0.0, "top_p is 0.0: it should be greater than 0"),
    ("top_p", 1.01, "top_p is 1.01: it should be less than or equal to 1"),
    ("top_p", float("-inf"), "top_p"),
    ("max_tokens", 0, "max_tokens is 0: it should be greater than or equal to 1"),
    ("max_tokens", -5, "max_tokens is -5"),
    ("max_tokens", 128.5, "max_tokens: must be a whole number, not 128.5"),
    ("max_tokens", float("nan"), "max_tokens: must be a whole number, not nan"),
    ("max_tokens", float("inf"), "max_tokens: must be a whole number, not inf"),
    ("max_tokens", True, "max_tokens: must be a number, not true or false"),
    (
        "max_tokens",
        10**9,
        "max_tokens is 1000000000, the limit is 131072: ask for fewer or raise limits.max_max_tokens",
    ),
    ("n", 0, "n is 0"),
    ("n", 65, "n is 65, the limit is 64: ask for fewer samples or raise limits.max_n"),
    ("seed", -1, "seed is -1"),
    ("top_k", -2, "top_k is -2"),
    ("min_p", 1.5, "min_p is 1.5"),
    ("repetition_penalty", 0.0, "repetition_penalty is 0.0"),
    ("presence_penalty", 2.5, "presence_penalty is 2.5"),
    ("stop", [""], "a stop string has 0 characters: 1 to 256 are allowed"),
    ("stop", ["x"] * 17, "stop has 17 strings, the limit is 16"),
    ("stop", ["x" * 257], "a stop string has 257 characters"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD_SAMPLING)
def test_a_rows_bad_sampling_value_fails_that_row_and_names_value_and_limit(
    database: Database, settings: Settings, name: str, value: Any, message: str
) -> None:
    sampling = pa.array([{name: value}, None, {name: None}])
    submitted = submit_table(database, settings, {"prompt": ["a", "b", "c"], "sampling": sampling})
    rows = requests_of(database, submitted.job_id)
    assert [row.error_code for row in rows] == ["invalid_sampling", None, None]
    assert message in rows[0].error
    assert rows[1].sampling is rows[2].sampling is None


@pytest.mark.parametrize(("name", "value", "message"), BAD_SAMPLING)
def test_a_bad_flag_is_refused_at_once(settings: Settings, name: str, value: Any, message: str) -> None:

    with pytest.raises(BadInput) as caught:
        check_options(settings, SubmitOptions(model=MODEL, sampling={name: value}))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_whole_numbers_written_as_floats_are_whole_numbers(database: Database, settings: Settings) -> None:
    sampling = pa.array([{"max_tokens": 128.0, "seed": 7.0, "temperature": 0.5}, {"max_tokens": None}])
    submitted = submit_table(database, settings, {"prompt": ["a", "b"], "sampling": sampling})
    row = requests_of(database, submitted.job_id)[0]
    assert json.loads(row.sampling) == {"max_tokens": 128, "seed": 7, "temperature": 0.5}


def test_a_rows_sampling_lies_over_the_jobs(database: Database, settings: Settings) -> None:

    sampling = pa.array([{"temperature": 0.0, "stop": ["\n"]}, None, {"temperature": None, "stop": None}])
    columns = {"prompt": ["a", "b", "c"], "sampling": sampling}
    submit_table(database, settings, columns, sampling={"temperature": 1.0, "max_tokens": 9})
    said = [row.sampling.said() for row in results.load(database, acquire(database)).rows]
    assert said == [
        {"temperature": 0.0, "max_tokens": 9, "stop": ["\n"]},
        {"temperature": 1.0, "max_tokens": 9},
        {"temperature": 1.0, "max_tokens": 9},
    ]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([{"temprature": 1.0}]), "unknown field(s) temprature"),
        (pa.array(["{}"]), "column 'sampling' has type string"),
    ],
)
def test_a_sampling_column_of_another_shape_refuses_the_file(
    database: Database, settings: Settings, column: pa.Array, message: str
) -> None:
    with pytest.raises(BadInput) as caught:
        submit_table(database, settings, {"prompt": ["a"], "sampling": column})
    assert message in str(caught.value)
