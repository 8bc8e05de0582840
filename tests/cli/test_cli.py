"""The command line's manners: quick help, no heavy imports, and one clear line with the right exit code for every
mistake."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_support import Forq

from db.session import Database
from db.upgrade import downgrade, upgrade
from jobs.cli import COMMANDS, forq
from jobs.lazy_group import LazyGroup

HEAVY = ("torch", "vllm", "transformers", "matplotlib")
NO_JOB = "01JDQXK8V0E3M5T9ZB4W6Y7N2A"


def run_apart(code: str, home: Path, *args: str) -> str:
    """Run Python in a fresh process; returns what it printed."""
    environment = {**os.environ, "FORQ_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-c", code, *args], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def all_commands() -> list[tuple[str, click.Command]]:
    context = click.Context(forq)
    found: list[tuple[str, click.Command]] = [("", forq)]
    for name in forq.list_commands(context):
        command = forq.get_command(context, name)
        assert command is not None
        found.append((name, command))
        if isinstance(command, click.Group):
            found += [(f"{name} {sub}", command.commands[sub]) for sub in command.commands]
    return found


def test_help_answers_in_half_a_second(home: Path) -> None:
    times = []
    for _ in range(5):
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "jobs.cli", "--help"], cwd=Path(__file__).parents[2], capture_output=True, timeout=60
        )
        times.append(time.perf_counter() - started)
        assert done.returncode == 0
    assert min(times) < 0.5


_MODULES_AFTER = """
import contextlib, io, json, sys
from jobs.cli import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(sys.stdout):
    main(sys.argv[1:])
print()
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def modules_after(home: Path, *args: str) -> set[str]:
    return set(json.loads(run_apart(_MODULES_AFTER, home, *args).splitlines()[-1]))


def test_help_imports_nothing_heavy(home: Path) -> None:
    assert modules_after(home, "--help").isdisjoint({*HEAVY, "pyarrow", "sqlalchemy", "celery", "pydantic", "fastapi"})


@pytest.mark.parametrize(
    "args",
    [
        ("submit", "prompts.parquet"),
        ("status", NO_JOB),
        ("list",),
        ("show", NO_JOB, "0"),
        ("worker", "--help"),
        ("check", "--help"),
    ],
    ids=lambda args: args[0],
)
def test_a_laptop_without_an_engine_can_submit_and_ask(home: Path, prompts: Path, args: tuple[str, ...]) -> None:
    assert modules_after(home, *args).isdisjoint(HEAVY)


def test_every_command_of_the_contract_is_there() -> None:
    contract = "up down submit status wait list cancel retry export show stats judge check worker api watch db ps "
    contract += "data train train-medusa eval bootstrap keys webhooks purge doctor run recipe"
    assert list(COMMANDS) == sorted(contract.split(), key=list(COMMANDS).index)
    assert set(COMMANDS) == set(contract.split())


