"""Between the service and the forking scheduler: what a model brings to fork (control tokens, limits), what engine and
requests are told, and what comes back."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from apar.options import ForkLimits, OptionError, engine_options
from apar.tree import Span
from jobs.errors import BadInput, Unavailable
from jobs.forking import read_model_options
from jobs.results import Stats
from jobs.settings import ModelAlias
from worker.backend import Decoding, Receipt
from worker.chat_templates import use_template
from worker.prompts import PromptEncoder, load_tokenizer

SCHEDULER = "apar.scheduler.ForkingScheduler"
"""Used for every model: for one that cannot fork it still counts what each answer costs, and shares the KV budget."""


@dataclass(frozen=True, slots=True)
class Forking:
    """A model that can fork."""

    fork_token: str
    child_token: str
    fork_token_id: int
    child_token_id: int
    limits: ForkLimits


def load_encoder(alias: ModelAlias, model_path: Path) -> tuple[PromptEncoder, Forking | None]:
    """Read a model folder's tokenizer and control tokens; the encoder keeps both tokens out of prompts.

    Returns None beside the encoder where neither alias nor folder names control tokens.

    Raises:
        Unavailable: the tokenizer or the alias's chat template cannot be used, or the control tokens are not in its
            vocabulary.
    """
    tokenizer = load_tokenizer(model_path)
    if alias.chat_template is not None:
        use_template(tokenizer, alias.chat_template)
    forking = find_forking(alias, model_path, tokenizer)
    control = (forking.fork_token, forking.child_token) if forking else ()
    return PromptEncoder(tokenizer, control), forking


def find_forking(alias: ModelAlias, model_path: Path, tokenizer: Any) -> Forking | None:
    """The alias's control tokens and limits, over those of the folder's `config.json`; None without control tokens.

    Raises:
        Unavailable: a token is not in the vocabulary, or an option cannot be used.
    """
    said = _alias_options(alias, tokenizer)
    try:
        options = engine_options(read_model_options(model_path), said)
    except OptionError as error:
        raise Unavailable(f"the model cannot fork as configured: {error}") from None
    if options.control is None:
        return None
    fork, child = options.control.fork, options.control.child
    return Forking(
        fork_token=alias.fork_token or _text_of(fork, tokenizer),
        child_token=alias.child_token or _text_of(child, tokenizer),
        fork_token_id=fork,
        child_token_id=child,
        limits=options.limits,
    )


def scheduler_args(alias: ModelAlias, forking: Forking | None) -> dict[str, Any]:
    """The `EngineArgs` that make the engine fork, under the alias's own.

    Raises:
        BadInput: the alias's `additional_config` is no table.
    """
    own = alias.engine.get("additional_config", {})
    own_apar = own.get("apar", {}) if isinstance(own, Mapping) else None
    if not isinstance(own, Mapping) or not isinstance(own_apar, Mapping):
        raise BadInput("engine.additional_config must be a table, and its key apar too")
    config = {**own, "apar": {**_engine_config(forking), **own_apar}}
    return {
        "scheduler_cls": alias.engine.get("scheduler_cls", SCHEDULER),
        "additional_config": {name: value for name, value in config.items() if name != "apar" or value},
    }


def request_config(decoding: Decoding) -> dict[str, Any]:
    """A request's `extra_args["apar"]`, see `apar.options.request_options`."""
    pool = {} if decoding.pool is None else {"pool": decoding.pool, "pool_share": decoding.pool_share}
    return {"fork": decoding.forks, **pool}


def read_receipt(told: Mapping[str, Any] | None, num_prompt_tokens: int, num_tokens: int) -> Receipt | None:
    """What the scheduler says of an answer of `num_tokens` restored tokens; None where another scheduler says nothing.

    vLLM looks for stop strings in front of the engine, which may be some tokens ahead by then: what lies behind the
    answer's end is cut off, and what would have been spent sequentially is that of the answer as it is.
    """
    if told is None:
        return None
    prompt, output = num_prompt_tokens, num_tokens
    sequential = {
        "sequential_peak_tokens": prompt + output,
        "sequential_attended_tokens": output * prompt + output * (output + 1) // 2,
    }
    counted = {**told["stats"], **sequential}
    stats = Stats(**{field.name: counted[field.name] for field in fields(Stats) if field.default is MISSING})
    spans = [Span(*values) for values in told["nodes"]]
    spans = [span._replace(start=min(span.start, output), end=min(span.end, output)) for span in spans]
    assert spans[-1].end == output, "the nodes' spans cover the restored answer"
    return Receipt(stats, tuple(spans))


def _alias_options(alias: ModelAlias, tokenizer: Any) -> dict[str, Any]:
    said = alias.forks.model_dump(exclude_none=True)
    for name, text in (("fork_token_id", alias.fork_token), ("child_token_id", alias.child_token)):
        if text is not None:
            said[name] = tokenizer.backend_tokenizer.token_to_id(text)
            if said[name] is None:
                raise Unavailable(
                    f"control token {text!r} is not in the model's vocabulary: train the model with it first"
                )
    return said


def _text_of(token_id: int, tokenizer: Any) -> str:
    text: str | None = tokenizer.backend_tokenizer.id_to_token(token_id)
    if text is None:
        raise Unavailable(f"the model's config.json names control token {token_id}, which is not in its vocabulary")
    return text


def _engine_config(forking: Forking | None) -> dict[str, Any]:
    """Everything is said, so that engine and service agree."""
    if forking is None:
        return {}
    limits = forking.limits
    return {
        "fork_token_id": forking.fork_token_id,
        "child_token_id": forking.child_token_id,
        "max_width": limits.max_width,
        "max_forks": limits.max_forks,
        "max_depth": limits.max_depth,
    }
