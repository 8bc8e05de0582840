"""Rows that cannot be judged fail alone: cells that are not UTF-8, nulls, names without end, two failures alike."""

from pathlib import Path
from typing import Any

import pytest
from answer_files import Found, items_of
from batches import raw_strings, write_table

from jobs.errors import BadInput
from jobs.judging import pairs
from jobs.judging.items import MAX_NAME_CHARS, UNREADABLE
from jobs.judging.prompts import make_prompts
from jobs.judging.rubrics import Rubric, load_rubric
from jobs.judging.verdicts import pair_form, score_form

NOT_UTF8 = "byte 0 (0xff) is not valid UTF-8: write the text again as UTF-8"


def found_in(tmp_path: Path, kind: Any, columns: dict[str, Any], limit: int | None = None) -> Found:
    return items_of(write_table(tmp_path / "answers.parquet", columns), kind, {}, limit)


def models_of(found: Found) -> list[tuple[Any, ...]]:
    return [(item.model, item.model_b, item.row, item.row_b) for item in found.items]


def test_a_cell_that_is_not_utf8_fails_its_row_and_no_other(tmp_path: Path) -> None:
    columns = {"prompt": ["p", "q"], "response": ["r", "s"], "topic": raw_strings([b"maths", b"\xff"])}
    found = found_in(tmp_path, "pointwise", columns)
    rubric = Rubric("mine", "pointwise", 1, (1, 5), "", "{{ topic }}: {{ response }}").compile(found.names)
    prompts, errors = make_prompts(found.items, rubric, score_form(1, 5), (1,), True)
    assert [prompt.messages[0]["content"] for prompt in prompts] == ["maths: r"]
    assert errors == {1: f"column 'topic': {NOT_UTF8}"}


def test_a_rubric_is_checked_against_the_files_columns_even_if_every_cell_is_bad(tmp_path: Path) -> None:
    columns = {"prompt": ["p"], "response": ["r"], "topic": raw_strings([b"\xff"])}
    found = found_in(tmp_path, "pointwise", columns)
    compiled = Rubric("mine", "pointwise", 1, (1, 5), "", "{{ topic }}: {{ response }}").compile(found.names)
    assert compiled.uses == {"topic", "response"}
    with pytest.raises(BadInput, match=r"rubric mine uses topik; the file's columns are .*topic"):
        Rubric("mine", "pointwise", 1, (1, 5), "", "{{ topik }}").compile(found.names)


def test_what_the_rubric_does_not_use_may_be_anything(tmp_path: Path) -> None:
    columns = {"prompt": ["p"], "response": ["r"], "reference": raw_strings([None]), "model_a": ["x"]}
    assert found_in(tmp_path, "pointwise", columns).items[0].error is None


@pytest.mark.parametrize("role", ["id", "category", "model"])
def test_a_name_that_cannot_be_read_fails_its_row_and_no_other(tmp_path: Path, role: str) -> None:
    columns = {"prompt": ["p", "q"], "response": ["r", "s"], role: raw_strings([b"fine", b"\xff"])}
    first, second = found_in(tmp_path, "pointwise", columns).items
    assert (first.error, getattr(first, role)) == (None, "fine")
    assert second.error == f"column '{role}': {NOT_UTF8}"
    assert getattr(second, role) == (UNREADABLE if role == "model" else None)
    long = {**columns, role: ["fine", "x" * (MAX_NAME_CHARS + 1)]}
    _, second = found_in(tmp_path, "pointwise", long).items
    assert second.error == f"column '{role}': the name has 1001 characters, the limit is 1000: shorten it"


def test_half_of_a_surrogate_pair_fails_its_row_and_no_other(tmp_path: Path) -> None:
    turns = '[{"role": "user", "content": "%s"}, {"role": "assistant", "content": "r"}'
    texts = [f"{turns % said}, {(turns % 'q')[1:]}]" for said in ("p", "\\ud800")]
    found = found_in(tmp_path, "pointwise", {"messages": texts})
    rubric = load_rubric(None, "pointwise", 2, None).compile(found.names)
    prompts, errors = make_prompts(found.items, rubric, score_form(1, 5), (2,), True)
    assert [prompt.item for prompt in prompts] == [0]
    assert errors == {1: "the prompt would hold half of a surrogate pair: write valid Unicode"}


def conversation(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer},
            {"role": "user", "content": "then?"}, {"role": "assistant", "content": f"{answer} {answer}"}]  # fmt: skip


