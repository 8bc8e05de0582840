"""The commands that make a data set: submit with turns, export, run a recipe, print one."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_support import Forq

from db.session import Database
from jobs import leases, results
from jobs.dataset.recipe import parse_recipe
from jobs.errors import BadInput
from jobs.settings import DEFAULT_MODEL

OWNER = "0" * 26
TEXTS = ["Tea is hot.", "tea is HOT.", "Rain is wet.", "cut off wi", "As an AI, no.", "Tea is hot.", "Snow.", "Ice."]
RECIPE = """
input = "topics.parquet"
name = "synth"
template = {file = "user.j2"}
system = "Be short."
turn = ["Again: {{ answers[0] }}"]

[sampling]
n = 2
max_tokens = 8

[export]
out = "sft.jsonl"
format = "messages"
finish_reason = "stop"
no_match = '(?i)\\bas an ai\\b'
dedup = "exact"
"""


def answer_all(home: Path) -> None:
    """Answer what waits, as a worker would: the texts in turn, the fourth one cut."""
    database = Database(f"sqlite:///{home / 'forq.db'}")
    try:
        while (lease := leases.acquire(database, DEFAULT_MODEL, OWNER, 60.0)) is not None:
            rows = results.load(database, lease).rows
            results.write(database, lease, [answered(row) for row in rows])
            leases.finish(database, lease)
    finally:
        database.dispose()


def answered(row: results.PendingRow) -> results.RowResult:
    samples = []
    for number in range(row.sampling.n or 1):
        place = row.row_index * (row.sampling.n or 1) + number
        text = TEXTS[place % len(TEXTS)]
        turns = tuple(results.Turn("first", "stop", 4, 1) for _ in row.payload.get("turns", []))
        reason = "length" if place == 3 else "stop"
        samples.append(results.SampleResult(text, reason, 5, len(text.split()), None, (), turns=turns))
    return results.RowResult(row.request_id, tuple(samples))


@pytest.fixture
def recipe(home: Path) -> Path:
    pq.write_table(pa.table({"topic": ["tea", "rain", "snow", "ice"]}), "topics.parquet")
    Path("user.j2").write_text('Tell me of\n{{ topic }}, "plainly".')
    Path("recipe.toml").write_text(RECIPE)
    return Path("recipe.toml").absolute()


@pytest.fixture
def job(run: Forq, home: Path, recipe: Path) -> str:
    """The recipe's job, answered."""
    done = run("run", str(recipe), "--submit-only", "--json")
    assert done.exit_code == 0, done.err
    answer_all(home)
    return str(json.loads(done.out)["job_id"])


def lines_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


def test_submit_takes_templates_of_a_system_prompt_and_of_turns(run: Forq, home: Path, recipe: Path) -> None:
    Path("s.j2").write_text("About {{ topic }}.")
    Path("t.j2").write_text("Why {{ answers[0] }}?")
    done = run("submit", "topics.parquet", "--template", "user.j2", "--system", "s.j2", "--turn", "t.j2",
               "--turn", "t.j2", "--json")  # fmt: skip
    assert done.exit_code == 0, done.err
    job = json.loads(done.out)["job_id"]
    answer_all(home)
    assert run("export", job, "all.parquet").exit_code == 0
    table = pq.read_table("all.parquet")
    assert [turn["content"] for turn in table["forq_turns"][0].as_py()] == ["first", "first"]
    shown = run("show", job, "0")
    assert "turn 2: 1 tokens, stop" in shown.out
    done = run("submit", "topics.parquet", "--template", "user.j2", "--turn", "none.j2")
    assert (done.exit_code, done.err.startswith("forq: template none.j2 cannot be read")) == (2, True)


def test_a_job_without_turns_has_no_column_for_them(run: Forq, home: Path, prompts: Path) -> None:
    job = json.loads(run("submit", str(prompts), "--json").out)["job_id"]
    answer_all(home)
    run("export", job, "all.parquet")
    assert "forq_turns" not in pq.read_schema("all.parquet").names


def test_the_same_recipe_is_the_same_job_which_it_exports_again(run: Forq, home: Path, recipe: Path, job: str) -> None:
    done = run("run", str(recipe), "--json")
    assert done.exit_code == 0, done.err
    printed = json.loads(done.out)
    assert printed["job_id"] == job
    counts = printed["counts"]
    assert (counts["rows"], counts["answers"], counts["written"]) == (4, 8, 4)
    assert {name: number for name, number in counts["removed"].items() if number} == {
        "finish_reason": 1, "no_match": 1, "exact_duplicate": 2
    }  # fmt: skip
    assert lines_of("sft.jsonl")[0] == {
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": 'Tell me of\ntea, "plainly".'},
            {"role": "assistant", "content": "first"},
            {"role": "user", "content": "Again: first"},
            {"role": "assistant", "content": "Tea is hot."},
        ]
    }
    text = run("run", str(recipe)).out
    assert f"job {job}: 4 rows, submitted before" in text
    assert "removed: exact duplicate\t2" in text
    assert "4 rows in " in text


