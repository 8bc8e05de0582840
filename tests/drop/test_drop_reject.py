"""Files that are refused: each goes to `rejected/`, whole, beside one line that says why."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.errors import Unavailable

GOOD_LINE = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}}\n'


def truncated(path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["one"] * 100}), path)
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize(
    ("name", "write", "words"),
    [
        ("q.parquet", lambda path: path.write_text("not parquet at all"), "not a readable Parquet file"),
        ("q.parquet", truncated, "not a readable Parquet file"),
        ("q.parquet", lambda path: path.write_bytes(b""), "empty (0 bytes)"),
        ("q.jsonl", lambda path: path.write_bytes(b""), "empty (0 bytes)"),
        ("q.jsonl", lambda path: path.write_text(GOOD_LINE + '{"custom_id": "b", "me'), "its last line"),
    ],
    ids=["not parquet", "truncated parquet", "empty parquet", "empty lines", "truncated lines"],
)
def test_a_resting_file_that_looks_cut_off_is_rejected_only_after_a_while(
    desk: Any, name: str, write: Callable[[Path], Any], words: str
) -> None:
    write(desk.path(name))
    content = desk.path(name).read_bytes()
    assert desk.settle().rejected == []
    assert desk.scan_after(27.0).rejected == []
    assert desk.scan_after(1.0).rejected == [name]
    assert words in desk.reason(name)
    assert (desk.home / "rejected" / name).read_bytes() == content
    assert desk.listing("inbox") == []
    assert desk.claims() == []


def two_columns_of_one_name(path: Path) -> None:
    column = pa.array(["one"])
    pq.write_table(pa.Table.from_arrays([column, column], names=["prompt", "prompt"]), path)


@pytest.mark.parametrize(
    ("name", "write", "words"),
    [
        ("q.parquet", lambda path: pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path), "0 rows"),
        ("q.parquet", lambda path: pq.write_table(pa.table({"text": ["one"]}), path), "its columns: text"),
        ("q.parquet", lambda path: pq.write_table(pa.table({"prompt": [1]}), path), "has type int64"),
        ("q.parquet", two_columns_of_one_name, "twice"),
        ("q.parquet", lambda path: pq.write_table(pa.table({"prompt": ["a"], "forq_x": [1]}), path), "forq_"),
        ("q.jsonl", lambda path: path.write_text("[1]\n"), "line 1 is a JSON list"),
        ("q.jsonl", lambda path: path.write_text(GOOD_LINE * 2), "occurs twice"),
        ("q.ndjson", lambda path: path.write_text("\n\n"), "0 lines"),
    ],
    ids=["zero rows", "no prompt", "numbers", "column twice", "our prefix", "not an object", "id twice", "blank lines"],
)
def test_a_whole_file_that_cannot_be_a_job_is_rejected_at_once(
    desk: Any, name: str, write: Callable[[Path], Any], words: str
) -> None:
    write(desk.path(name))
    assert desk.settle().rejected == [name]
    assert words in desk.reason(name)
    assert desk.listing("rejected") == [name, f"{name}.reason.txt"]
    assert desk.listing("outbox") == []
    assert desk.jobs() == []
    assert desk.claims() == []


def test_damage_inside_a_page_is_rejected_with_the_row(desk: Any) -> None:
    path = desk.path("q.parquet")
    pq.write_table(pa.table({"prompt": [f"prompt {i}" for i in range(5000)]}), path, compression="snappy")
    data = bytearray(path.read_bytes())
    data[40:4000] = b"\xff" * 3960
    path.write_bytes(data)
    assert desk.settle().rejected == ["q.parquet"]
    assert "damaged after row 0" in desk.reason("q.parquet")


def test_the_reason_speaks_of_keys_and_not_of_flags(desk: Any) -> None:
    pq.write_table(pa.table({"text": ["one"]}), desk.path("q.parquet"))
    desk.settle()
    reason = desk.reason("q.parquet")
    assert "say which to use with prompt_column, messages_column or template (in q.job.toml)" in reason
    assert "--" not in reason


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_token = 3", "'max_token' is not a known key (did you mean 'max_tokens'?): use model, prompt_column"),
        ("max_tokens = '3'", "max_tokens is '3': it should be a valid integer"),
        ("max_tokens = 0", "max_tokens is 0"),
        ("temperature = nan", "temperature"),
        ("seed = true", "seed is True"),
        ("n = 65", "n is 65, the limit is 64"),
        ("priority = 1001", "between -1000 and 1000"),
        ("max_tokens = 3\n[sampling]\nmax_tokens = 4", "max_tokens is given twice"),
        ("[sampling]\ntop_q = 4", "top_q is not a sampling value"),
        ("model = '/etc/passwd'", "'/etc/passwd' is not configured; known aliases: smollm2-135m"),
        ("prompt_column = 'promt'", "did you mean 'prompt'?"),
        ("decoding = 'apar'", "or use decoding ar (in"),
        ("decoding = 'apar+lade'", "decoding is 'apar+lade', which model 'smollm2-135m' does not have on vLLM"),
        ("kv_share = 0.0", "kv_share is 0.0: it must be above 0"),
        ("template = '{{ nothing }}'", "the template uses nothing"),
        ("template = '{{'", "does not parse"),
        ("not toml", "q.job.toml is not TOML"),
        ('name = "a\\u0007b"', "control characters"),
    ],
)
def test_a_bad_job_toml_is_rejected_with_its_file(desk: Any, text: str, words: str) -> None:
    desk.drop("q.parquet", ["one"])
    desk.path("q.job.toml").write_text(text)
    assert desk.settle().rejected == ["q.parquet"]
    assert words in desk.reason("q.parquet")
    assert desk.listing("rejected") == ["q.parquet", "q.parquet.job.toml", "q.parquet.reason.txt"]
    assert desk.jobs() == []


def test_a_job_toml_that_is_not_utf8_or_is_huge_is_rejected(desk: Any) -> None:
    for name, content in (("a", b"name = '\xff'"), ("b", b"#" * (5 << 20))):
        desk.drop(f"{name}.parquet", ["one"])
        desk.path(f"{name}.job.toml").write_bytes(content)
    assert desk.settle().rejected == ["a.parquet", "b.parquet"]
    assert "is not TOML" in desk.reason("a.parquet")
    assert "over 4194304 bytes" in desk.reason("b.parquet")


def test_two_rejected_files_of_one_name_both_stay(desk: Any) -> None:
    for _ in range(2):
        pq.write_table(pa.table({"text": ["one"]}), desk.path("q.parquet"))
        desk.settle()
    assert desk.listing("rejected") == ["q-2.parquet", "q-2.parquet.reason.txt", "q.parquet", "q.parquet.reason.txt"]


def test_a_symbolic_link_is_moved_and_never_followed(desk: Any, tmp_path: Path) -> None:
    secret = tmp_path / "secret.parquet"
    pq.write_table(pa.table({"prompt": ["one"]}), secret)
    desk.path("q.parquet").symlink_to(secret)
    desk.path("dangling.parquet").symlink_to("/nowhere")
    desk.path("folder.parquet").symlink_to(tmp_path)
    assert desk.inbox.scan().rejected == ["dangling.parquet", "folder.parquet", "q.parquet"]
    assert "symbolic link" in desk.reason("q.parquet")
    assert (desk.home / "rejected" / "q.parquet").is_symlink()
    assert secret.exists()
    assert desk.jobs() == []


def test_a_linked_job_toml_rejects_its_file(desk: Any, tmp_path: Path) -> None:
    (tmp_path / "elsewhere.toml").write_text("max_tokens = 3")
    desk.drop("q.parquet", ["one"])
    desk.path("q.job.toml").symlink_to(tmp_path / "elsewhere.toml")
    assert desk.inbox.scan().rejected == ["q.parquet"]
    assert desk.reason("q.parquet").startswith("q.job.toml: it is a symbolic link")
    assert desk.listing("inbox") == []


def test_a_fifo_and_a_socket_are_rejected_without_being_opened(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(desk.path("f.parquet"))
    monkeypatch.chdir(desk.home / "inbox")  # a socket's path has a short limit
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s.jsonl")
        assert desk.inbox.scan().rejected == ["f.parquet", "s.jsonl"]
    assert "it is a FIFO, not a regular file" in desk.reason("f.parquet")
    assert "it is a socket" in desk.reason("s.jsonl")


def test_a_file_with_a_second_name_is_rejected_when_it_keeps_it(desk: Any, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    os.link(desk.drop("q.parquet", ["one"]), outside)
    desk.inbox.scan()
    assert desk.scan_after(1.0).rejected == []
    assert desk.scan_after(1.0).rejected == ["q.parquet"]
    assert "has 2 names (hard links), the limit is 1" in desk.reason("q.parquet")
    assert outside.exists()


def test_a_file_placed_by_link_and_unlink_is_taken(desk: Any) -> None:
    source = desk.drop(".incoming", ["one"])
    os.link(source, desk.path("q.parquet"))
    desk.inbox.scan()
    source.unlink()
    assert len(desk.scan_after(2.0).submitted) == 1


@pytest.mark.parametrize(
    "name", ["a\nb.parquet", "a.parquet\n", "tab\there.jsonl", "esc\x1b[31m.parquet", "bad\udcff.pq"]
)
def test_a_name_with_control_characters_is_rejected_under_a_clean_one(desk: Any, name: str) -> None:
    desk.drop("plain", ["one"]).rename(desk.path(name))
    (clean,) = desk.inbox.scan().rejected
    assert clean.isprintable()
    assert "line breaks, control characters" in desk.reason(clean)
    assert desk.listing("rejected") == sorted([clean, f"{clean}.reason.txt"])
    assert desk.listing("inbox") == []


def test_names_that_look_like_paths_lead_nowhere(desk: Any, tmp_path: Path) -> None:
    """No name in a folder can be `..` or hold a slash or a NUL; what looks or decodes like one is a name like any."""
    names = ["up\\..\\..\\up.parquet", "%2e%2e%2fup.parquet", "-rf.parquet", "$(touch x).parquet"]
    for name in names:
        desk.drop("plain", [name]).rename(desk.path(name))
    desk.drop("plain", ["hidden"]).rename(desk.path("..parquet"))
    outside = {path for path in tmp_path.rglob("*") if not path.is_relative_to(desk.home)}
    assert len(desk.settle().submitted) == len(names)
    desk.answer_all()
    assert len(desk.scan_after(1.0).exported) == len(names)
    assert {path for path in tmp_path.rglob("*") if not path.is_relative_to(desk.home)} == outside
    assert sorted(name for name in desk.listing("outbox") if name.endswith(".parquet")) == sorted(names)


def test_names_may_have_spaces_and_any_script_but_not_every_length(desk: Any) -> None:
    desk.drop("Données 10.30\u202fAM 質問.parquet", ["one"])
    assert len(desk.settle().submitted) == 1
    long_name = "é" * 115 + ".parquet"
    desk.drop(long_name, ["two"])
    (clean,) = desk.inbox.scan().rejected
    assert "238 bytes, the limit is 200" in desk.reason(clean)


def test_no_prompt_is_in_the_log(desk: Any, capsys: pytest.CaptureFixture[str]) -> None:
    secret = "tell-nobody"
    desk.drop("good.parquet", [secret])
    desk.path("bad.jsonl").write_text(f'{{"{secret}": 1}}\n')
    desk.drop("toml.parquet", [secret])
    desk.path("toml.job.toml").write_text(f"template = '{{{{ {secret} '")
    desk.settle()
    desk.answer_all()
    desk.scan_after(1.0)
    output = "".join(capsys.readouterr())
    assert "drop_exported" in output
    assert "drop_rejected" in output
    assert secret not in output


def test_a_claim_folder_that_others_made_or_may_enter_is_refused(desk: Any, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    claimed = desk.home / "inbox" / ".claimed"
    claimed.symlink_to(tmp_path / "theirs")
    with pytest.raises(Unavailable, match="remove it"):
        desk.inbox.scan()
    claimed.unlink()
    claimed.mkdir(mode=0o777)
    claimed.chmod(0o777)
    with pytest.raises(Unavailable, match="mode 0700"):
        desk.inbox.scan()