def test_conversations_without_ids_are_paired_by_their_questions(tmp_path: Path) -> None:
    said = [("p", "1"), ("q", "2"), ("q", "3"), ("p", "4")]
    broken = [{"role": "user", "content": "p"}]
    columns = {
        "messages": [*(conversation(*one) for one in said), broken, broken],
        "model": ["x", "x", "y", "y", "x", "x"],
    }
    found = found_in(tmp_path, "pairwise", columns)
    assert models_of(found) == [("x", "y", 0, 3), ("x", "y", 1, 2)]
    assert found.num_unpaired == 2
    rubric = load_rubric(None, "pairwise", 2, None).compile(found.names)
    prompts, errors = make_prompts(found.items, rubric, pair_form(), (2,), False)
    assert not errors
    text = prompts[0].messages[-1]["content"]
    assert all(f"\n{said}\n" in text for said in ("p", "then?", "1", "1 1", "4", "4 4"))


def test_conversations_whose_second_questions_differ_are_not_compared(tmp_path: Path) -> None:
    other = [*conversation("p", "2")[:2], {"role": "user", "content": "why?"}, {"role": "assistant", "content": "2"}]
    columns = {"messages": [conversation("p", "1"), other], "model": ["x", "y"], "id": [1, 1]}
    (item,) = found_in(tmp_path, "pairwise", columns).items
    assert item.error == "the two answers' prompts differ although their ids are the same"


def test_rows_without_a_question_stand_alone_and_are_counted(tmp_path: Path) -> None:
    columns = {"model": ["x", "x", "y", "x", "y", "None"], "prompt": [None, None, None, "p", "p", "None"],
               "response": list("abcdef")}  # fmt: skip
    found = found_in(tmp_path, "pairwise", columns)
    assert models_of(found) == [("x", "y", 3, 4)]
    assert found.num_unpaired == 4


def test_an_answer_that_is_null_is_still_its_questions_and_takes_no_other_answers_place(tmp_path: Path) -> None:
    columns = {"model": ["x", "x", "y", "x", "y"], "prompt": ["p", "p", "p", "q", "q"],
               "response": [None, "again", "y", None, "y"]}  # fmt: skip
    found = found_in(tmp_path, "pairwise", columns)
    assert models_of(found) == [("x", "y", 1, 2), ("x", "y", 3, 4)]
    assert [item.error for item in found.items] == [None, "column 'response' is null: it must be text to be judged"]
    assert found.num_unpaired == 1


def test_rows_with_names_that_cannot_be_read_are_in_no_pair_and_are_counted(tmp_path: Path) -> None:
    columns = {"prompt": ["p"] * 4, "response": ["r"] * 4, "model": raw_strings([b"x", b"\xff", b"\xff", b"y"])}
    found = found_in(tmp_path, "pairwise", columns)
    assert (models_of(found), found.num_unpaired) == ([("x", "y", 0, 3)], 2)
    columns = {"prompt": ["p"] * 4, "response": ["r"] * 4, "model": ["x", "x", "x", "y"]}
    ids = raw_strings([b"\xff", b"\xff", b"1", b"1"])
    found = found_in(tmp_path, "pairwise", {**columns, "id": ids})
    assert (models_of(found), found.num_unpaired) == ([("x", "y", 2, 3)], 2)


def test_a_limit_is_of_questions_whatever_is_wrong_with_their_rows(tmp_path: Path) -> None:
    columns = {
        "id": [1, 1, 2, 2, 3, 3],
        "model": ["x", "y"] * 3,
        "prompt": [None] * 4 + ["p"] * 2,
        "response": ["r"] * 6,
    }
    assert [item.id for item in found_in(tmp_path, "pairwise", columns, limit=2).items] == ["1", "2"]
    without = {**columns, "prompt": [f"p{n // 2}" for n in range(6)], "response": [None] * 6}
    del without["id"]
    assert [item.row for item in found_in(tmp_path, "pairwise", without, limit=2).items] == [0, 2]


def test_too_many_pairs_are_refused_before_they_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"prompt": ["p"] * 5 + ["q"] * 5, "response": ["r"] * 10, "model": list("abcdeabcde")}
    monkeypatch.setattr(pairs, "MAX_ROWS", 10)
    assert len(found_in(tmp_path, "pairwise", columns, limit=1).items) == 10
    monkeypatch.setattr(pairs, "_pair", None)
    with pytest.raises(BadInput, match=r"its 2 question\(s\) make 20 pairs, the limit is 10: judge fewer .* --limit"):
        found_in(tmp_path, "pairwise", columns)


def test_a_pairs_rubric_cannot_name_what_is_one_answers_alone(tmp_path: Path) -> None:
    found = found_in(tmp_path, "pairwise", {"prompt": ["p"] * 2, "response": ["r", "s"], "model": ["x", "y"]})
    for name in ("response", "model"):
        with pytest.raises(BadInput, match=f"uses {name}"):
            Rubric("mine", "pairwise", 1, (1, 5), "", f"{{{{ {name} }}}}").compile(found.names)