@pytest.mark.parametrize(("name", "command"), all_commands(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_command_has_help_an_example_and_a_line_for_each_option(
    run: Forq, name: str, command: click.Command
) -> None:
    result = run(*name.split(), "--help")
    assert result.exit_code == 0
    assert len((command.help or "").split("\n")[0]) > 10
    assert "Example:" in result.out
    assert f"forq {name}".strip() in result.out.partition("Example:")[2]
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden and option.name != "template_file":
            assert option.help, f"--{option.name} of {name} has no help"


def test_the_one_line_of_each_command_is_not_another_story_than_its_help() -> None:
    assert isinstance(forq, LazyGroup)
    assert all(line.endswith(".") for _, line in COMMANDS.values())


def test_the_version_is_told(run: Forq) -> None:
    result = run("--version")
    assert (result.exit_code, result.out.split()[0]) == (0, "forq,")


MISTAKES: dict[str, tuple[tuple[str, ...], str]] = {
    "no such file": (("submit", "nowhere.parquet"), "nowhere.parquet: no such file"),
    "a folder": (("submit", "folder.parquet"), "not a regular file"),
    "another kind of file": (("submit", "prompts.csv"), "forq reads .parquet"),
    "not Parquet inside": (("submit", "text.parquet"), "not a readable Parquet file"),
    "cut off": (("submit", "cut.parquet"), "not a readable Parquet file"),
    "no rows": (("submit", "empty.parquet"), "0 rows"),
    "a column twice": (("submit", "twice.parquet"), "twice"),
    "no such column": (("submit", "prompts.parquet", "--prompt-column", "promt"), "did you mean 'prompt'?"),
    "a column of numbers": (("submit", "prompts.parquet", "--prompt-column", "number"), "prompts are strings"),
    "no such id column": (("submit", "prompts.parquet", "--id-column", "key"), "no column 'key'"),
    "unknown model": (("submit", "prompts.parquet", "--model", "gpt-9"), "known aliases: smollm2-135m"),
    "a path as the model": (("submit", "prompts.parquet", "--model", "/etc"), "not configured"),
    "temperature NaN": (("submit", "prompts.parquet", "--temperature", "nan"), "finite number, not nan"),
    "temperature infinite": (("submit", "prompts.parquet", "--temperature", "inf"), "finite number, not inf"),
    "temperature too hot": (("submit", "prompts.parquet", "--temperature", "9"), "temperature is 9.0"),
    "top-p 0": (("submit", "prompts.parquet", "--top-p", "0"), "top_p is 0.0: it should be greater than 0"),
    "max-tokens 0": (("submit", "prompts.parquet", "--max-tokens", "0"), "max_tokens is 0"),
    "max-tokens beyond reason": (("submit", "prompts.parquet", "--max-tokens", "999999999"), "limit is 131072"),
    "n beyond reason": (("submit", "prompts.parquet", "--n", "65"), "n is 65, the limit is 64"),
    "negative seed": (("submit", "prompts.parquet", "--seed", "-1"), "seed is -1"),
    "priority beyond reason": (("submit", "prompts.parquet", "--priority", "9999999"), "between -1000 and 1000"),
    "a name with control characters": (("submit", "prompts.parquet", "--name", "a\x1b[2Jb"), "control characters"),
    "apar of a model that does not fork": (
        ("submit", "prompts.parquet", "--decoding", "apar"), "name fork_token and child_token in [models.smollm2-135m]"
    ),
    "unknown decoding": (("submit", "prompts.parquet", "--decoding", "beam"), "use apar or ar"),
    "a decoding that vLLM does not have": (
        ("submit", "prompts.parquet", "--decoding", "ptd"), 'use apar or ar, or say backend = "reference"'
    ),
    "no share of the KV budget": (("submit", "prompts.parquet", "--kv-share", "0"), "above 0 and at most 1"),
    "more than the KV budget": (("submit", "prompts.parquet", "--kv-share", "1.5"), "--kv-share is 1.5"),
    "a template as text": (
        ("submit", "prompts.parquet", "--template", "Tell me\n\x1b {{ prompt }}"),
        "Tell me   {{ prompt }} cannot be read",
    ),
    "no such template": (("submit", "prompts.parquet", "--template", "nowhere.j2"), "the name of a file"),
    "a template with an unknown column": (("submit", "prompts.parquet", "--template", "t.j2"), "uses nope"),
    "a template that does not parse": (("submit", "prompts.parquet", "--template", "bad.j2"), "does not parse"),
    "a template and a column": (
        ("submit", "prompts.parquet", "--template", "t.j2", "--prompt-column", "prompt"), "not several"
    ),
    "no such job": (("status", NO_JOB), f"no job {NO_JOB}"),
    "a job id of control characters": (("status", "\x1b[31m\0"), "no job"),
    "no such job to wait for": (("wait", NO_JOB), "no job"),
    "no such job to cancel": (("cancel", NO_JOB), "no job"),
    "no such job to retry": (("retry", NO_JOB), "no job"),
    "no such job to export": (("export", NO_JOB, "out.parquet"), "no job"),
    "no such job to show": (("show", NO_JOB, "0"), "no job"),
    "no such job's receipt": (("stats", NO_JOB), "no job"),
    "no such job to draw": (("show", NO_JOB, "0", "--svg", "x.svg"), "no job"),
    "a state that does not exist": (("list", "--state", "done"), "use one of queued, running"),
    "a list without limit": (("list", "--limit", "0"), "between 1 and 1000"),
    "a worker for an unknown model": (("worker", "--model", "gpt-9"), "known aliases"),
    "everything for an unknown model": (("up", "--model", "gpt-9"), "known aliases"),
    "a dry run with an unknown model": (("check", "prompts.parquet", "--model", "gpt-9"), "known aliases"),
}  # fmt: skip


@pytest.fixture
def mistaken_files(prompts: Path) -> None:
    Path("folder.parquet").mkdir()
    Path("prompts.csv").write_text("prompt\na\n")
    Path("text.parquet").write_text("prompt\na\n")
    Path("cut.parquet").write_bytes(prompts.read_bytes()[:-20])
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), "empty.parquet")
    pq.write_table(
        pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"]), "twice.parquet"
    )
    Path("t.j2").write_text("{{ nope }}")
    Path("bad.j2").write_text("{% for %}")


