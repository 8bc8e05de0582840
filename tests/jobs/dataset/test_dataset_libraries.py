"""What `datasets` and `trl` make of the files: read as they are, offline."""

import os
from pathlib import Path
from typing import Any

import pytest
from batches import drain, sample, submit_table

from db.session import Database
from jobs import results
from jobs.dataset.options import ExportOptions
from jobs.dataset.pipeline import DataSet, export_dataset
from jobs.settings import Settings

TOPICS = [f"topic {n}" for n in range(12)]
CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`datasets.load_dataset`, with a cache of its own."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    datasets = pytest.importorskip("datasets") if not os.environ.get("CI") else __import__("datasets")
    datasets.disable_progress_bars()

    def load(*args: Any, **options: Any) -> Any:
        return datasets.load_dataset(*args, cache_dir=str(tmp_path / "cache"), **options)

    return load


def made(database: Database, settings: Settings, name: str, **said: Any) -> DataSet:
    """Twelve topics, two samples each, of two turns."""
    job_id = submit_table(
        database, settings, {"topic": TOPICS, "level": list(range(12))}, template="Tell of {{ topic }}.",
        system="Be short.", turn=("More than {{ answers[0] }}?",), sampling={"n": 2},
    ).job_id  # fmt: skip

    def answer(row: results.PendingRow) -> results.RowResult:
        samples = []
        for number in range(2):
            plain = sample(f"Answer {number} of row {row.row_index}.")
            earlier = (results.Turn(f"first {number}", "stop", 3, 2),)
            samples.append(results.SampleResult(plain.text, "stop", 3, 2, plain.stats, plain.nodes, turns=earlier))
        return results.RowResult(row.request_id, tuple(samples))

    drain(database, answer)
    return export_dataset(database, settings, job_id, settings.home.parent / name, ExportOptions(**said))


def expected(row: int, number: int) -> list[dict[str, str]]:
    texts = (
        "Be short.", f"Tell of topic {row}.", f"first {number}", f"More than first {number}?",
        f"Answer {number} of row {row}.",
    )  # fmt: skip
    roles = ("system", "user", "assistant", "user", "assistant")
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]


@pytest.mark.parametrize("name", ["sft.parquet", "sft.jsonl"])
def test_datasets_reads_both_files_of_a_split(database: Database, settings: Settings, load: Any, name: str) -> None:
    done = made(database, settings, name, format="messages", column=["level"], test_share=0.3)
    builder = "parquet" if name.endswith(".parquet") else "json"
    data = load(builder, data_files={"train": str(done.train), "test": str(done.test)})
    assert {side: split.num_rows for side, split in data.items()} == {
        "train": done.counts.train, "test": done.counts.test
    }  # fmt: skip
    assert done.counts.test > 0
    read = sorted(
        ((row["level"], row["messages"]) for split in data.values() for row in split), key=lambda row: str(row)
    )
    assert read == sorted(((n, expected(n, k)) for n in range(12) for k in range(2)), key=lambda row: str(row))


def test_datasets_loads_a_folder_by_its_name(database: Database, settings: Settings, load: Any) -> None:
    done = made(database, settings, "folder", format="sharegpt", test_share=0.3)
    data = load(str(done.train.parent))
    assert {side: split.num_rows for side, split in data.items()} == {
        "train": done.counts.train, "test": done.counts.test
    }  # fmt: skip
    first = data["train"][0]["conversations"]
    assert [message["from"] for message in first] == ["system", "human", "gpt", "human", "gpt"]


def test_trl_takes_the_messages_as_a_conversation(database: Database, settings: Settings, load: Any) -> None:
    from tiny_models import tokenizer
    from trl.data_utils import apply_chat_template, is_conversational, maybe_apply_chat_template

    done = made(database, settings, "sft.parquet", format="messages")
    data = load("parquet", data_files=str(done.train), split="train")
    assert data.column_names == ["messages"]
    assert is_conversational(data[0])
    trained_on = tokenizer()
    trained_on.chat_template = CHAT
    texts = data.map(maybe_apply_chat_template, fn_kwargs={"processing_class": trained_on})
    assert texts[0]["text"] == (
        "<system>Be short.\n<user>Tell of topic 0.\n<assistant>first 0\n<user>More than first 0?\n"
        "<assistant>Answer 0 of row 0.\n"
    )
    assert apply_chat_template(data[3], trained_on) == {"text": texts[3]["text"]}
