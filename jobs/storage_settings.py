"""The settings of object storage: under which URLs inputs may be read and outputs written."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from jobs.errors import BadInput
from jobs.remote.urls import Url, is_under, parse_root


class StorageRoot(BaseModel):
    """A bucket or folder; everything under it may be used. Credentials come from the environment, never from here."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    """With a slash at its end."""
    write: bool = True
    """False: only for inputs."""
    tenants: tuple[str, ...] | None = None
    """Whose API keys may use it; null: everybody's. The command line may use every root."""
    endpoint_override: str | None = None
    """`https://host:port` of a server that speaks S3 or GCS; null: `AWS_ENDPOINT_URL`, or the cloud's own."""
    region: str | None = None
    anonymous: bool = False
    """Ask without credentials, for public buckets."""

    @model_validator(mode="before")
    @classmethod
    def _a_text_is_the_url(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) else value

    @field_validator("url")
    @classmethod
    def _is_a_root(cls, value: str) -> str:
        try:
            return str(parse_root(value))
        except BadInput as error:
            raise ValueError(str(error)) from None

    @field_validator("endpoint_override")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        if value is None:
            return None
        scheme, _, rest = value.partition("://")
        if scheme not in ("http", "https") or not rest.rstrip("/") or any(char in rest.rstrip("/") for char in "/@?#"):
            # Not repeated: it may hold a password.
            raise ValueError("endpoint_override is no address: write https://HOST or http://HOST:PORT, without a user")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _options_are_those_of_the_scheme(self) -> Self:
        scheme = self.parsed.scheme
        said = [name for name in ("endpoint_override", "region") if getattr(self, name) is not None]
        said += ["anonymous"] if self.anonymous else []
        if scheme == "file" and said:
            raise ValueError(f"{self.url}: {said[0]} has no meaning for files: remove it")
        if scheme == "gs" and self.region is not None:
            raise ValueError(f"{self.url}: GCS finds the region itself: remove it")
        return self

    @property
    def parsed(self) -> Url:
        return parse_root(self.url)


class StorageSettings(BaseModel):
    """One entry of the configuration, `[storage]`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    roots: tuple[StorageRoot, ...] = ()
    connect_timeout_s: float = Field(default=10.0, gt=0)
    request_timeout_s: float = Field(default=30.0, gt=0)
    """A request that moves no byte for this long has failed."""
    max_attempts: int = Field(default=3, ge=1, le=20)
    """Of one request."""
    stall_s: float = Field(default=120.0, gt=0)
    """A transfer that gets no further for this long, retries included, is given up."""

    @model_validator(mode="after")
    def _roots_differ(self) -> Self:
        urls = [root.url for root in self.roots]
        twice = sorted({url for url in urls if urls.count(url) > 1})
        if twice:
            raise ValueError(f"storage.roots has {twice[0]} twice: name it once")
        return self

    def root_of(self, url: Url, *, to_write: bool, tenant: str | None) -> StorageRoot:
        """The root that allows a URL; the deepest, where several do.

        Args:
            tenant: of the API's caller; None for the operator, who may use every root.

        Raises:
            BadInput: there is none.
        """
        if not self.roots:
            raise BadInput(
                f"{url}: no URL may be used here, storage.roots is empty: add a root to it, or send the file itself"
            )
        found = [root for root in self.roots if is_under(url, root.parsed)]
        # The deepest first, whosever it is: it is there to say something else than those around it.
        root = max(found, key=lambda root: len(root.url), default=None)
        if root is None or (tenant is not None and root.tenants is not None and tenant not in root.tenants):
            raise BadInput(f"{url} is under none of the roots that you may use: use one of storage.roots, or add it")
        if to_write and not root.write:
            raise BadInput(f"{url} is under a root that is read only: use another, or set its write = true")
        return root
