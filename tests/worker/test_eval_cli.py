"""`forq eval` with the real engine on the CPU: a tiny model that forks beside the same weights that do not."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from apar.evaluation import Answer, EvaluatedRow
from apar.evaluation.store import read_answers
from jobs.errors import BadInput, ForqError, Unavailable
from jobs.settings import KVBudget, ModelAlias, Settings, get_settings
from worker.backend import EngineFacts
from worker.eval_cli import evaluate, read_questions
from worker.evaluation.answering import Answers, Question
from worker.evaluation.contestants import Contestant, find_contestants
from worker.evaluation.run import pair
from worker.evaluation.scoring import AnswerEncoder
from worker.prompts import PromptEncoder, load_tokenizer

MAX_TOKENS = 90
NUM_PROMPTS = 12


@dataclass
class Run:
    result: Result
    out: Path
    model: Path
    base: Path
    prompts: Path

    def rows(self) -> list[EvaluatedRow]:
        return read_answers(self.out / "answers.parquet")


def forq_eval(*args: Any) -> Result:
    return CliRunner().invoke(evaluate, list(map(str, args)))


def refusal(*args: Any) -> str:
    """The one line that a refused command prints; exit code 2 goes with it."""
    result = forq_eval(*args)
    error = result.exception
    if isinstance(error, SystemExit):  # click's own
        assert result.exit_code == 2
        return result.stderr
    assert isinstance(error, BadInput), result.exception
    assert "\n" not in str(error)
    return str(error)


def random_text(random: Random) -> str:
    return "".join(chr(random.randrange(33, 127)) for _ in range(random.randrange(5, 40)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, Path]]:
    """Settings of the module's own; the model, its base, prompts in three categories."""
    from tiny_models import make_tiny_model

    folder = tmp_path_factory.mktemp("eval")
    model = make_tiny_model(folder / "model")
    base = Path(shutil.copytree(model, folder / "base"))
    config = json.loads((base / "config.json").read_text())
    del config["apar"]
    (base / "config.json").write_text(json.dumps(config))
    random = Random(4)
    prompts = [random_text(random) for _ in range(NUM_PROMPTS)]
    categories = [("left", "right", None)[i % 3] for i in range(NUM_PROMPTS)]
    pq.write_table(pa.table({"prompt": prompts, "category": categories}), folder / "prompts.parquet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORQ_HOME", str(folder / "home"))
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_LOGGING_LEVEL", "WARNING")  # the second engine warns: not on standard output
        patch.chdir(folder)
        get_settings.cache_clear()
        yield model, base, folder / "prompts.parquet"
    get_settings.cache_clear()


@pytest.fixture(scope="module")
def run(folders: tuple[Path, Path, Path]) -> Run:
    model, base, prompts = folders
    out = prompts.parent / "out"
    result = forq_eval(
        model, "--base", base, "--prompts", prompts, "--max-tokens", MAX_TOKENS, "--kv-budget", "64 blocks",
        "--out", out, "--json",
    )  # fmt: skip
    if result.exception is not None:
        raise result.exception
    return Run(result, out, model, base, prompts)


