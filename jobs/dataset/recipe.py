"""A recipe: one TOML file that holds a whole run, from the input file to the exported data set.

A recipe is stored with its job in full: templates are in it, paths are absolute, defaults are written out, and the
input's hash says which content it was. So what is stored runs again by itself.
"""

import hashlib
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jobs.dataset.options import ExportOptions
from jobs.dataset.toml_text import toml_text
from jobs.errors import BadInput
from jobs.faults import should_be, shown_name, shown_value, unknown_key
from jobs.remote.urls import is_url
from jobs.source import first_line
from jobs.submit import SubmitOptions

_CHUNK_BYTES = 1 << 20


class TemplateFile(BaseModel):
    """A template that lies in a file of its own, beside the recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    file: str


Template = str | TemplateFile


class Recipe(BaseModel):
    """The keys of a recipe: those of `forq submit`, with underscores, and how to export."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    input: str
    """A path, from the recipe's folder, or a URL."""
    input_sha256: str | None = None
    """Where it is said, a file of other content is refused."""
    model: str | None = None
    decoding: str = "ar"
    name: str | None = None
    priority: int = 0
    kv_share: float | None = None
    id_column: str | None = None
    prompt_column: str | None = None
    messages_column: str | None = None
    template: Template | None = None
    system: Template | None = None
    turn: list[Template] = []
    sampling: dict[str, Any] = Field(default_factory=dict)
    export: ExportOptions | None = None

    def submit_options(self) -> SubmitOptions:
        """Of a recipe that was read: its templates are texts by then."""
        said = self.model_dump(exclude={"input", "input_sha256", "export"})
        return SubmitOptions(**{**said, "turn": tuple(self.turn)})

    def text(self) -> str:
        """As it is stored."""
        said = self.model_dump(exclude_none=True)
        export = {key: value for key, value in said.pop("export", {}).items() if value != []}
        tables = {"sampling": said.pop("sampling"), "export": export}
        plain = {key: value for key, value in said.items() if value != []}
        return toml_text({**plain, **{name: table for name, table in tables.items() if table}})


def read_recipe(path: Path, default_model: str) -> Recipe:
    """Read a recipe file: templates put in, paths made absolute, the model named.

    Raises:
        BadInput: one line that names the key and what it may be.
    """
    try:
        recipe = parse_recipe(path.read_text(encoding="utf-8"), path.name)
    except OSError as error:
        raise BadInput(f"recipe {path} cannot be read ({error.strerror}): name a TOML file") from None
    except UnicodeDecodeError:
        raise BadInput(f"recipe {path} is not UTF-8: write it again") from None
    folder = path.parent.absolute()
    updates: dict[str, Any] = {
        "input": _absolute(folder, recipe.input),
        "model": recipe.model if recipe.model is not None else default_model,
        "template": None if recipe.template is None else _inlined(recipe.template, folder),
        "system": None if recipe.system is None else _inlined(recipe.system, folder),
        "turn": [_inlined(template, folder) for template in recipe.turn],
    }
    if recipe.export is not None and recipe.export.out is not None:
        out = _absolute(folder, recipe.export.out)
        updates["export"] = recipe.export.model_copy(update={"out": out})
    return recipe.model_copy(update=updates)


def parse_recipe(text: str, name: str) -> Recipe:
    """Raises BadInput: it is not TOML, or a key or value is refused."""
    try:
        return Recipe.model_validate(tomllib.loads(text))
    except ValidationError as error:
        faults = dict.fromkeys(_fault(fault) for fault in error.errors() if not _is_other_branch(fault))
        raise BadInput(f"{name}: {'; '.join(faults)}") from None
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError
        raise BadInput(f"{name} is not TOML ({first_line(error)}): correct it") from None


def check_content(recipe: Recipe, file: Path) -> str:
    """The hash of the input's content.

    Raises:
        BadInput: the recipe names another, or the file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with file.open("rb") as reader:
            while chunk := reader.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise BadInput(f"{file}: {(error.strerror or str(error)).lower()}") from None
    found = digest.hexdigest()
    if recipe.input_sha256 not in (None, found):
        raise BadInput(
            f"{file.name} has the hash {found[:12]}…, the recipe was made for {str(recipe.input_sha256)[:12]}…: "
            "use that file, or take input_sha256 out of the recipe"
        )
    return found


def _absolute(folder: Path, name: str) -> str:
    return name if is_url(name) else str(folder / name)


def _inlined(template: Template, folder: Path) -> str:
    if isinstance(template, str):
        return template
    path = folder / template.file
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"template {path} cannot be read: {error}") from None


def _is_other_branch(fault: Any) -> bool:
    """A template is text or a table: what is wrong with it as the other one says nothing."""
    return fault["loc"][-1] == "str" and isinstance(fault["input"], dict)


def _fault(fault: Any) -> str:
    place = [part for part in fault["loc"] if part not in ("str", "TemplateFile")]
    key = shown_name(place)
    if fault["type"] == "missing":
        return f"{key} is missing"
    if fault["type"] == "extra_forbidden":
        model: type[BaseModel] = Recipe
        if place[0] == "export":
            model = ExportOptions
        elif len(place) > 1:
            model = TemplateFile
        return unknown_key(key, list(model.model_fields))
    if fault["type"] == "value_error":  # of several keys together
        return f"{key}: {should_be(fault)}"
    message = should_be(fault).replace("or instance of TemplateFile", 'or {file = "…"}')
    return f"{key} is {shown_value(fault['input'])}: it should be {message}"
