"""Conversations: what was asked, what was answered, in the words of each format."""

from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from jobs.dataset.formats import as_cell, conversation_field
from jobs.dataset.toml_text import toml_text
from jobs.turns import conversation

texts = st.text(max_size=12)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer"]), "content": texts}
    ),
    min_size=1,
    max_size=5,
)


@st.composite
def rows(draw: st.DrawFn) -> tuple[dict[str, Any], list[str]]:
    """A payload with later turns, some of which print earlier answers, and the answers of all of them."""
    asked = draw(messages)
    turns: list[Any] = []
    for number in range(draw(st.integers(0, 3))):
        part = texts.filter(bool) | st.integers(0, number)
        turns.append(draw(texts | st.lists(part, min_size=1, max_size=4)))
    answers = draw(st.lists(texts, min_size=len(turns) + 1, max_size=len(turns) + 1))
    return {"messages": asked, "turns": turns} if turns else {"messages": asked}, answers


@hypothesis_settings(deadline=None)
@given(rows())
def test_a_conversation_is_what_was_asked_with_every_answer_behind_its_question(
    row: tuple[dict[str, Any], list[str]],
) -> None:
    payload, answers = row
    found = conversation(payload, answers)
    assert found[: len(payload["messages"])] == payload["messages"]
    rest = found[len(payload["messages"]) :]
    assert [message["role"] for message in rest] == ["assistant", *["user", "assistant"] * (len(answers) - 1)]
    assert [message["content"] for message in rest if message["role"] == "assistant"] == answers
    for number, turn in enumerate(payload.get("turns", [])):
        parts = [turn] if isinstance(turn, str) else turn
        expected = "".join(answers[part] if isinstance(part, int) else part for part in parts)
        assert rest[2 * number + 1]["content"] == expected


@hypothesis_settings(deadline=None)
@given(rows())
def test_a_conversation_grows_by_an_answer_and_its_question(row: tuple[dict[str, Any], list[str]]) -> None:
    payload, answers = row
    whole = conversation(payload, answers)
    for number in range(len(answers)):
        begun = conversation(payload, answers[:number])
        assert whole[: len(begun)] == begun
        assert len(begun) == len(payload["messages"]) + 2 * number


def test_a_prompt_is_a_question() -> None:
    assert conversation({"prompt": "Why?"}, ["So."]) == [
        {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
    ]  # fmt: skip


@hypothesis_settings(deadline=None)
@given(messages)
def test_both_formats_hold_the_same_and_fit_their_columns(found: list[dict[str, str]]) -> None:
    cells = {name: as_cell(name, found) for name in ("messages", "sharegpt")}
    for name, cell in cells.items():
        assert pa.array([cell], conversation_field(name).type).to_pylist() == [cell]
    assert [cell["content"] for cell in cells["messages"]] == [cell["value"] for cell in cells["sharegpt"]]
    named = {"user": "human", "assistant": "gpt", "system": "system", "developer": "system", "tool": "tool"}
    assert [named[cell["role"]] for cell in cells["messages"]] == [cell["from"] for cell in cells["sharegpt"]]


scalars = st.text(max_size=30) | st.integers(-(2**63), 2**63 - 1) | st.booleans() | st.floats(allow_nan=False)
values = scalars | st.lists(scalars, max_size=3) | st.lists(st.text('"\\\n\r\t\x00\x7fé ', max_size=8), max_size=2)
keys = st.text("abc_-é. \"'", min_size=1, max_size=6)
inner = st.dictionaries(keys, scalars | st.dictionaries(keys, scalars, max_size=2), max_size=3)


@hypothesis_settings(deadline=None)
@given(st.dictionaries(keys, values | inner, max_size=5))
def test_toml_reads_back_as_what_was_written(found: dict[str, Any]) -> None:
    import tomllib

    assert tomllib.loads(toml_text(found)) == found


@hypothesis_settings(deadline=None)
@given(st.text('"\\\n\r\t\x00\x7fx', max_size=12))
def test_templates_of_any_quotes_and_lines_read_back(text: str) -> None:
    import tomllib

    assert tomllib.loads(toml_text({"template": text, "turn": [text, text + "\n"]})) == {
        "template": text, "turn": [text, text + "\n"]
    }  # fmt: skip


def test_what_is_none_is_left_out() -> None:
    assert toml_text({"a": None, "b": 1, "t": {"c": None, "d": "x"}}) == 'b = 1\n\n[t]\nd = "x"\n'
