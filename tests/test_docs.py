"""The documentation agrees with the code: settings, error codes, links, commands and TOML examples."""

import ast
import itertools
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest
from pydantic import BaseModel

from db.states import JobState
from jobs.api_settings import ApiSettings
from jobs.batch_settings import BatchSettings
from jobs.cli import forq
from jobs.dataset.options import ExportOptions
from jobs.dataset.recipe import Recipe as RunRecipe
from jobs.dataset.recipe import parse_recipe
from jobs.drop.job_toml import JobFile
from jobs.export import RESULT_FIELDS, TREE_FIELD, TREE_TYPE, TURNS_FIELD
from jobs.sampling import sampling_fields
from jobs.settings import DropSettings, Limits, ModelAlias, QueueSettings, Settings
from jobs.storage_settings import StorageSettings
from jobs.webhook_settings import WebhookSettings
from worker.bootstrap.recipe import Recipe

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WRITTEN_BY_HAND = [page for page in PAGES if page.name != "cli.md"]
CONFIGURATION = ROOT / "docs" / "configuration.md"
QUICKSTART = ROOT / "docs" / "quickstart.md"
SECTIONS: dict[str, type[BaseModel]] = {
    "models": ModelAlias,
    "queue": QueueSettings,
    "drop": DropSettings,
    "limits": Limits,
    "api": ApiSettings,
    "batches": BatchSettings,
    "webhooks": WebhookSettings,
    "storage": StorageSettings,
}


class Block(NamedTuple):
    """A fenced code block and where it begins."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def code_blocks(page: Path) -> Iterator[Block]:
    language, start, lines = "", None, []
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if start is None and line.startswith("```"):
            language, start, lines = line[3:].strip(), number, []
        elif start is not None and line.startswith("```"):
            yield Block(page, start, language, "\n".join(lines))
            start = None
        elif start is not None:
            lines.append(line)
    assert start is None, f"{page.name}:{start}: the code block has no end"


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def in_backticks(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", text))


def blocks(*languages: str) -> list[Block]:
    return [block for page in WRITTEN_BY_HAND for block in code_blocks(page) if block.language in languages]


# --- settings ---


def all_settings() -> list[str]:
    nested = [f"{section}.{name}" for section, model in SECTIONS.items() for name in model.model_fields]
    return [*Settings.model_fields, *nested]


@pytest.mark.parametrize("setting", all_settings())
def test_every_setting_is_in_the_configuration_page(setting: str) -> None:
    assert setting in in_backticks(prose(CONFIGURATION))


def test_no_page_names_a_setting_that_does_not_exist() -> None:
    known = set(all_settings())
    for page in WRITTEN_BY_HAND:
        for name in in_backticks(prose(page)):
            if re.fullmatch(rf"({'|'.join(SECTIONS)})\.\w+", name) and not name.endswith((".py", ".log")):
                # `leases.acquire` and its like are functions; only the settings' sections are looked at.
                assert name in known, f"{page.name} names `{name}`"


def test_the_defaults_in_the_tables_are_those_of_the_code() -> None:
    text = prose(CONFIGURATION)
    for section in ("queue", "drop", "limits", "api", "batches", "webhooks", "storage"):
        for name, field in SECTIONS[section].model_fields.items():
            if not isinstance(field.default, int | float):
                continue
            row = re.search(rf"^\| `{section}\.{name}` \| ([^|]+) \|", text, re.MULTILINE)
            assert row is not None, f"{section}.{name} has no table row of its own"
            assert float(row[1].replace(",", "")) == field.default, f"{section}.{name}"


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_toml_examples_are_accepted(block: Block) -> None:
    values = tomllib.loads(block.text)
    if "job.toml" in block.text:
        JobFile.model_validate(values)
    elif block.text.startswith("# recipe.toml"):
        parse_recipe(block.text, str(block))
    elif "[answers]" in block.text:
        assert Recipe.model_validate(values) == Recipe(), "the page says that it shows the defaults"
    else:
        # Keyword arguments lie over environment and file, so this reads the example and nothing else of its keys.
        Settings.model_validate(values)


def test_the_built_in_alias_is_shown_as_it_is() -> None:
    default = Settings.model_validate({"models": {}}).models
    shown = [
        Settings.model_validate(tomllib.loads(block.text)).models
        for block in blocks("toml")
        if "[models.smollm2-135m]" in block.text
    ]
    assert shown == [default]


# --- error codes ---


def error_codes(source: Path) -> Iterator[str]:
    """Every constant that a source file gives a row as its error code."""
    for node in ast.walk(ast.parse(source.read_text())):
        values: list[ast.expr] = []
        if isinstance(node, ast.Call):
            called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if called in ("RowError", "PromptError"):
                values += node.args[:1]
            elif called == "_refuse":
                values += node.args[1:2]
            values += [keyword.value for keyword in node.keywords if keyword.arg == "error_code"]
        elif isinstance(node, ast.Dict):
            values += [
                value
                for key, value in zip(node.keys, node.values, strict=True)
                if isinstance(key, ast.Constant) and key.value == "error_code"
            ]
        yield from (value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str))


def all_error_codes() -> set[str]:
    sources = [path for room in ("jobs", "worker") for path in (ROOT / room).rglob("*.py")]
    return {code for source in sources for code in error_codes(source)}


def documented_error_codes() -> set[str]:
    section = QUICKSTART.read_text().partition("### Error codes")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))


def test_the_search_for_error_codes_finds_each_kind_of_place() -> None:
    found = all_error_codes()
    assert {"empty_prompt", "no_chat_template", "prompt_too_long", "poison", "job_failed"} <= found


def test_every_error_code_is_in_the_quick_start_and_no_other() -> None:
    assert documented_error_codes() == all_error_codes()


# --- columns, keys, states ---


def test_every_result_column_is_in_the_quick_start_with_its_type() -> None:
    text = QUICKSTART.read_text()
    for field in RESULT_FIELDS:
        assert f"| `{field.name}` | {field.type} |" in text, field.name
    assert f"`{TREE_FIELD.name}`" in text
    assert f"`{TURNS_FIELD.name}`" in text
    for kind in (TREE_TYPE.value_type, TURNS_FIELD.type.value_type):
        names = ", ".join(kind.field(i).name for i in range(kind.num_fields))
        assert f"list<struct<{names}>>" in text


def test_every_key_of_a_recipe_is_in_its_page() -> None:
    named = in_backticks(prose(ROOT / "docs" / "synthetic-data.md"))
    assert set(RunRecipe.model_fields) - {"sampling", "export"} <= named
    assert set(ExportOptions.model_fields) <= named


def test_every_sampling_value_and_key_of_a_job_file_is_in_the_quick_start() -> None:
    named = in_backticks(prose(QUICKSTART))
    assert sampling_fields() <= named
    assert set(JobFile.model_fields) - {"sampling"} <= named


def test_every_job_state_is_in_the_architecture() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for state in JobState:
        assert f"| job `{state}` |" in text


@pytest.mark.parametrize("block", blocks("json"), ids=str)
def test_json_examples_are_json(block: Block) -> None:
    try:
        json.loads(block.text)
    except ValueError:
        for line in block.text.splitlines():
            json.loads(line)


# --- links ---


def anchors(page: Path) -> set[str]:
    """The anchors GitHub makes of a page's headings."""
    found: set[str] = set()
    for title in re.findall(r"^#+ +(.+?) *$", prose(page), re.MULTILINE):
        base = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        anchor, number = base, 0
        while anchor in found:
            number += 1
            anchor = f"{base}-{number}"
        found.add(anchor)
    return found