@pytest.mark.usefixtures("mistaken_files")
@pytest.mark.parametrize(("args", "says"), MISTAKES.values(), ids=MISTAKES)
def test_bad_input_exits_with_2_and_one_line(run: Forq, args: tuple[str, ...], says: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert result.out == ""
    assert result.err.startswith("forq: ")
    assert says in result.err
    assert result.err.count("\n") == 1
    assert "\x1b" not in result.err.replace("\x1b[31m", "") or "job" not in says
    assert len(result.err) < 500


@pytest.mark.parametrize(
    "args",
    [
        ("frobnicate",),
        ("submti", "x.parquet"),
        ("submit",),
        ("submit", "a.parquet", "b.parquet"),
        ("submit", "a.parquet", "--max-tokens", "many"),
        ("submit", "a.parquet", "--temprature", "1"),
        ("status",),
        ("wait", NO_JOB, "--timeout", "soon"),
        ("show", NO_JOB, "first"),
        ("export", NO_JOB, "out", "--format", "csv"),
        ("db", "downgrade"),
    ],
    ids=" ".join,
)
def test_bad_usage_exits_with_2_and_says_what_is_wrong_in_one_line(run: Forq, args: tuple[str, ...]) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert result.out == ""
    (line,) = result.err.splitlines()
    assert line.startswith("forq: ")
    assert line.endswith("--help`")
    assert "Traceback" not in result.err


def test_a_mistyped_command_gets_a_suggestion(run: Forq) -> None:
    assert "did you mean 'submit'?" in run("submti").err


CONFIGURATIONS = {
    "an unknown key": ("colour = 'red'", "colour: Extra inputs are not permitted"),
    "an unknown key of a model": ("[models.m]\npath = '/m'\nkv_buget = '1 GiB'", "models.m.kv_buget"),
    "an unknown key of the queue": ("[queue]\nshard_row = 4", "queue.shard_row"),
    "a budget in potatoes": ("[models.m]\npath = '/m'\nkv_budget = '3 potatoes'", "write it like '256 MiB'"),
    "a budget of nothing": ("[models.m]\npath = '/m'\nkv_budget = '0 blocks'", "greater than 0"),
    "a budget without a unit": ("[models.m]\npath = '/m'\nkv_budget = 1024", "write it like '256 MiB'"),
    "an alias in capitals": ("[models.'Big Model']\npath = '/m'", "lower-case letters"),
    "not TOML": ("models = [", "cannot be read"),
    "one control token": ("[models.m]\npath = '/m'\nfork_token = '[F]'", "name both or neither"),
    "one control token twice": ("[models.m]\nfork_token = 'x'\nchild_token = 'x'", "they are two tokens"),
    "threads of nothing": ("[models.m.forks]\nmax_width = 0", "models.m.forks.max_width"),
    "an unknown limit of forks": ("[models.m.forks]\nmax_with = 3", "models.m.forks.max_with"),
    "shards of no rows": ("[queue]\nshard_rows = 0", "greater than or equal to 1"),
    "an impossible port": ("api_port = 70000", "less than or equal to 65535"),
}


@pytest.mark.parametrize(("toml", "says"), CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_a_bad_configuration_is_refused_by_every_command_in_one_line(run: Forq, toml: str, says: str) -> None:
    Path("forq.toml").write_text(toml)
    result = run("list")
    assert (result.exit_code, result.out) == (2, "")
    assert says in result.err
    assert result.err.startswith("forq: configuration ")
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("FORQ_API_PORT", "abc", "api_port"),
        ("FORQ_CONFIG", "/nowhere/forq.toml", "not a file"),
        ("FORQ_QUEUE__LEASE_S", "-1", "queue.lease_s"),
        ("FORQ_MODELS", "{not json", "cannot be read"),
    ],
)
def test_a_bad_variable_is_refused_in_one_line(
    run: Forq, monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    monkeypatch.setenv(name, value)
    result = run("list")
    assert (result.exit_code, result.out) == (2, "")
    assert says in result.err
    assert result.err.count("\n") == 1


def test_a_database_without_tables_names_the_command_that_makes_them(
    run: Forq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORQ_DATABASE_URL", f"sqlite:///{tmp_path / 'empty.db'}")
    result = run("list")
    assert result.exit_code == 1
    assert "run `forq db upgrade`" in result.err
    assert result.err.count("\n") == 1
    assert run("db", "upgrade").exit_code == 0
    assert run("list", "--json").out == "[]\n"


def test_a_worker_refuses_a_database_at_another_revision(
    run: Forq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path / 'old.db'}"
    upgrade(url)
    downgrade(url, "0001")
    monkeypatch.setenv("FORQ_DATABASE_URL", url)
    result = run("worker")
    assert result.exit_code == 1
    assert "the database is at revision 0001" in result.err
    assert "forq db upgrade" in result.err
    assert result.err.count("\n") == 1


def test_a_database_that_does_not_answer_is_named(run: Forq, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORQ_DATABASE_URL", "postgresql://nobody:secret@127.0.0.1:9/nothing")
    result = run("list")
    assert result.exit_code == 1
    assert "check FORQ_DATABASE_URL" in result.err
    assert "secret" not in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("home_text", ["{file}/home", "/proc/forq"], ids=["a file in its way", "unwritable"])
@pytest.mark.parametrize("args", [("list",), ("submit", "prompts.parquet"), ("up", "--detach")], ids=lambda a: a[0])
def test_a_home_that_cannot_be_made_is_named_in_one_line(
    run: Forq, prompts: Path, monkeypatch: pytest.MonkeyPatch, home_text: str, args: tuple[str, ...]
) -> None:
    value = home_text.format(file=prompts)
    monkeypatch.setenv("FORQ_HOME", value)
    result = run(*args)
    assert result.exit_code == 1
    assert result.err.startswith("forq: ")
    assert value in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("url", ["nonsense", "mysql://root:secret@localhost/x"])
def test_a_database_that_is_not_supported_is_refused_in_one_line(
    run: Forq, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("FORQ_DATABASE_URL", url)
    result = run("list")
    assert result.exit_code == 2
    assert result.err.startswith("forq: ")
    assert "database_url: write sqlite:///FILE or postgresql://" in result.err
    assert "secret" not in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("timeout", ["nan", "-1"])
def test_a_time_to_wait_that_is_none_is_refused(run: Forq, prompts: Path, timeout: str) -> None:
    job = json.loads(run("submit", prompts, "--json").out)["job_id"]
    result = run("wait", job, "--timeout", timeout)
    assert result.exit_code == 2
    assert "timeout" in result.err


def test_a_job_without_a_worker_is_queued_and_can_be_asked_about(run: Forq, prompts: Path) -> None:
    submitted = run("submit", prompts, "--json", "--name", "first", "--id-column", "number")
    assert submitted.exit_code == 0
    job = json.loads(submitted.out)["job_id"]
    status: dict[str, Any] = json.loads(run("status", job.lower(), "--json").out)
    assert list(status) == [
        "job_id", "name", "state", "model", "decoding", "counts", "created_at", "started_at", "finished_at", "eta_s",
        "output_tokens", "error",
    ]  # fmt: skip
    assert (status["state"], status["name"], status["counts"]["total"]) == ("queued", "first", 3)
    waited = run("wait", job, "--timeout", "0.1", "--json")
    assert waited.exit_code == 1
    assert json.loads(waited.out)["state"] == "queued"
    assert run("export", job, "out.parquet").exit_code == 0
    assert pq.read_table("out.parquet").num_rows == 3
    assert run("retry", job).exit_code == 1
    assert json.loads(run("cancel", job, "--json").out)["state"] == "cancelled"
    assert run("cancel", job).exit_code == 1
    assert run("wait", job).exit_code == 1
    assert [found["job_id"] for found in json.loads(run("list", "--json").out)] == [job]
    assert json.loads(run("stats", job, "--json").out)["num_samples"] == 0
    assert run("show", job, "3").exit_code == 2
    assert json.loads(run("show", job, "2", "--json").out)["state"] == "cancelled"
    assert json.loads(run("ps", "--json").out) == []
    assert (run("down").exit_code, run("down").out) == (0, "forq is not up\n")


def test_output_goes_to_a_pipe_that_closes_early_without_a_traceback(home: Path) -> None:
    code = "import sys; from jobs.cli import main; main(['--help'])"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert b"Traceback" not in process.stderr.read()
    process.wait(30)


def test_a_database_of_a_newer_version_is_not_silently_used(run: Forq, home: Path, prompts: Path) -> None:
    assert run("submit", prompts).exit_code == 0
    database = Database(f"sqlite:///{home / 'forq.db'}")
    with database.write() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    database.dispose()
    result = run("worker")
    assert result.exit_code == 1
    assert "revision 9999" in result.err
    assert result.err.count("\n") == 1
