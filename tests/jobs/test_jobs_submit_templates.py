"""Prompts made by templates: what they may do, and which row fails."""

import pyarrow as pa
import pytest
from batches import prompts_of, raw_strings, requests_of, submit_table

from db.session import Database
from jobs.errors import BadInput
from jobs.settings import Settings

BAD_UTF8 = b"caf\xe9"


def test_a_template_renders_each_row(database: Database, settings: Settings) -> None:
    columns = {
        "city": ["Rome", "Oslo"],
        "n": [1, 2],
        "tags": [["a", "b"], []],
        "at": pa.array([1, 2], pa.timestamp("ns")),
    }
    template = "{{ n }}. {{ city | upper }}{% for tag in tags %} #{{ tag }}{% endfor %} {{ at }}\n"
    submitted = submit_table(database, settings, columns, template=template)
    assert prompts_of(database, submitted) == [
        {"prompt": "1. ROME #a #b 1970-01-01 00:00:00.000000001\n"},
        {"prompt": "2. OSLO 1970-01-01 00:00:00.000000002\n"},
    ]


def test_a_template_that_fails_on_a_row_fails_that_row(database: Database, settings: Settings) -> None:
    columns = {"values": [[1, 2], [], None, [3]]}
    submitted = submit_table(database, settings, columns, template="first: {{ values | sum // values | length }}")
    assert prompts_of(database, submitted) == [
        {"prompt": "first: 1"}, "template_failed", "template_failed", {"prompt": "first: 3"}
    ]  # fmt: skip


def test_an_error_that_quotes_the_row_is_stored_whatever_the_row_holds(database: Database, settings: Settings) -> None:
    columns = {"text": ["a\x00b", "line\nbreak", "x" * 5000, "good"]}
    template = "{% if text != 'good' %}{{ cycler(1)[text].format(text) }}{{ {}[text].x }}{% endif %}{{ text }}"
    submitted = submit_table(database, settings, columns, template=template)
    rows = requests_of(database, submitted.job_id)
    assert [row.error_code for row in rows] == ["template_failed"] * 3 + [None]
    assert all(len(row.error) <= 1000 and "\n" not in row.error and "\x00" not in row.error for row in rows[:3])


def test_invalid_utf8_fails_the_template_of_its_row_alone(database: Database, settings: Settings) -> None:
    columns = {"text": raw_strings([b"good", BAD_UTF8]), "unused": raw_strings([BAD_UTF8, BAD_UTF8])}
    submitted = submit_table(database, settings, columns, template="Q: {{ text }}")
    assert prompts_of(database, submitted) == [{"prompt": "Q: good"}, "invalid_text"]


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__'] }}",
        "{{ (prompt | attr('__class__')).__name__ }}",
        "{{ '%s' | format(prompt.__init__.__globals__) }}",
        "{{ '{0.__class__}'.format(prompt) }}",
        "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
        "{{ 'x' * 10**10 }}",
        "{{ [prompt] * 99999999 }}",
        "{{ 10**10**10 }}",
        "{{ range(10**9) | list }}",
        "{% include 'secrets' %}",
    ],
)
def test_a_template_cannot_reach_out_of_its_sandbox(database: Database, settings: Settings, template: str) -> None:
    submitted = submit_table(database, settings, {"prompt": ["a"]}, template=template)
    assert prompts_of(database, submitted) == ["template_failed"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ promt }}", "the template uses promt; the file's columns are prompt"),
        ("{{ prompt", "does not parse"),
        ("{{ prompt | nofilter }}", "does not parse"),
        ("{% if %}", "does not parse"),
        ("{{ " + "(" * 5000 + " }}", "does not parse"),
        ("x" * ((1 << 20) + 1), "the limit is 1048576"),
    ],
    ids=["column", "open", "filter", "if", "nested", "long"],
)
def test_a_template_that_can_never_work_is_refused_at_submit(
    database: Database, settings: Settings, template: str, message: str
) -> None:
    with pytest.raises(BadInput) as caught:
        submit_table(database, settings, {"prompt": ["a"]}, template=template)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_arithmetic_in_a_template_still_works(database: Database, settings: Settings) -> None:
    submitted = submit_table(
        database, settings, {"n": [3]}, template="{{ n * 2 }} {{ n ** 2 }} {{ '-' * n }} {{ n * 1.5 }}"
    )
    assert prompts_of(database, submitted) == [{"prompt": "6 9 --- 4.5"}]