def test_another_export_section_is_the_same_job_and_what_its_exports_begin_with(
    run: Forq, recipe: Path, job: str
) -> None:
    recipe.write_text(RECIPE.replace('dedup = "exact"', "test_share = 0.5"))
    done = json.loads(run("run", str(recipe), "--json").out)
    assert (done["job_id"], done["counts"]["written"]) == (job, 6)
    assert len(lines_of("sft.jsonl")) + len(lines_of("sft.test.jsonl")) == 6
    again = json.loads(run("export", job, "--json").out)
    assert again == done
    over = json.loads(run("export", job, "few.parquet", "--format", "sharegpt", "--max-chars", "5", "--json").out)
    assert over["counts"]["removed"]["max_chars"] == 5
    assert Path("few.test.parquet").exists()
    plain = json.loads(run("export", job, "all.parquet", "--no-recipe", "--json").out)
    assert plain == {"job_id": job, "file": "all.parquet", "rows": 8}
    failed = json.loads(run("export", job, "failed.parquet", "--failed", "--json").out)
    assert failed["rows"] == 0


def test_another_question_or_again_is_another_job(run: Forq, recipe: Path, job: str) -> None:
    jobs = {job}
    jobs.add(json.loads(run("run", str(recipe), "--submit-only", "--again", "--json").out)["job_id"])
    recipe.write_text(RECIPE.replace("Be short.", "Be long."))
    jobs.add(json.loads(run("run", str(recipe), "--submit-only", "--json").out)["job_id"])
    assert len(jobs) == 3


def test_a_stored_recipe_runs_by_itself_from_anywhere(
    run: Forq, recipe: Path, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = run("recipe", job)
    assert stored.exit_code == 0
    values = tomllib.loads(stored.out)
    assert values["template"] == 'Tell me of\n{{ topic }}, "plainly".'
    assert values["model"] == DEFAULT_MODEL
    assert values["export"]["near_threshold"] == 0.8
    (tmp_path / "elsewhere").mkdir()
    elsewhere = tmp_path / "elsewhere" / "again.toml"
    elsewhere.write_text(stored.out)
    Path("user.j2").unlink()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert json.loads(run("run", str(elsewhere), "--submit-only", "--json").out)["job_id"] == job
    assert run("recipe", job).out == stored.out


def test_an_input_of_other_content_is_not_what_the_recipe_was_made_for(run: Forq, recipe: Path, job: str) -> None:
    Path("again.toml").write_text(run("recipe", job).out)
    pq.write_table(pa.table({"topic": ["coal"]}), "topics.parquet")
    done = run("run", "again.toml")
    assert done.exit_code == 2
    assert "the recipe was made for" in done.err
    assert "use that file, or take input_sha256 out of the recipe" in done.err


def test_a_job_that_was_cancelled_is_said_to_be(run: Forq, recipe: Path) -> None:
    job = json.loads(run("run", str(recipe), "--submit-only", "--json").out)["job_id"]
    run("cancel", job)
    done = run("run", str(recipe))
    assert done.exit_code == 1
    assert f"job {job} is cancelled: `forq retry {job}`, or run the recipe with --again" in done.err


def test_a_job_without_a_recipe_has_none_to_print(run: Forq, prompts: Path) -> None:
    job = json.loads(run("submit", str(prompts), "--json").out)["job_id"]
    done = run("recipe", job)
    assert (done.exit_code, done.out) == (2, "")
    assert "was submitted without a recipe" in done.err
    done = run("export", job)
    assert (done.exit_code, done.err) == (2, "forq: Missing argument 'OUT'; see `forq export --help`\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a.jsonl", "--near-threshold", "1.5"), "--near-threshold is 1.5: it should be less than or equal to 1"),
        (("a.jsonl", "--min-chars", "-1"), "--min-chars is -1: it should be greater than or equal to 0"),
        (("a.jsonl", "--test-share", "nan"), "--test-share is nan: it should be less than 1"),
        (("a.jsonl", "--match", "("), "--match '(' is no regular expression"),
        (("a.jsonl", "--format", "messages", "--column", "topik"), "there is no column 'topik' to keep; did you mean"),
        (("a.txt", "--format", "messages"), "the suffix is '.txt'"),
        (
            ("a.jsonl", "--format", "openai", "--dedup", "exact"),
            "the format openai is not for a data set",
        ),
        (("a.jsonl", "--min-chars", "9", "--max-chars", "5"), "min_chars is 9 and max_chars 5: no answer is so"),
        (("a.jsonl", "--failed", "--dedup", "exact"), "--failed, --with-trees and --with-logprobs are not for a data"),
    ],
)
def test_what_an_export_cannot_do_is_refused_with_one_line(
    run: Forq, recipe: Path, job: str, arguments: tuple[str, ...], message: str
) -> None:
    done = run("export", job, *arguments)
    assert done.exit_code == 2
    assert message in done.err
    assert done.err.count("\n") <= 2
    assert not Path("a.jsonl").exists()


