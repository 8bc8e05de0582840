"""A released checkpoint, in a folder laid out like THUDM/apar-7b, works by configuration alone."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from released_checkpoint import CHILD, CHILD_TEXT, EOS, FORK, FORK_TEXT, make_released_checkpoint
from scripted import OWNER, job_of, submit
from sqlalchemy import select

from apar.options import ForkLimits
from db.models import Output, Request, ThreadNode
from db.session import Database
from jobs import service
from jobs.errors import Unavailable
from jobs.settings import QueueSettings, Settings
from jobs.show import print_request
from worker.engine import VllmBackend
from worker.forking import load_encoder
from worker.models import resolve_model
from worker.prompts import PromptEncoder, PromptError
from worker.restoration import repair_thudm
from worker.shards import ShardLoop

CONFIGURATION = """
[models.apar-7b]
path = "{path}"
fork_token = "[SplitMask]"
child_token = "[SplitSop]"
chat_template = "vicuna_v1.1"
restoration = "thudm"
kv_budget = "96 blocks"
max_model_len = 512
dtype = "float32"
default_max_tokens = 120

[models.apar-7b.forks]
max_depth = 1

[models.as-written]
path = "{path}"
fork_token = "[SplitMask]"
child_token = "[SplitSop]"
chat_template = "vicuna_v1.1"
forks = {{ max_depth = 1 }}
default_max_tokens = 120
"""
"""What an operator writes. The second alias shows the same model's answers without the profile."""
SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
WORDS = "the of and to in is it that 1. 2. on with as".split()  # noqa: SIM905
RANDOM = Random(5)
PROMPTS = [" ".join(RANDOM.choices(WORDS, k=RANDOM.randint(3, 30))) for _ in range(24)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_released_checkpoint(tmp_path_factory.mktemp("thudm") / "apar-7b")


@pytest.fixture(scope="module")
def configured(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Read from a forq.toml, as the service reads it."""
    folder = tmp_path_factory.mktemp("configured")
    (folder / "forq.toml").write_text(CONFIGURATION.format(path=checkpoint))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return Settings(home=folder / "home", queue=QueueSettings(shard_rows=8, flush_s=0.01, rows_in_flight=64))


@pytest.fixture(scope="module")
def encoder(configured: Settings) -> PromptEncoder:
    files = resolve_model("apar-7b", configured, report=print)
    encoder, forking = load_encoder(configured.model("apar-7b"), files.path)
    assert forking is not None
    assert (forking.fork_token_id, forking.child_token_id, forking.limits) == (FORK, CHILD, ForkLimits(max_depth=1))
    return encoder


def shown(encoder: PromptEncoder, ids: list[int]) -> str:
    text: str = encoder.decoder.decode(ids, skip_special_tokens=False)
    return text


def test_the_folder_is_what_it_says(checkpoint: Path) -> None:
    """The traps of the layout are there: otherwise the tests below show nothing."""
    from transformers import AutoTokenizer

    names = {file.name for file in checkpoint.iterdir()}
    assert names & {"tokenizer.json", "chat_template.jinja", "model.safetensors"} == set()
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    assert (len(tokenizer), tokenizer.chat_template, tokenizer.eos_token_id) == (32002, None, EOS)
    assert tokenizer.convert_tokens_to_ids([FORK_TEXT, CHILD_TEXT]) == [FORK, CHILD]
    # Ordinary tokens: whoever asks the tokenizer to leave special tokens out gets them as text.
    assert tokenizer.decode([FORK, CHILD], skip_special_tokens=True) == f"{FORK_TEXT}{CHILD_TEXT}"


def test_prompts_are_vicunas(encoder: PromptEncoder) -> None:
    bos = "<s> "  # the space is the one this tokenizer writes at the start of a text
    assert shown(encoder, encoder.encode_prompt("in")) == f"{bos}{SYSTEM} USER: in ASSISTANT:"
    assert encoder.encode_prompt("in")[0] == 1
    turns = [{"role": "user", "content": "in"}, {"role": "assistant", "content": "of"}]
    again = [*turns, {"role": "user", "content": "on"}]
    assert shown(encoder, encoder.encode_chat(again)) == (
        f"{bos}{SYSTEM} USER: in ASSISTANT: of</s>USER: on ASSISTANT:"
    )
    assert encoder.encode_chat(again).count(EOS) == 1
    own_system = [{"role": "system", "content": "Be kind."}, *again]
    assert shown(encoder, encoder.encode_chat(own_system)).startswith(f"{bos}Be kind. USER: in ASSISTANT: of</s>USER:")


@pytest.mark.parametrize("roles", [("assistant",), ("user", "user"), ("user", "system"), ("user", "tool")])
def test_turns_out_of_order_are_refused_row_by_row(encoder: PromptEncoder, roles: tuple[str, ...]) -> None:
    with pytest.raises(PromptError, match="roles must alternate between user and assistant"):
        encoder.encode_chat([{"role": role, "content": "in"} for role in roles])


def test_control_tokens_in_a_prompt_stay_text(encoder: PromptEncoder) -> None:
    text = "in [SplitMask] [SplitSop]</s>USER: on"
    ids = encoder.encode_prompt(text)
    assert {FORK, CHILD, EOS}.isdisjoint(ids)
    assert text in shown(encoder, ids)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ("vicuna", r"chat_template 'vicuna' is no known name \(vicuna_v1.1\), no Jinja, and no file"),
        ("{% if %}", "chat_template is not Jinja: line 1: "),
        ("text.jinja", "chat_template text.jinja holds no Jinja: every message would be left out"),
        ("broken.jinja", "chat_template broken.jinja is not Jinja: line 2: "),
        ("binary.jinja", "no file: it is not UTF-8"),
    ],
)
def test_a_template_that_cannot_be_used_says_why(
    checkpoint: Path, configured: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.jinja").write_text("USER: ")
    (tmp_path / "broken.jinja").write_text("{{ 'a' }}\n{% for %}")
    (tmp_path / "binary.jinja").write_bytes(b"\xff")
    alias = configured.model("apar-7b").model_copy(update={"chat_template": said})
    with pytest.raises(Unavailable, match=says) as caught:
        load_encoder(alias, checkpoint)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("where", ["inline", "file"])
def test_any_template_may_be_given(checkpoint: Path, configured: Settings, tmp_path: Path, where: str) -> None:
    template = "{% for m in messages %}{{ m['role'] + '>' + m['content'] }}{% endfor %}{{ '>' }}"
    (tmp_path / "t.jinja").write_text(template)
    said = template if where == "inline" else str(tmp_path / "t.jinja")
    encoder, _ = load_encoder(configured.model("apar-7b").model_copy(update={"chat_template": said}), checkpoint)
    assert shown(encoder, encoder.encode_prompt("in")) == "<s> user>in>"


def test_a_job_for_it_may_fork_before_any_worker_has_looked_at_the_folder(configured: Settings) -> None:
    script = (
        "import sys; from jobs.forking import check_decoding; from jobs.settings import get_settings;"
        "check_decoding(get_settings(), 'apar-7b', 'apar'); print({'torch', 'transformers'} & set(sys.modules))"
    )
    folder = configured.home.parent
    command = [sys.executable, "-c", script]
    said = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "set()"


def environment() -> dict[str, str]:
    import os

    kept = {name: value for name, value in os.environ.items() if not name.startswith("FORQ_")}
    root = str(Path(__file__).resolve().parents[2])
    return {**kept, "PYTHONPATH": root}


# --- through the engine and the shard loop ---


@pytest.fixture(scope="module")
def backend(configured: Settings) -> Iterator[VllmBackend]:
    alias = configured.model("apar-7b")
    path = resolve_model("apar-7b", configured, report=print).path
    _, forking = load_encoder(alias, path)
    backend = VllmBackend(alias, str(path), forking)
    backend.start()
    yield backend
    backend.shutdown()


def answer_all(
    database: Database, settings: Settings, backend: VllmBackend, encoder: PromptEncoder, alias: str, decoding: str
) -> str:
    """Submit the prompts for an alias, run the shard loop until they are done, and return the job's id."""
    job = submit(database, settings, PROMPTS, model=alias, decoding=decoding, sampling={"temperature": 0.0})
    ShardLoop(database, settings, OWNER, alias, backend, encoder).run_available()
    assert backend.failure is None
    done = job_of(database, job)
    assert (done.state, done.num_completed) == ("completed", len(PROMPTS))
    return job


def stored(database: Database, job: str) -> list[tuple[Any, list[Any]]]:
    """Each row's output and its tree, in order."""
    with database.read() as connection:
        outputs = connection.execute(
            select(Output.__table__, Request.row_index)
            .join(Request)
            .where(Request.job_id == job)
            .order_by(Request.row_index)
        ).all()
        nodes = connection.execute(
            select(ThreadNode.__table__).join(Request).where(Request.job_id == job).order_by(ThreadNode.node)
        ).all()
    return [(output, [node for node in nodes if node.request_id == output.request_id]) for output in outputs]


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_answers_fork_free_of_control_tokens_and_are_repaired_in_text_and_tree(
    database: Database, configured: Settings, backend: VllmBackend, encoder: PromptEncoder
) -> None:
    job = answer_all(database, configured, backend, encoder, "apar-7b", "apar")
    repaired = stored(database, job)
    written = stored(database, answer_all(database, configured, backend, encoder, "as-written", "apar"))
    seen = {"newline": 0, "blank line": 0, "left alone": 0}
    for (output, tree), (before, tree_before) in zip(repaired, written, strict=True):
        for text in (output.text, before.text):
            assert FORK_TEXT not in text
            assert CHILD_TEXT not in text
        # Spans in characters tile the repaired text; spans in tokens and every count are the engine's.
        assert [node.text_start for node in tree] == [0, *(node.text_end for node in tree[:-1])]
        assert tree[-1].text_end == len(output.text)
        assert tree[-1].end == output.output_tokens == before.output_tokens
        assert [(n.start, n.end, n.thread, n.kind) for n in tree] == [
            (n.start, n.end, n.thread, n.kind) for n in tree_before
        ]
        pieces = [output.text[node.text_start : node.text_end] for node in tree]
        original = [before.text[node.text_start : node.text_end] for node in tree_before]
        kinds = [node.kind == "detail" for node in tree]
        assert pieces == repair_thudm(original, [node.parent for node in tree], kinds)
        for piece, was, is_detail in zip(pieces[1:], original[1:], kinds[1:], strict=True):
            assert is_detail or not was or piece.startswith("\n\n")
            seen["newline"] += is_detail and piece != was
            seen["blank line"] += not is_detail and piece != was
            seen["left alone"] += piece == was
        # Details do not fork: max_depth is 1.
        detail_numbers = {node.node for node in tree if node.kind == "detail"}
        assert all(node.parent not in detail_numbers for node in tree)
    assert sum(len(tree) > 1 for _, tree in repaired) >= len(PROMPTS) // 3
    assert min(seen.values()) >= 3, f"the answers do not show all the rules at work: {seen}"


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_a_forked_answer_is_shown_as_its_tree(
    database: Database,
    configured: Settings,
    backend: VllmBackend,
    encoder: PromptEncoder,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = answer_all(database, configured, backend, encoder, "apar-7b", "apar")
    _, tree = max(stored(database, job), key=lambda row: len(row[1]))
    with database.read() as connection:
        row = connection.scalar(select(Request.row_index).where(Request.id == tree[0].request_id))
    detail = service.request_detail(database, job, row)
    (sample,) = detail["samples"]
    assert "".join(node["text"] for node in sample["tree"]) == sample["output"]
    print_request(detail)
    said = capsys.readouterr().out
    assert said.count("detail, thread") == sum(node.kind == "detail" for node in tree) > 1
    assert "Split" not in said
    for node in sample["tree"]:
        assert f"{node['kind']}, thread {node['thread']}, tokens {node['start']}-{node['end']}" in said
        for line in node["text"].split("\n"):
            assert line.strip() in said


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_without_forks_its_answers_hold_no_control_token_either(
    database: Database, configured: Settings, backend: VllmBackend, encoder: PromptEncoder
) -> None:
    for output, tree in stored(database, answer_all(database, configured, backend, encoder, "apar-7b", "ar")):
        assert len(tree) == 1
        assert "Split" not in output.text
