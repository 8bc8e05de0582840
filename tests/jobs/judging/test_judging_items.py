"""From a file to items and prompts: columns, pairs, turns, rubrics, and the order of the prompts."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from answer_files import items_of

from jobs.errors import BadInput
from jobs.judging.prompts import make_prompts
from jobs.judging.rubrics import VARIABLES, Kind, bundled, load_rubric, parse_scale
from jobs.judging.verdicts import pair_form, score_form

TWO_TURNS = {
    "prompt": ["p1", "q1"], "response": ["r1", "s1"], "prompt_2": ["p2", "q2"], "response_2": ["r2", "s2"],
    "reference": ["f1", "g1"], "reference_2": ["f2", "g2"], "model": ["x", "y"],
}  # fmt: skip


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def writing(columns: dict[str, Any]) -> Path:
        path = tmp_path / "answers.parquet"
        pq.write_table(pa.table(columns), path)
        return path

    return writing


def test_a_file_of_answers_is_an_item_per_row(write: Any) -> None:
    columns = {"prompt": ["p", "q"], "response": ["r", "s"], "model": ["x", "y"], "category": ["a", None]}
    found = items_of(write({**columns, "question_id": [1, 2]}), "pointwise", {})
    assert [(item.row, item.id, item.model, item.category) for item in found.items] == [
        (0, "1", "x", "a"), (1, "2", "y", None)
    ]  # fmt: skip
    assert (found.num_turns, found.num_rows) == (1, 2)


def test_an_export_of_this_service_can_be_judged_as_it_is(write: Any) -> None:
    found = items_of(write({"prompt": ["p"], "forq_output": ["r"], "forq_steps": [3]}), "pointwise", {})
    assert found.items[0].values["response"] == "r"
    assert "forq_steps" not in found.items[0].values


def test_columns_can_be_named(write: Any) -> None:
    path = write({"question": ["p"], "text": ["r"], "gold": ["g"]})
    found = items_of(path, "reference", {"prompt": "question", "response": "text", "reference": "gold"})
    values = found.items[0].values
    assert (values["prompt"], values["response"], values["reference"]) == ("p", "r", "g")


def test_a_row_without_an_answer_is_an_item_with_an_error(write: Any) -> None:
    found = items_of(write({"prompt": ["p", "q", None], "response": ["r", None, "t"]}), "pointwise", {})
    assert [item.error is None for item in found.items] == [True, False, False]
    assert found.items[1].error == "column 'response' is null: it must be text to be judged"


def test_answers_of_several_models_are_paired_by_question(write: Any) -> None:
    path = write({
        "question_id": [1, 2, 1, 2, 1], "model": ["x", "x", "y", "y", "z"], "prompt": ["p", "q", "p", "q", "p"],
        "response": ["px", "qx", "py", "qy", "pz"],
    })  # fmt: skip
    found = items_of(path, "pairwise", {})
    pairs = [(item.id, item.model, item.model_b, item.row, item.row_b) for item in found.items]
    assert pairs == [("1", "x", "y", 0, 2), ("1", "x", "z", 0, 4), ("1", "y", "z", 2, 4), ("2", "x", "y", 1, 3)]
    first = found.items[0].values
    assert (first["prompt"], first["response_a"], first["response_b"]) == ("p", "px", "py")
    assert len(items_of(path, "pairwise", {}, limit=1).items) == 3


def test_pairs_without_ids_are_found_by_their_prompts_and_what_is_alone_is_counted(write: Any) -> None:
    found = items_of(write({"model": ["x", "y", "x"], "prompt": ["p", "p", "q"], "response": ["1", "2", "3"]}),
                       "pairwise", {})  # fmt: skip
    assert len(found.items) == 1
    assert found.num_unpaired == 1


def test_ready_pairs_are_taken_as_they_are(write: Any) -> None:
    columns = {"prompt": ["p"], "response_a": ["1"], "response_b": ["2"], "model_a": ["x"], "model_b": ["y"]}
    found = items_of(write(columns), "pairwise", {})
    (item,) = found.items
    assert (item.model, item.model_b, item.row_b, item.values["response_b"]) == ("x", "y", None, "2")


@pytest.mark.parametrize(
    ("columns", "kind", "names", "message"),
    [
        ({"prompt": ["p"]}, "pointwise", {}, "no column for response: name it like --column response=NAME"),
        ({"prompt": ["p"], "response": ["r"]}, "reference", {}, "no column for reference"),
        ({"prompt": ["p"], "response": ["r"]}, "pairwise", {}, "no column for model"),
        ({"prompt": ["p"], "response": ["r"]}, "pointwise", {"prompt": "x"}, "for prompt: .* has no column 'x'"),
        ({"prompt": ["p"], "response": ["r"]}, "pointwise", {"answer": "prompt"}, "there is no such role"),
        (
            {"prompt": ["p", "p"], "response": ["r", "s"], "model": ["x", "x"]},
            "pairwise",
            {},
            "rows 0 and 1 are answers",
        ),
        ({"prompt": ["p", "q"], "response": ["r", "s"], "model": ["x", "y"]}, "pairwise", {}, "nothing can be paired"),
        ({"prompt": ["p"], "response": ["r"], "model": pa.array([None], pa.string())}, "pairwise", {}, "has no model"),
        ({"prompt": pa.array([], pa.string())}, "pointwise", {}, "has 0 rows"),
        ({"prompt": ["p"], "response": ["r"], "prompt_2": ["p"]}, "pointwise", {}, "no column for response_2"),
        ({"prompt": ["p"], "response": ["r"], "category": ["all"]}, "pointwise", {}, "a category is called 'all'"),
        (
            {"prompt": ["p", "p"], "response": ["r", "s"], "model": ["x", "y"], "id": [1, 2]},
            "pairwise",
            {},
            "questions are told apart by column 'id': name another column with --column id=NAME",
        ),
    ],
)
def test_a_file_that_cannot_be_judged_is_refused_with_what_it_lacks(
    write: Any, columns: dict[str, Any], kind: Any, names: dict[str, str], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        items_of(write(columns), kind, names)


def test_two_turns_come_from_columns_or_from_conversations(write: Any) -> None:
    from_columns = items_of(write(TWO_TURNS), "pointwise", {}).items[0].values["turns"]
    messages = [[{"role": "system", "content": "be kind"}, {"role": "user", "content": "p1"},
                 {"role": "assistant", "content": "r1"}, {"role": "user", "content": "p2"},
                 {"role": "assistant", "content": "r2"}],
                [{"role": "user", "content": "p1"}]]  # fmt: skip
    found = items_of(write({"messages": messages}), "pointwise", {})
    assert found.num_turns == 2
    assert [(turn["prompt"], turn["response"]) for turn in from_columns] == [("p1", "r1"), ("p2", "r2")]
    assert [(turn["prompt"], turn["response"]) for turn in found.items[0].values["turns"]] == [
        ("p1", "r1"),
        ("p2", "r2"),
    ]
    assert found.items[1].error == "the conversation is not two questions, each with an answer behind it"


@pytest.mark.parametrize("name", bundled())
def test_every_rubric_of_ours_shows_all_it_is_given_and_ends_with_how_to_reply(write: Any, name: str) -> None:
    kind = name.removesuffix("-two-turn")
    num_turns = 2 if name.endswith("-two-turn") else 1
    columns = dict(TWO_TURNS)
    if num_turns == 1:
        columns = {key: value for key, value in columns.items() if not key.endswith("_2")}
    if kind == "pairwise":
        columns = {**columns, "prompt": ["p1", "p1"]} | ({"prompt_2": ["p2", "p2"]} if num_turns == 2 else {})
    items = items_of(write(columns), kind, {})
    rubric = load_rubric(name, kind, num_turns, None)
    form = pair_form() if kind == "pairwise" else score_form(*rubric.scale)
    prompts, errors = make_prompts(
        items.items, rubric.compile(items.names), form, tuple(range(1, num_turns + 1)), ordered=False
    )
    assert not errors
    assert len(prompts) == num_turns * 2
    for prompt in prompts[: num_turns * (2 if kind == "pairwise" else 1)]:
        system, user = prompt.messages
        assert (system["role"], user["role"]) == ("system", "user")
        shown = {"pointwise": ["p", "r"], "reference": ["p", "r", "f"], "pairwise": ["p", "r", "s"]}[kind]
        for letter in shown:
            for turn in range(1, num_turns + 1):
                assert f"\n{letter}{turn}\n" in user["content"]
        assert user["content"].endswith(form.instruction())
        if num_turns == 2:
            assert f"{prompt.turn}. Reply" in user["content"]


def test_the_second_order_of_a_pair_shows_the_answers_the_other_way_round(write: Any) -> None:
    items = items_of(write({"prompt": ["p"], "response_a": ["from a"], "response_b": ["from b"]}), "pairwise", {})
    rubric = load_rubric(None, "pairwise", 1, None).compile(items.names)
    prompts, _ = make_prompts(items.items, rubric, pair_form(), (1,), ordered=False)
    texts = {prompt.order: prompt.messages[-1]["content"] for prompt in prompts}
    assert texts["ab"].index("from a") < texts["ab"].index("from b")
    assert texts["ba"].index("from b") < texts["ba"].index("from a")
    assert texts["ab"].replace("from a", "X").replace("from b", "from a").replace("X", "from b") == texts["ba"]


def test_ordering_puts_prompts_with_a_longer_common_prefix_side_by_side_and_loses_none(write: Any) -> None:
    questions, models = [f"question {n}?" for n in (3, 1, 2)], ["x", "y", "z"]
    rows = [(q, m) for m in models for q in questions]
    path = write(
        {"prompt": [q for q, _ in rows], "model": [m for _, m in rows], "response": [f"{m} says" for _, m in rows]}
    )
    items = items_of(path, "pairwise", {})
    rubric = load_rubric(None, "pairwise", 1, None)
    ordered, _ = make_prompts(items.items, rubric.compile(items.names), pair_form(), (1,), ordered=True)
    as_read, _ = make_prompts(items.items, rubric.compile(items.names), pair_form(), (1,), ordered=False)
    key = lambda prompt: (prompt.item, prompt.order)  # noqa: E731
    assert sorted(map(key, ordered)) == sorted(map(key, as_read))
    assert [key(prompt) for prompt in as_read] == sorted(map(key, as_read))

    def shared(prompts: list[Any]) -> int:
        texts = [prompt.messages[-1]["content"] for prompt in prompts]
        return sum(next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), 0)
                   for one, two in pairwise(texts))  # fmt: skip

    assert shared(ordered) > shared(as_read)
    by_question = [items.items[prompt.item].values["prompt"] for prompt in ordered]
    assert by_question == sorted(by_question)


def test_a_rubric_of_ones_own_may_use_the_files_columns_and_says_its_scale(write: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'kind = "pointwise"\nscale = [0, 3]\nprompt = "{{ topic }}: {{ prompt }} / {{ response }} {{ reply }}"\n'
    )
    items = items_of(write({"prompt": ["p", "p"], "response": ["r", "r"], "topic": ["t", None]}), "pointwise", {})
    rubric = load_rubric(str(file), "pointwise", 1, None)
    assert rubric.scale == (0, 3)
    assert load_rubric(str(file), "pointwise", 1, (1, 10)).scale == (1, 10)
    prompts, errors = make_prompts(items.items, rubric.compile(items.names), score_form(0, 3), (1,), ordered=True)
    assert prompts[0].messages[0]["content"].startswith("t: p / r Reply with a whole number from 0 to 3")
    assert "null" in errors[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind = ", "not valid TOML"),
        ('kind = "pointwise"', "prompt: Field required"),
        ('kind = "pointwise"\nprompt = ""', "prompt: String should have at least 1 character"),
        ('kind = "other"\nprompt = "x"', "kind: Input should be"),
        ('kind = "pairwise"\nprompt = "x"', "is pairwise, --kind is pointwise"),
        ('kind = "pointwise"\nturns = 2\nprompt = "x"', "judges 2 turn"),
        ('kind = "pointwise"\nscale = [5, 1]\nprompt = "x"', "the scale is 5-1"),
        ('kind = "pointwise"\nscale = [1, 1000]\nprompt = "x"', "end at 100 or below"),
        ('kind = "pointwise"\nprompt = "x"\ncolour = 1', "colour: Extra inputs"),
    ],
)
def test_a_rubric_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(BadInput, match=message) as refused:
        load_rubric(str(file), "pointwise", 1, None)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "prompt", "missing"),
    [("pointwise", "{{ prompt }}", "response"), ("pairwise", "{{ response_b }}", "response_a")],
)
def test_a_rubric_that_shows_nothing_to_judge_is_refused(tmp_path: Path, kind: Kind, prompt: str, missing: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'kind = "{kind}"\nprompt = "{prompt}"')
    with pytest.raises(BadInput, match=f"rubric mine does not show the judge {missing}: write"):
        load_rubric(str(file), kind, 1, None).compile(VARIABLES[kind])


@pytest.mark.parametrize("prompt", ["{{ nothing }}", "{% for %}", "{{ ''.__class__.__mro__ }}", "{{ 'a' * 10**9 }}"])
def test_a_rubric_cannot_reach_out_of_its_sandbox(write: Any, tmp_path: Path, prompt: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'kind = "pointwise"\nprompt = "{prompt}"\n')
    items = items_of(write({"prompt": ["p"], "response": ["r"]}), "pointwise", {})
    try:
        rubric = load_rubric(str(file), "pointwise", 1, None).compile(items.names)
        prompts, errors = make_prompts(items.items, rubric, score_form(1, 5), (1,), True)
    except BadInput:
        return
    assert not prompts
    assert set(errors) == {0}


def test_what_an_answer_says_in_braces_is_not_rendered(write: Any) -> None:
    items = items_of(write({"prompt": ["p"], "response": ["{{ reply }} {% raw %}"]}), "pointwise", {})
    rubric = load_rubric(None, "pointwise", 1, None).compile(items.names)
    prompts, _ = make_prompts(items.items, rubric, score_form(1, 5), (1,), True)
    assert "{{ reply }} {% raw %}" in prompts[0].messages[1]["content"]


def test_a_scale_is_two_whole_numbers() -> None:
    assert parse_scale("1-10") == (1, 10)
    for text in ("5", "1-", "-5", "1..5", "a-b", "1-5-9", "1 - 5", "１-５"):
        with pytest.raises(BadInput, match="--scale is"):
            parse_scale(text)
    with pytest.raises(BadInput, match="there is no rubric 'nice'"):
        load_rubric("nice", "pointwise", 1, None)