def test_relative_links_lead_to_files_and_headings_that_exist() -> None:
    faults = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            if not path.exists():
                faults.append(f"{page.name}: {target}: no such file")
            elif anchor and anchor not in anchors(path):
                faults.append(f"{page.name}: {target}: no such heading")
    assert not faults, "\n".join(faults)


def test_every_page_is_linked_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [page.name for page in PAGES[1:] if f"(docs/{page.name})" not in readme] == []


def test_the_readme_names_the_two_commands() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo", "test"):
        assert f"make {target}" in (ROOT / "README.md").read_text()
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


# --- commands ---


def forq_commands(block: Block) -> Iterator[list[str]]:
    """The `forq …` command lines of a shell block; a console's output lines are passed over."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if block.language == "console":
            if not line.startswith("$ "):
                continue
            line = line[2:]
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        words = list(itertools.takewhile(lambda word: word not in (">", "|"), words))
        if words[:1] == ["forq"]:
            yield words[1:]


def shown_commands() -> list[tuple[str, list[str]]]:
    found = [(str(block), words) for block in blocks("sh", "console") for words in forq_commands(block)]
    inline = re.compile(r"`(forq [^`\n]+)`")
    for page in WRITTEN_BY_HAND:
        found += [(page.name, shlex.split(text)[1:]) for text in inline.findall(prose(page))]
    return found


def fault_of(words: list[str]) -> str | None:
    """Why a command line could not run, judged by the click tree alone: nothing is executed."""
    command: click.Command = forq
    context = click.Context(forq, info_name="forq")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        child = command.get_command(context, words[0])
        if child is None:
            return f"{context.command_path} has no command {words[0]!r}"
        command, words = child, words[1:]
        context = click.Context(command, parent=context, info_name=command.name)
    options = {name: option for option in command.get_params(context) if isinstance(option, click.Option)
               for name in (*option.opts, *option.secondary_opts)}  # fmt: skip
    num_arguments = 0
    while words:
        word, words = words[0], words[1:]
        name, has_value, _ = word.partition("=")
        if not word.startswith("-"):
            num_arguments += 1
        elif name not in options and name not in context.help_option_names and name != "--help":
            return f"{context.command_path} has no option {name}"
        elif name in options and not (options[name].is_flag or options[name].count or has_value):
            words = words[1:]
    most = sum(param.nargs for param in command.get_params(context) if isinstance(param, click.Argument))
    if num_arguments > most:
        return f"{context.command_path} takes at most {most} arguments"
    return None


def test_the_judge_of_command_lines_sees_faults() -> None:
    assert fault_of(["submit", "f.parquet", "--max-tokens", "3", "--json"]) is None
    assert fault_of(["submit", "f.parquet", "--max-token", "3"]) is not None
    assert fault_of(["submitt", "f.parquet"]) is not None
    assert fault_of(["status", "JOB", "more"]) is not None
    assert fault_of(["db", "downgrade"]) is not None


def test_every_forq_command_in_the_pages_exists_with_its_flags() -> None:
    shown = shown_commands()
    assert len(shown) > 30
    faults = [f"{where}: forq {shlex.join(words)}: {fault}" for where, words in shown if (fault := fault_of(words))]
    assert not faults, "\n".join(faults)


def test_whole_command_lines_in_code_blocks_have_their_arguments() -> None:
    for block in blocks("sh", "console"):
        for words in forq_commands(block):
            if words[:1] in (["submit"], ["check"], ["wait"], ["export"], ["stats"], ["show"]):
                command = forq.get_command(click.Context(forq), words[0])
                assert command is not None
                try:
                    command.make_context("forq", words[1:])  # parses, and runs nothing
                except click.UsageError as error:
                    raise AssertionError(f"{block}: forq {shlex.join(words)}: {error.message}") from None
