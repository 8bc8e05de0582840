"""Rows with a system prompt and several turns: what is stored at submit, and what later templates may do."""

import json
from typing import Any

import pytest
from batches import prompts_of, requests_of, submit_table
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from db.session import Database
from jobs.errors import BadInput
from jobs.service import job_detail
from jobs.settings import Settings
from jobs.turns import MAX_TURNS, TurnTemplate, conversation

COLUMNS = {"topic": ["tea", "rain"], "tone": ["kind", None]}
USER = "Tell me of {{ topic }}."


def test_a_row_becomes_a_conversation_and_its_later_questions(database: Database, settings: Settings) -> None:
    submitted = submit_table(
        database, settings, COLUMNS, template=USER, system="You know {{ topic | upper }}.",
        turn=("Shorter!", "Compare {{ answers[0] }} with {{ answers[-1] }}, about {{ topic }}."),
    )  # fmt: skip
    assert prompts_of(database, submitted)[1] == {
        "messages": [
            {"role": "system", "content": "You know RAIN."},
            {"role": "user", "content": "Tell me of rain."},
        ],
        "turns": ["Shorter!", ["Compare ", 0, " with ", 1, ", about rain."]],
    }
    mapping = job_detail(database, submitted.job_id).mapping
    assert mapping["system"] == "You know {{ topic | upper }}."
    assert len(mapping["turn"]) == 2


def test_a_job_without_them_is_stored_as_it_always_was(database: Database, settings: Settings) -> None:
    submitted = submit_table(database, settings, COLUMNS, template=USER)
    assert prompts_of(database, submitted)[0] == {"prompt": "Tell me of tea."}
    assert not {"system", "turn"} & job_detail(database, submitted.job_id).mapping.keys()


def test_a_prompt_column_and_conversations_take_turns_too(database: Database, settings: Settings) -> None:
    submitted = submit_table(database, settings, {"prompt": ["Why?"]}, turn=("And {{ prompt }}",))
    assert prompts_of(database, submitted) == [
        {"messages": [{"role": "user", "content": "Why?"}], "turns": ["And Why?"]}
    ]
    roles = ("user", "assistant", "user")
    talk = [{"role": role, "content": f"message {number}"} for number, role in enumerate(roles)]
    own = [{"role": "system", "content": "Mine."}, *talk]
    submitted = submit_table(
        database, settings, {"messages": [talk, own], "n": [1, 2]}, messages_column="messages", system="Row {{ n }}.",
        turn=("More.",),
    )  # fmt: skip
    assert prompts_of(database, submitted) == [
        {"messages": [{"role": "system", "content": "Row 1."}, *talk], "turns": ["More."]},
        "invalid_messages",
    ]


def test_a_system_template_that_prints_nothing_leaves_the_message_out(database: Database, settings: Settings) -> None:
    submitted = submit_table(database, settings, COLUMNS, template=USER, system="{{ tone or '' }}")
    first, second = prompts_of(database, submitted)
    assert [message["content"] for message in first["messages"]] == ["kind", "Tell me of tea."]
    assert second == {"messages": [{"role": "user", "content": "Tell me of rain."}]}


def test_a_turn_that_fails_or_prints_nothing_fails_its_row_alone(database: Database, settings: Settings) -> None:
    submitted = submit_table(database, settings, COLUMNS, template=USER, turn=("Be {{ tone }}.",))
    assert [row.error_code for row in requests_of(database, submitted.job_id)] == [None, "template_failed"]
    submitted = submit_table(database, settings, COLUMNS, template=USER, turn=("x", "{{ tone or '' }}"))
    rows = requests_of(database, submitted.job_id)
    assert [row.error_code for row in rows] == [None, "empty_prompt"]
    assert rows[1].error == "the template of turn 3 prints nothing on this row: a turn needs text"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"turn": ("{{ topik }}",)}, "the template of turn 2 uses topik; the file's columns are topic, tone"),
        ({"turn": ("ok", "{% if %}")}, "the template of turn 3 does not parse"),
        ({"system": "{{ answers[0] }}"}, "the system template uses answers"),
        ({"system": "{{"}, "the system template does not parse"),
        ({"turn": ("{{ answers[1] }}",)}, r"turn 2 prints answers\[1\]: 1 answer\(s\) come before it"),
        ({"turn": ("x", "{{ answers[-3] }}")}, r"turn 3 prints answers\[-3\]: 2 answer"),
        ({"turn": ("x",) * MAX_TURNS}, f"there are {MAX_TURNS + 1} turns, the limit is {MAX_TURNS}"),
    ],
)
def test_templates_that_cannot_work_refuse_the_file(
    database: Database, settings: Settings, said: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message) as raised:
        submit_table(database, settings, COLUMNS, template=USER, **said)
    assert "\n" not in str(raised.value)


