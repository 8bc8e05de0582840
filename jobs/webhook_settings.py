"""The settings of webhooks: where they may point, and how persistently they are sent."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from jobs.errors import BadInput
from jobs.webhooks.urls import Allowed, parse_allowed


class AllowedWebhook(BaseModel):
    """One entry of `webhooks.allow`; a bare text is one with nothing but its `url`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    """An origin, `https://hooks.example.com/`, or a path in it below which every address is allowed."""
    allow_private: bool = False
    """Whether its name may lead to addresses of private networks."""

    @model_validator(mode="before")
    @classmethod
    def _a_text_is_its_url(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _can_be_allowed(self) -> Self:
        try:
            self.parsed()
        except BadInput as error:
            raise ValueError(str(error)) from None
        return self

    def parsed(self) -> Allowed:
        return parse_allowed(self.url, allow_private=self.allow_private)


class WebhookSettings(BaseModel):
    """One entry of the configuration, `[webhooks]`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    allow: tuple[AllowedWebhook, ...] = ()
    """Nothing is allowed, and nothing sent, while it is empty."""
    max_attempts: int = Field(default=10, ge=1, le=100)
    """After so many an event is given up; ten take about a day."""
    max_age_s: float = Field(default=259_200.0, gt=0)
    """An event that could not be delivered for this long is given up, however often it was tried."""
    connect_timeout_s: float = Field(default=5.0, gt=0)
    timeout_s: float = Field(default=10.0, gt=0, le=60)
    """One attempt from the look-up of the name to the answer's headers."""
    concurrency: int = Field(default=16, ge=1, le=256)
    """Attempts of one sender at once."""
    poll_s: float = Field(default=1.0, gt=0)

    @property
    def allowed(self) -> tuple[Allowed, ...]:
        return tuple(entry.parsed() for entry in self.allow)