@pytest.mark.engine
@pytest.mark.timeout(600)
class TestRun:
    def test_stdout_is_a_line_of_json_per_category(self, run: Run) -> None:
        lines = [json.loads(line) for line in run.result.stdout.splitlines()]
        assert [(line["category"], line["answers"]) for line in lines] == [
            ("left", 4),
            ("right", 4),
            ("none", 4),
            ("all", NUM_PROMPTS),
        ]

    def test_the_model_forks_and_the_base_does_not(self, run: Run) -> None:
        rows = run.rows()
        assert [row.row for row in rows] == list(range(NUM_PROMPTS))
        assert sum(row.model.answer.forks for row in rows) >= 3
        assert not any(row.base.answer.forks for row in rows)
        total = json.loads(run.result.stdout.splitlines()[-1])
        assert total["forking_share"] == pytest.approx(sum(r.model.answer.forks for r in rows) / len(rows))
        assert total["critical_path_forking"] < 1
        assert total["model"]["stop"] + total["model"]["length"] == NUM_PROMPTS

    def test_receipts_and_trees_belong_to_the_answers(self, run: Run) -> None:
        for row in run.rows():
            for answer in (row.model.answer, row.base.answer):
                nodes = answer.nodes
                assert "".join(answer.text[node.text_start : node.text_end] for node in nodes) == answer.text
                assert nodes[-1].end == answer.output_tokens <= MAX_TOKENS
                assert (answer.forks, answer.was_cut) == (len(nodes) > 1, answer.finish_reason == "length")
            plain = row.base.answer
            assert (plain.steps, plain.attended_tokens) == (plain.output_tokens, plain.sequential_attended_tokens)
            assert plain.peak_cached_tokens == plain.sequential_peak_tokens - 1

    def test_answers_are_scored_under_the_base_behind_the_templates_prompt(self, run: Run) -> None:
        """Once more by hand, in one forward pass per answer and without our encoder."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(run.base)
        model = AutoModelForCausalLM.from_pretrained(run.base, dtype=torch.float32).eval()
        for row in run.rows():
            prompt = tokenizer(row.prompt + "\n", add_special_tokens=False).input_ids
            for side in (row.model, row.base):
                text = side.answer.text
                if "[" in text:  # a control token written out: the plain tokenizer would take it for one
                    continue
                ids = tokenizer(text, add_special_tokens=False).input_ids
                ids += [tokenizer.eos_token_id] if side.answer.finish_reason == "stop" else []
                with torch.inference_mode():
                    logits_lv = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
                expected = logits_lv.double().log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).sum()
                assert side.likelihood is not None
                assert side.likelihood.num_tokens == len(ids)
                assert side.likelihood.log_likelihood == pytest.approx(float(expected), abs=1e-2)

    def test_the_report_says_what_ran(self, run: Run) -> None:
        value = json.loads((run.out / "report.json").read_text("utf-8"))
        assert value["categories"] == [json.loads(line) for line in run.result.stdout.splitlines()]
        assert (value["max_tokens"], value["dtype"], value["scoring_dtype"]) == (MAX_TOKENS, "float32", "float32")
        assert value["model_engine"]["num_blocks"] == value["base_engine"]["num_blocks"] == 64
        assert value["model_engine"]["can_fork"]
        assert (run.out / "report.png").read_bytes().startswith(b"\x89PNG")

    def test_given_answers_are_reported_and_scored_again_alike(self, run: Run) -> None:
        answers = run.out / "answers.parquet"
        again = forq_eval(run.model, "--base", run.base, "--answers", answers, "--json")
        assert again.exception is None
        for new, old in zip(again.stdout.splitlines(), run.result.stdout.splitlines(), strict=True):
            assert close(new, old)
        plain = forq_eval("whatever", "--answers", answers, "--json", "--no-likelihood")
        assert plain.stdout == run.result.stdout  # the file's own likelihoods

    def test_two_answers_side_by_side_and_a_table(self, run: Run) -> None:
        result = forq_eval(
            "m", "--answers", run.out / "answers.parquet", "--no-likelihood", "--side-by-side", 2, "--limit", 6
        )
        assert result.exception is None
        table, _, texts = result.stdout.partition("\n\n")
        assert [line.split("\t")[0] for line in table.splitlines()] == ["category", "left", "none", "right", "all"]
        assert texts.count("=== row") == 2
        assert texts.count("--- model: ") == texts.count("--- base: ") == 2


def close(new: str, old: str) -> bool:
    """Whether two lines of JSON agree: batches of another make-up add float32 numbers in another order."""

    def flat(value: Any, at: str = "") -> dict[str, Any]:
        if not isinstance(value, dict):
            return {at: value}
        return {key: item for name, inner in value.items() for key, item in flat(inner, f"{at}/{name}").items()}

    return flat(json.loads(new)) == pytest.approx(flat(json.loads(old)), abs=1e-4)


# --- bad input ---


def test_either_prompts_or_answers(folders: tuple[Path, Path, Path]) -> None:
    model, _, prompts = folders
    assert "either --prompts" in refusal(model)
    assert "either --prompts" in refusal(model, "--prompts", prompts, "--answers", prompts)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--max-tokens", "0"], "--max-tokens is 0: it must be at least 1"),
        (["--limit", "0"], "--limit is 0"),
        (["--side-by-side", "-1"], "--side-by-side is -1"),
        (["--dtype", "int8"], "--dtype is 'int8'"),
        (["--kv-budget", "big"], "--kv-budget is 'big'"),
        (["--prompt-column", "promt"], "no column 'promt'; did you mean 'prompt'?"),
        (["--category-column", "kind"], "no column 'kind'"),
        (["--base", "nobody"], "the base 'nobody' is neither a configured alias nor a folder"),
        ([], "does not name its base: say --base"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(
    folders: tuple[Path, Path, Path], args: list[str], message: str
) -> None:
    model, _, prompts = folders
    assert message in refusal(model, "--prompts", prompts, *args)


def test_models_and_files_that_are_not_there_are_refused(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    model, _, prompts = folders
    assert "no such file" in refusal(model, "--prompts", tmp_path / "nothing.parquet")
    assert "the model 'nobody' is neither" in refusal("nobody", "--prompts", prompts)
    assert "a folder without config.json" in refusal(tmp_path, "--prompts", prompts)
    assert "lacks" in refusal(model, "--answers", prompts)
    (tmp_path / "p.jsonl").write_text("{}")
    assert "JSONL" in refusal(model, "--prompts", tmp_path / "p.jsonl")


def test_rows_without_a_prompt_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    for value in (None, ""):
        pq.write_table(pa.table({"prompt": pa.array(["x", value])}), path)
        with pytest.raises(BadInput, match="row 1 has no text in 'prompt'"):
            read_questions(path, "prompt", None, None)


def test_a_category_called_like_the_total_is_refused_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": ["x"], "category": ["all"]}), path)
    with pytest.raises(BadInput, match="of a category 'all'"):
        read_questions(path, "prompt", None, None)


# --- prompts and models ---


def test_the_first_of_several_turns_is_asked_and_categories_may_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    turns = [[f"{i} first", f"{i} second"] for i in range(6)]
    pq.write_table(pa.table({"turns": turns, "kind": ["1", "1", "2", "", None, "3"]}), path)
    assert [question.prompt for question in read_questions(path, "turns", None, 3)] == ["0 first", "2 first", "4 first"]
    assert {question.category for question in read_questions(path, "turns", None, None)} == {""}
    kinds = [question.category for question in read_questions(path, "turns", "kind", None)]
    assert kinds == ["1", "1", "2", "none", "none", "3"]


def contestants(model: Path | str, base: Path | str | None, **models: ModelAlias) -> tuple[Contestant, Contestant]:
    settings = Settings(home=Path("home"), models=models)
    return find_contestants(
        str(model), None if base is None else str(base), settings, kv_budget=None, dtype=None, say=print
    )


def test_both_models_get_the_options_of_the_models_alias(folders: tuple[Path, Path, Path]) -> None:
    model_path, base_path, _ = folders
    alias = ModelAlias(
        path=model_path, kv_budget=KVBudget.parse("99 blocks"), max_model_len=64, fork_token="[Fork]",
        child_token="[Child]", engine={"max_num_seqs": 3},
    )  # fmt: skip
    model, base = contestants("mine", base_path, mine=alias, other=ModelAlias(path=base_path))
    assert (model.alias.fork_token, base.alias.fork_token) == ("[Fork]", None)
    assert model.alias.kv_budget == base.alias.kv_budget == alias.kv_budget
    assert model.alias.engine["max_num_seqs"] == base.alias.engine["max_num_seqs"] == 3
    assert model.alias.dtype == base.alias.dtype == "float32"  # `auto` is what the base's weights are in
    assert (model.path, base.path) == (model_path, base_path)
    # A folder beside a configured base: the base's options.
    model, base = contestants(model_path, "mine", mine=alias)
    assert model.alias == base.alias
    assert model.alias.max_model_len == 64


def test_the_model_may_name_its_base_by_alias_or_folder(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    model_path, base_path, _ = folders
    named = Path(shutil.copytree(model_path, tmp_path / "named"))
    config = json.loads((named / "config.json").read_text())
    for name in (str(base_path), "other"):
        config["apar"]["base"] = name
        (named / "config.json").write_text(json.dumps(config))
        _, base = contestants(named, None, other=ModelAlias(path=base_path))
        assert (base.name, base.path) == (name, base_path)
    config["apar"]["base"] = "organisation/nowhere"
    (named / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=r"names the base 'organisation/nowhere', which is not here: say --base"):
        contestants(named, None)
    assert contestants(named, base_path)[1].path == base_path


@pytest.mark.engine
def test_an_engine_that_does_not_start_is_one_line(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folders[0], broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    result = forq_eval(broken, "--base", folders[1], "--prompts", folders[2], "--kv-budget", "64 blocks")
    assert isinstance(result.exception, Unavailable)
    assert str(result.exception).startswith(f"{broken}: the engine cannot start")
    assert "\n" not in str(result.exception)


def test_prompts_that_do_not_fit_are_left_out_for_both() -> None:
    questions = [Question(row, "x", "") for row in range(4)]
    one = Answer("a", "stop", 1, 1, threads=1, steps=1, peak_cached_tokens=1, attended_tokens=2)
    facts = EngineFacts("vllm", "", 32, 9, 99, 99, 1)
    model, base = Answers({0: one, 1: one, 3: one}, facts, {2: "long"}), Answers({0: one, 3: one}, facts, {})
    assert [row.row for row in pair(questions, model, base)] == [0, 3]


# --- tokens of an answer ---


def answer(text: str, finish_reason: str) -> Answer:
    return Answer(text, finish_reason, 1, 1, threads=1, steps=1, peak_cached_tokens=1, attended_tokens=2)


def test_answers_are_tokenised_as_text_that_goes_on(folders: tuple[Path, Path, Path]) -> None:
    tokenizer = load_tokenizer(folders[1])
    encoder = AnswerEncoder(PromptEncoder(tokenizer), tokenizer)
    end = tokenizer.eos_token_id
    hello = tokenizer("Hello", add_special_tokens=False).input_ids
    assert encoder.encode(answer("Hello", "stop")) == [*hello, end]
    assert encoder.encode(answer("Hello", "length")) == hello
    assert encoder.encode(answer("Hello\ufffd\ufffd", "length")) == hello  # half a character at the cut
    assert encoder.encode(answer("", "stop")) == [end]
    assert encoder.encode(answer("", "length")) == []
    written_out = encoder.encode(answer("</s>[Fork]", "length"))
    assert {end, 3}.isdisjoint(written_out)
    assert tokenizer.decode(written_out) == "</s>[Fork]"


def test_help_names_every_option() -> None:
    context = click.Context(evaluate, info_name="eval")
    text = evaluate.get_help(context)
    for param in evaluate.params:
        assert param.opts[-1] in text or param.name == "model"


def test_errors_are_the_services(folders: tuple[Path, Path, Path]) -> None:
    """The root group prints a `ForqError` as one line; the library's own errors must not pass it."""
    result = forq_eval(folders[0], "--answers", os.devnull)
    assert isinstance(result.exception, ForqError)