def test_an_export_of_nothing_says_so(run: Forq, recipe: Path, job: str) -> None:
    done = run("export", job, "none.jsonl", "--min-chars", "1000")
    assert done.exit_code == 0
    assert "none.jsonl has no rows, and `datasets` loads no empty file" in done.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "input is missing"),
        ('input = "a"\nmodle = "x"', "'modle' is not a known key (did you mean 'model'?): use input,"),
        ('input = "a"\n[export]\ndedupe = "near"', "'export.dedupe' is not a known key (did you mean 'dedup'?)"),
        ('input = "a"\n[export]\nformat = "csv"', "export.format is 'csv': it should be 'messages', 'sharegpt'"),
        ('input = "a"\ntemplate = {fil = "x"}', "'template.fil' is not a known key (did you mean 'file'?)"),
        ('input = "a"\nturn = [1]', "turn.0 is 1: it should be a valid string"),
        ('input = "a"\npriority = "high"', "priority is 'high': it should be a valid integer"),
        ("input = ", "is not TOML"),
    ],
)  # fmt: skip
def test_a_recipe_is_read_strictly_and_its_faults_are_named(text: str, message: str) -> None:
    with pytest.raises(BadInput) as raised:
        parse_recipe(text, "recipe.toml")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("Be short.", "{{ nope }}"), "the system template uses nope"),
        (("max_tokens = 8", "max_tokens = 0"), "max_tokens is 0"),
        (("max_tokens = 8", "max_token = 8"), "max_token is not a sampling value"),
        (("user.j2", "missing.j2"), "missing.j2 cannot be read"),
        (("topics.parquet", "missing.parquet"), "missing.parquet: no such file"),
        (('name = "synth"', 'model = "unknown"'), "unknown"),
        (("(?i)", "("), "--no-match"),
        (("sft.jsonl", "nowhere/sft.jsonl"), "not a file in a folder that exists"),
        (("sft.jsonl", "sft"), "a folder is for a split"),
        (("sft.jsonl", "s3://bucket/sft.jsonl"), "no URL may be used here"),
        (('dedup = "exact"', "min_tokens = 9\nmax_tokens = 5"), "export: min_tokens is 9 and max_tokens 5"),
    ],
)
def test_a_recipe_that_cannot_run_stores_nothing(
    run: Forq, recipe: Path, change: tuple[str, str], message: str
) -> None:
    recipe.write_text(RECIPE.replace(*change))
    done = run("run", str(recipe))
    assert done.exit_code == 2
    assert message in done.err
    assert json.loads(run("list", "--json").out) == []


def test_a_column_that_there_is_not_is_told_before_the_answers_are_waited_for(run: Forq, recipe: Path) -> None:
    recipe.write_text(RECIPE + 'column = ["topik"]\n')
    done = run("run", str(recipe))
    assert done.exit_code == 2
    assert "there is no column 'topik' to keep; did you mean 'topic'" in done.err
    (job,) = json.loads(run("list", "--json").out)
    recipe.write_text(RECIPE + 'column = ["topic"]\n')
    mended = run("run", str(recipe), "--submit-only", "--json")
    assert json.loads(mended.out)["job_id"] == job["job_id"], "nothing is asked twice"


def test_run_and_export_write_the_same_rows(run: Forq, home: Path, recipe: Path) -> None:
    pq.write_table(pa.table({"topic": ["tea", None]}), "topics.parquet")
    for out, said, num_lines in (("all.jsonl", "", 3), ("lines.jsonl", 'format = "openai"', 2)):
        recipe.write_text(RECIPE[: RECIPE.index("[export]")] + f'[export]\nout = "{out}"\n{said}\n')
        job = json.loads(run("run", str(recipe), "--submit-only", "--json").out)["job_id"]
        answer_all(home)
        done = run("run", str(recipe))
        assert done.exit_code == 0, done.err
        ran = Path(out).read_text()
        assert run("export", job).exit_code == 0
        assert Path(out).read_text() == ran
        assert len(lines_of(out)) == num_lines, "two answers, in one line or two, and the row without a topic"
    assert {"id", "custom_id", "response", "error"} <= lines_of("lines.jsonl")[0].keys()