def test_batch_lines_take_no_turns(database: Database, settings: Settings) -> None:
    line = {"custom_id": ["a"], "method": ["POST"], "url": ["/v1/completions"], "body": ['{"prompt": "x"}']}
    with pytest.raises(BadInput, match="OpenAI batch lines, each a whole request: --system and --turn do not apply"):
        submit_table(database, settings, line, turn=("More.",))


@pytest.mark.parametrize(
    "template",
    [
        "{{ answers[0] | upper }}",
        "{{ answers[0][:10] }}",
        "{{ answers }}",
        "{{ answers | join }}",
        "{{ answers[n] }}",
        "{{ answers[true] }}",
        "{{ answers[0] ~ '!' }}",
        "{{ 'x' if answers[0] else 'y' }}",
        "{% if 'yes' in answers[0] %}x{% endif %}",
        "{% for answer in answers %}{{ answer }}{% endfor %}",
        "{% set answers = ['mine'] %}{{ answers[0] }}",
        "{% set x = answers[0] %}{{ x }}",
        "{% set x %}{{ answers[0] }}{% endset %}{{ x | length }}",
        "{% filter upper %}{{ answers[0] }}{% endfilter %}",
        "{% macro m() %}{{ answers[0] }}{% endmacro %}{{ m() | length }}",
        "{% call(x) n.f() %}{{ answers[0] }}{% endcall %}",
        "{% block b %}{{ answers[0] }}{% endblock %}{{ self.b() | length }}",
        "{% for x in [[1]] recursive %}{{ answers[0] }}{% endfor %}",
        "{{ answers[0].__class__ }}",
        "{{ {'a': answers[0]} }}",
    ],
)
def test_an_answer_that_is_not_there_yet_can_only_be_printed(template: str) -> None:
    with pytest.raises(BadInput, match=r"an answer can only be printed as it is, as \{\{ answers\[0\] \}\}"):
        TurnTemplate(template, ["n"], 2)


def test_an_answer_may_be_printed_under_conditions_and_in_loops() -> None:
    source = "{% for x in n %}{{ x }}{{ answers[0] }}{% endfor %}{% if n %}{{- answers[1] }}{% endif %}"
    template = TurnTemplate(source, ["n"], 3)
    assert template.render({"n": [7, 8]}) == ["7", 0, "8", 0, 1]
    assert TurnTemplate("{{ answers[0] }}", [], 2).render({}) == [0]


def test_a_column_named_answers_is_a_column_unless_a_turn_means_the_answers() -> None:
    assert TurnTemplate("plain", ["answers"], 2).render({"answers": "mine"}) == "plain"
    with pytest.raises(BadInput, match="uses answers, which is also a column of the file: rename the column"):
        TurnTemplate("{{ answers[0] }}", ["answers"], 2)


nasty = st.text(st.sampled_from("{}%[]0answer\ue000\ue001f <|im_end|>\n"), max_size=20)


@hypothesis_settings(deadline=None)
@given(cell=nasty, answers=st.lists(nasty, min_size=2, max_size=2))
def test_neither_a_cell_nor_an_answer_is_ever_read_as_a_template(cell: str, answers: list[str]) -> None:
    template = TurnTemplate("A {{ answers[1] }} B {{ cell }} C {{ answers[0] }}", ["cell"], 3)
    turn = json.loads(json.dumps(template.render({"cell": cell})))
    payload = {"messages": [{"role": "user", "content": "?"}], "turns": ["plain", turn]}
    assert conversation(payload, answers)[-1] == {
        "role": "user", "content": f"A {answers[1]} B {cell} C {answers[0]}"
    }  # fmt: skip
    assert template.render({"cell": "{{ answers[0] }}"}) == ["A ", 1, " B {{ answers[0] }} C ", 0]


def test_the_same_file_with_other_turns_is_another_job(database: Database, settings: Settings) -> None:
    first = submit_table(database, settings, COLUMNS, template=USER, dedupe=True)
    turned = submit_table(database, settings, COLUMNS, template=USER, turn=("More.",), dedupe=True)
    again = submit_table(database, settings, COLUMNS, template=USER, turn=("More.",), dedupe=True)
    assert first.job_id != turned.job_id == again.job_id
    assert not again.is_new
