"""Files that become jobs, and how their results come back."""

import json
import os
import stat
from typing import Any

import pyarrow.parquet as pq
import pytest

from jobs import ending
from jobs.settings import Settings


def batch_line(number: int, prompt: str) -> str:
    body = {"messages": [{"role": "user", "content": prompt}]}
    return json.dumps({"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}) + "\n"


def test_a_settled_file_becomes_a_job_with_a_receipt_and_results(desk: Any) -> None:
    desk.drop("questions.parquet", ["one", "two"])
    assert desk.inbox.scan().submitted == [], "seen for the first time: it may still grow"
    done = desk.scan_after(2.0)
    (job_id,) = done.submitted
    assert desk.receipt("questions") == {
        "job_id": job_id,
        "file": "questions.parquet",
        "model": "smollm2-135m",
        "submitted_at": "2026-01-02T03:04:05Z",
        "duplicate": False,
        "state": "queued",
        "results": None,
        "counts": None,
        "finished_at": None,
        "error": None,
        "claim_id": desk.receipt("questions")["claim_id"],
    }
    assert desk.rung == [("smollm2-135m", 1)]
    assert desk.listing("accepted") == [f"{job_id}-questions.parquet"]
    assert desk.listing("inbox") == []
    assert desk.claims() == []
    assert desk.jobs()[0].source == "drop"

    assert desk.answer_all() == 2
    assert desk.scan_after(1.0).exported == ["questions.parquet"]
    rows = desk.results("questions.parquet")
    assert [row["forq_output"] for row in rows] == ["answer to one", "answer to two"]
    receipt = desk.receipt("questions")
    assert (receipt["state"], receipt["results"]) == ("completed", "questions.parquet")
    assert receipt["counts"] == {"total": 2, "completed": 2, "failed": 0, "cancelled": 0}
    assert receipt["finished_at"].endswith("Z")
    assert desk.scan_after(1.0).exported == []


def test_the_folders_are_made_for_this_user_alone(desk: Any) -> None:
    (desk.home / "inbox").rmdir()
    desk.inbox.scan()
    for name in ("inbox", "outbox", "rejected", "accepted", "inbox/.claimed"):
        assert stat.S_IMODE((desk.home / name).stat().st_mode) == 0o700, name


def test_a_growing_file_is_left_alone_until_it_is_whole(desk: Any) -> None:
    whole = desk.drop("questions.parquet", ["one"] * 50).read_bytes()
    path = desk.path("questions.parquet")
    for size in range(100, len(whole), 200):
        path.write_bytes(whole[:size])
        done = desk.scan_after(1.0)
        assert (done.submitted, done.rejected, done.num_waiting) == ([], [], 1)
    path.write_bytes(whole)
    assert desk.scan_after(1.0).submitted == []
    assert desk.scan_after(1.9).submitted == []
    assert len(desk.scan_after(0.1).submitted) == 1


def test_a_file_of_the_same_size_that_is_written_again_starts_to_rest_anew(desk: Any) -> None:
    path = desk.drop("q.parquet", ["one"])
    desk.inbox.scan()
    desk.now_s += 1.5
    os.utime(path, ns=(1, 1))
    desk.inbox.scan()
    assert desk.scan_after(1.0).submitted == []
    assert len(desk.scan_after(1.0).submitted) == 1


def test_a_file_that_somebody_has_open_for_writing_is_left_alone_however_long_it_rests(desk: Any) -> None:
    path = desk.path("q.jsonl")
    path.write_text(batch_line(1, "one"))
    with path.open("a"):
        if not kernel_tells_of_writers(path):
            pytest.skip("no file leases on this file system")
        desk.inbox.scan()
        assert desk.scan_after(3600.0).num_waiting == 1
    assert len(desk.scan_after(1.0).submitted) == 1


def kernel_tells_of_writers(path: Any) -> bool:
    from jobs.drop.files import is_being_written, opened

    with opened(path) as descriptor:
        return is_being_written(descriptor)


def test_hidden_and_unfinished_names_and_folders_are_ignored(desk: Any) -> None:
    for name in (".hidden.parquet", "a.parquet.tmp", "a.parquet.part", "a.parquet.crdownload", "lone.job.toml"):
        desk.drop(name, ["one"])
    desk.path("folder.parquet").mkdir()
    desk.drop("folder.parquet/inner.parquet", ["one"])
    done = desk.settle()
    assert (done.submitted, done.rejected) == ([], [])
    assert desk.scan_after(100.0).rejected == []
    assert len(desk.listing("inbox")) == 5


def test_a_file_of_another_format_is_rejected_once_it_has_rested_long(desk: Any) -> None:
    desk.drop("rows.csv", ["one"])
    assert desk.settle().rejected == [], "its writer may yet rename it"
    assert len(desk.scan_after(100.0).rejected) == 1
    assert "its suffix is '.csv': forq reads .parquet" in (desk.home / "rejected" / "rows.csv.reason.txt").read_text()


def test_a_job_toml_has_the_templates_of_a_system_prompt_and_of_later_turns(desk: Any) -> None:
    desk.drop("q.parquet", ["one"])
    desk.path("q.job.toml").write_text('system = "Be short."\nturn = ["More!", "About {{ answers[1] }}: why?"]\n')
    assert len(desk.settle().submitted) == 1
    (job,) = desk.jobs()
    assert (job.mapping["system"], job.mapping["turn"]) == ("Be short.", ["More!", "About {{ answers[1] }}: why?"])


@pytest.mark.parametrize("toml_name", ["q.parquet.job.toml", "q.job.toml"])
def test_a_job_toml_beside_says_how_to_submit(desk: Any, toml_name: str) -> None:
    desk.drop("q.parquet", ["one"])
    desk.path(toml_name).write_text(
        'template = "Say {{ prompt }}"\nmax_tokens = 7\nseed = 3\ntemperature = 1\npriority = 5\nname = "mine"\n'
        "[sampling]\ntop_k = 4\n"
    )
    (job_id,) = desk.settle().submitted
    (job,) = desk.jobs()
    assert (job.name, job.priority) == ("mine", 5)
    assert job.sampling == {"max_tokens": 7, "seed": 3, "temperature": 1.0, "top_k": 4}
    assert job.mapping["template"] == "Say {{ prompt }}"
    assert desk.listing("accepted") == sorted([f"{job_id}-q.parquet", f"{job_id}-{toml_name}"])


def test_a_settled_file_waits_for_its_job_toml_to_settle(desk: Any) -> None:
    desk.drop("q.parquet", ["one"])
    desk.inbox.scan()
    desk.now_s += 2.0
    desk.path("q.job.toml").write_text("max_tok")
    assert desk.inbox.scan().num_waiting == 1
    desk.path("q.job.toml").write_text("max_tokens = 9")
    assert desk.scan_after(1.0).num_waiting == 1
    assert len(desk.scan_after(2.0).submitted) == 1
    assert desk.jobs()[0].sampling == {"max_tokens": 9}


def test_one_job_toml_serves_both_files_of_its_stem(desk: Any) -> None:
    desk.drop("q.parquet", ["one"])
    desk.drop("q.pq", ["two"])
    desk.path("q.job.toml").write_text("max_tokens = 9")
    assert len(desk.settle().submitted) == 2
    assert [job.sampling for job in desk.jobs()] == [{"max_tokens": 9}] * 2
    assert desk.listing("inbox") == []


def test_the_same_content_twice_is_one_job_and_both_names_get_the_results(desk: Any) -> None:
    desk.drop("a.parquet", ["one"])
    (job_id,) = desk.settle().submitted
    desk.drop("b.parquet", ["one"])
    done = desk.settle()
    assert (done.submitted, done.duplicates) == ([], [job_id])
    assert len(desk.jobs()) == 1
    assert (desk.receipt("a")["duplicate"], desk.receipt("b")["duplicate"]) == (False, True)
    assert desk.receipt("b")["job_id"] == job_id
    assert len(desk.rung) == 1
    desk.answer_all()
    assert desk.scan_after(1.0).exported == ["a.parquet", "b.parquet"]
    assert desk.results("a.parquet") == desk.results("b.parquet")


def test_content_whose_job_has_ended_gets_its_results_at_once(desk: Any) -> None:
    desk.drop("a.parquet", ["one"])
    desk.settle()
    desk.answer_all()
    desk.inbox.scan()
    desk.drop("again.parquet", ["one"])
    assert desk.settle().exported == ["again.parquet"]
    assert desk.receipt("again")["state"] == "completed"


def test_the_same_content_with_other_options_is_another_job(desk: Any) -> None:
    desk.drop("a.parquet", ["one"])
    desk.drop("b.parquet", ["one"])
    desk.path("b.job.toml").write_text("max_tokens = 5")
    assert len(desk.settle().submitted) == 2


def test_a_stem_dropped_again_with_other_content_gets_its_own_results(desk: Any) -> None:
    desk.drop("q.parquet", ["one"])
    desk.settle()
    desk.drop("q.parquet", ["two"])
    desk.settle()
    desk.path("q.jsonl").write_text(batch_line(1, "three"))
    desk.settle()
    assert desk.answer_all() == 3
    assert desk.scan_after(1.0).exported == ["q-2.parquet", "q-3.jsonl", "q.parquet"]
    assert [desk.results(name)[0]["forq_output"] for name in ("q.parquet", "q-2.parquet")] == [
        "answer to one",
        "answer to two",
    ]
    assert "answer to three" in str(desk.results("q-3.jsonl")[0])


def test_a_file_in_the_outbox_that_is_not_ours_is_not_overwritten(desk: Any) -> None:
    (desk.home / "outbox").mkdir(mode=0o700)
    (desk.home / "outbox" / "q.parquet").write_text("precious")
    desk.drop("q.parquet", ["one"])
    desk.settle()
    desk.answer_all()
    assert desk.scan_after(1.0).exported == ["q-2.parquet"]
    assert (desk.home / "outbox" / "q.parquet").read_text() == "precious"


def test_batch_lines_come_back_as_openais_lines_the_refused_ones_too(desk: Any) -> None:
    refused = '{"custom_id":"c3","method":"POST","url":"/v1/embeddings","body":{"input":"x"}}\n'
    desk.path("q.jsonl").write_text(batch_line(1, "one") + batch_line(2, "two") + refused)
    desk.settle()
    desk.answer_all()
    assert desk.scan_after(1.0).exported == ["q.jsonl"]
    one, two, three = desk.results("q.jsonl")
    assert [each["custom_id"] for each in (one, two, three)] == ["c1", "c2", "c3"]
    assert [each["response"]["body"]["choices"][0]["message"]["content"] for each in (one, two)] == [
        "answer to one",
        "answer to two",
    ]
    assert three["response"]["status_code"] == 400
    assert "/v1/embeddings" in three["response"]["body"]["error"]["message"]


def test_a_cancelled_job_exports_what_there_is_and_says_so(desk: Any) -> None:
    desk.drop("q.parquet", ["one", "two"])
    (job_id,) = desk.settle().submitted
    ending.cancel(desk.database, job_id)
    assert desk.scan_after(1.0).exported == ["q.parquet"]
    receipt = desk.receipt("q")
    assert (receipt["state"], receipt["counts"]["cancelled"]) == ("cancelled", 2)
    assert [row["forq_output"] for row in desk.results("q.parquet")] == [None, None]


def test_a_failed_job_says_why_in_its_receipt(desk: Any) -> None:
    desk.drop("q.parquet", ["one"])
    (job_id,) = desk.settle().submitted
    ending.fail_job(desk.database, job_id, "the engine has no memory")
    desk.scan_after(1.0)
    receipt = desk.receipt("q")
    assert (receipt["state"], receipt["error"]) == ("failed", "the engine has no memory")
    assert receipt["results"] == "q.parquet"


def test_the_input_columns_and_a_bad_row_come_through(desk: Any) -> None:
    desk.drop("q.parquet", ["one", "", "three"])
    desk.settle()
    assert desk.answer_all() == 2
    desk.scan_after(1.0)
    table = pq.read_table(desk.home / "outbox" / "q.parquet")
    assert table["prompt"].to_pylist() == ["one", "", "three"]
    assert table["forq_error_code"].to_pylist() == [None, "empty_prompt", None]
    assert desk.receipt("q")["counts"]["failed"] == 1


def test_a_broker_that_is_away_delays_nothing(desk: Any) -> None:
    tries = []

    def dead(settings: Settings, model: str, times: int) -> bool:
        tries.append(model)
        raise ConnectionError

    desk.inbox._ring = dead
    for number in range(3):
        desk.drop(f"q{number}.parquet", [f"one {number}"])
    assert len(desk.settle().submitted) == 3
    assert len(tries) == 1, "each try costs seconds, and one per scan tells enough"
