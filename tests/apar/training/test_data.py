"""Rows of a file as training answers: what is read, held out, left out, refused."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic_trees import SCHEMA, list_row, made_up_rows, make_base, plain_row, write_rows
from tiny_models import EOS

from apar.errors import InputError
from apar.training.data import TrainingData, load
from apar.training.options import TrainingOptions
from apar.training.vocabulary import Vocabulary

LIST = list_row("list the thing", ["the", "it", "an"], ["in the end", "at rest", "not here"])


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return Vocabulary(make_base(tmp_path_factory.mktemp("data") / "base"))


def loaded(vocabulary: Vocabulary, path: Path, **options: Any) -> TrainingData:
    given: dict[str, Any] = {"eval_share": 0.0, **options}
    return load(TrainingOptions(base=path, data=path, out=path, **given), vocabulary)


def test_rows_become_trees_that_hold_the_answer(vocabulary: Vocabulary, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "d.parquet", [LIST, plain_row("say it", "it is.")])
    data = loaded(vocabulary, path)
    (structured,), (unstructured,) = data.structured, data.unstructured
    ids = [i for i in structured.token_ids.tolist() if i not in (vocabulary.control.fork, vocabulary.control.child)]
    assert vocabulary.tokenizer.decode(ids) == "list the thing\n" + LIST["response"]
    assert (structured.labels == EOS).sum() == 4
    assert unstructured.depth == 0
    assert data.num_path_tokens > data.num_tokens


def test_held_out_prompts_are_never_learned_from(vocabulary: Vocabulary, tmp_path: Path) -> None:
    rows = [row for row in made_up_rows(40) for _ in range(2)]  # two answers to each prompt
    data = loaded(vocabulary, write_rows(tmp_path / "d.parquet", rows), eval_share=0.2)
    learned = {tree.token_ids.tobytes() for tree in data.trees}
    assert {tree.is_structured for tree in data.held_out} == {True, False}
    assert len(data.held_out) + len(data.trees) == len(rows)
    assert not learned & {tree.token_ids.tobytes() for tree in data.held_out}
    again = loaded(vocabulary, tmp_path / "d.parquet", eval_share=0.2)
    assert [t.token_ids.tolist() for t in again.held_out] == [t.token_ids.tolist() for t in data.held_out]


def test_rows_left_out_are_counted_by_reason(vocabulary: Vocabulary, tmp_path: Path) -> None:
    dropped = {**plain_row("say", "the"), "nodes": None}
    rows = [LIST, plain_row("say it", "it."), dropped, plain_row("say it", "the " * 90), plain_row("", "the")]
    data = loaded(vocabulary, write_rows(tmp_path / "d.parquet", rows), max_tokens=100)
    assert dict(data.skipped) == {
        "dropped by extraction": 1, "longer than 100 tokens": 1, "no prompt or no answer": 1
    }  # fmt: skip


def test_a_cut_answer_is_known_by_its_finish_reason(vocabulary: Vocabulary, tmp_path: Path) -> None:
    rows = [{**LIST, "finish_reason": "length"}, {**plain_row("say it", "it is."), "finish_reason": "stop"}]
    schema = SCHEMA.append(pa.field("finish_reason", pa.string()))
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), tmp_path / "d.parquet")
    data = loaded(vocabulary, tmp_path / "d.parquet")
    assert (data.structured[0].labels == EOS).sum() == 2  # of four leaves the last two end with the answer
    assert (data.unstructured[0].labels == EOS).sum() == 1


def test_prompts_may_be_messages(vocabulary: Vocabulary, tmp_path: Path) -> None:
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    schema = SCHEMA.set(0, pa.field("prompt", pa.list_(message)))
    prompt = [{"role": "user", "content": "list the thing"}]
    rows = [{**LIST, "prompt": prompt}, {**plain_row("", "it."), "prompt": prompt}]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), tmp_path / "m.parquet")
    text = write_rows(tmp_path / "t.parquet", [LIST, plain_row("list the thing", "it.")])
    trees = [loaded(vocabulary, path).structured[0] for path in (tmp_path / "m.parquet", text)]
    assert trees[0].token_ids.tolist() == trees[1].token_ids.tolist()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**LIST, "response": "another"}, "row 0 of .*: its nodes do not give the answer back"),
        ({**LIST, "nodes": LIST["nodes"][:3]}, "row 0 of .*: node 2 .* this is no tree|node 3 .* no tree"),
    ],
)
def test_nodes_that_are_not_the_answers_are_refused(
    vocabulary: Vocabulary, tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        loaded(vocabulary, write_rows(tmp_path / "d.parquet", [row]))


def test_nodes_of_another_type_are_refused(vocabulary: Vocabulary, tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"], "response": ["b"], "nodes": [["b"]]}), tmp_path / "d.parquet")
    with pytest.raises(InputError, match="without first_child, next_sibling, text"):
        loaded(vocabulary, tmp_path / "d.parquet")
