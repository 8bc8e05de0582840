"""What a model, an engine and a request say about forking: control tokens, limits, seeds.

The words come from three places, the later ones over the earlier: the model folder's `config.json` (key `apar`), vLLM's
`additional_config` (key `apar`), and, only ever lowering a limit, the request's `extra_args` (key `apar`).
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

MAX_SEED = 2**63 - 1


class OptionError(ValueError):
    """An option of forking cannot be used; the message says which, its value and what would do."""


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """Token ids of [Fork], which a model samples, and [Child], which only the engine writes.

    Source: APAR paper, section 3.4.2.
    """

    fork: int
    child: int

    def __post_init__(self) -> None:
        if self.fork == self.child:
            raise OptionError(f"fork_token_id and child_token_id are both {self.fork}: they must be two tokens")


@dataclass(frozen=True, slots=True)
class ForkLimits:
    """How far one request may fork. Which tokens come out depends on the last two only, never on timing."""

    max_width: int = 32
    """Threads of one request that run at once; more wait."""
    max_forks: int = 64
    """Forks of one request, counted along its restored output, which ends with `length` at the next one; with 0 it does
    not sample [Fork] at all."""
    max_depth: int = 2
    """Nesting: the root thread has depth 0. A thread this deep does not sample [Fork]."""

    def __post_init__(self) -> None:
        for field, least in (("max_width", 1), ("max_forks", 0), ("max_depth", 0)):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise OptionError(f"{field} is {value!r}: use a whole number, at least {least}")
        if self.max_forks == 0:  # else the model would sample the fork that ends its answer
            object.__setattr__(self, "max_depth", 0)

    def lowered(self, request: "RequestOptions") -> "ForkLimits":
        """These limits, or the request's own where they are lower."""
        return ForkLimits(
            *(
                mine if (asked := getattr(request, field.name)) is None else min(mine, asked)
                for field in fields(self)
                for mine in (getattr(self, field.name),)
            )
        )


@dataclass(frozen=True, slots=True)
class EngineOptions:
    control: ControlTokens | None
    """None: the model cannot fork; requests run as in stock vLLM, under our admission."""
    limits: ForkLimits


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What `extra_args["apar"]` of a request says."""

    fork: bool = True
    max_width: int | None = None
    max_forks: int | None = None
    max_depth: int | None = None
    pool: str | None = None
    """Requests that share a part of the KV budget: a job."""
    pool_share: float = 1.0
    """The part of the KV budget that the pool may hold while another pool waits."""


def engine_options(model_says: Mapping[str, Any] | None, engine_says: Mapping[str, Any] | None) -> EngineOptions:
    """Read `config.json`'s `apar` and `additional_config`'s `apar`.

    Raises:
        OptionError: an unknown key, a wrong value, or only one of the two control tokens.
    """
    said = {**_mapping("apar of config.json", model_says), **_mapping("apar of additional_config", engine_says)}
    fork, child = said.pop("fork_token_id", None), said.pop("child_token_id", None)
    if (fork is None) != (child is None):
        raise OptionError("fork_token_id and child_token_id go together: name both or neither")
    for name, value in (("fork_token_id", fork), ("child_token_id", child)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise OptionError(f"{name} is {value!r}: use a token id")
    control = None if fork is None or child is None else ControlTokens(fork, child)
    limits = {field.name for field in fields(ForkLimits)}
    return EngineOptions(control, ForkLimits(**_known("apar", said, limits, also=["fork_token_id", "child_token_id"])))


def request_options(extra_args: Mapping[str, Any] | None) -> RequestOptions:
    """Read a request's `extra_args`.

    Raises:
        OptionError: an unknown key or a wrong value.
    """
    said = (extra_args or {}).get("apar")
    if said is None:
        return RequestOptions()
    if isinstance(said, str):
        # vLLM's OpenAI server takes no mappings in vllm_xargs.
        try:
            said = json.loads(said)
        except ValueError:
            raise OptionError(f"extra_args.apar is {said!r}: use a mapping, or one as JSON text") from None
    if said in (True, False):  # as 1 and 0, too: what becomes of them in vllm_xargs
        return RequestOptions(fork=bool(said))
    known = _known("extra_args.apar", _mapping("extra_args.apar", said), {f.name for f in fields(RequestOptions)})
    share = known.get("pool_share", 1.0)
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise OptionError(f"pool_share is {share!r}: use a number above 0, at most 1")
    if not isinstance(known.get("fork", True), bool):
        raise OptionError(f"fork is {known['fork']!r}: use true or false")
    pool = known.get("pool")
    if pool is not None and not isinstance(pool, str):
        raise OptionError(f"pool is {pool!r}: use a text")
    limits = {field.name for field in fields(ForkLimits)}
    ForkLimits(**{name: value for name, value in known.items() if name in limits and value is not None})
    return RequestOptions(**known)


def child_seed(parent_seed: int, ordinal: int) -> int:
    """The sampling seed of a thread's `ordinal`-th child (from 0).

    Derived from the path alone, so that a seeded answer is the same whoever runs beside it and in whatever order.
    """
    digest = hashlib.blake2b(f"{parent_seed}/{ordinal}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & MAX_SEED


def _mapping(where: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise OptionError(f"{where} is {value!r}: use a mapping of option names to values")
    return dict(value)


def _known(where: str, said: dict[str, Any], known: set[str], also: Iterable[str] = ()) -> dict[str, Any]:
    unknown = sorted(map(str, set(said) - known))
    if unknown:
        raise OptionError(f"{where}.{unknown[0]} is not an option: use {', '.join(sorted({*known, *also}))}")
    return said
