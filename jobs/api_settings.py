"""The settings of the REST API: who must show a key, how often one may ask, TLS."""

import ipaddress
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator


class ApiSettings(BaseModel):
    """One entry of the configuration, `[api]`. Address and port are `api_host` and `api_port`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    require_keys: Literal["auto"] | bool = "auto"
    """`auto`: from the first key that is ever made, and on every address that other machines reach."""
    rate_per_minute: int = Field(default=1200, ge=0)
    """Requests of one key; 0 is no limit."""
    rate_burst: int = Field(default=200, ge=1)
    """Requests that a key which has been quiet may send at once."""
    failures_per_minute: int = Field(default=60, ge=0)
    """Bad keys from one address; 0 is no limit."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks whose `X-Forwarded-For` is believed."""
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    ssl_keyfile_password: SecretStr | None = None

    @field_validator("trusted_proxies")
    @classmethod
    def _are_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            try:
                ipaddress.ip_network(text)
            except ValueError:
                raise ValueError(f"{text!r} is no address or network: write 10.0.0.7 or 10.0.0.0/24") from None
        return value

    @model_validator(mode="after")
    def _a_private_key_has_a_certificate(self) -> Self:
        if self.ssl_certfile is None and (self.ssl_keyfile is not None or self.ssl_keyfile_password is not None):
            raise ValueError("ssl_keyfile stands without ssl_certfile: name the certificate, too")
        return self
