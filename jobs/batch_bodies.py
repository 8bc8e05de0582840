"""A body of OpenAI's `/v1/chat/completions` or `/v1/completions` as a payload and sampling values of ours.

What does not change an answer is passed over; what would and is not served is refused, never dropped: a client must not
take an answer without its tools for one with them.
"""

import json
from typing import Any

from jobs.messages import RowError, check_messages

CHAT_URL, COMPLETIONS_URL = "/v1/chat/completions", "/v1/completions"
ENDPOINTS = (CHAT_URL, COMPLETIONS_URL)
FORQ_KEY = "forq"
"""Of a body: what this service has and OpenAI has not."""

_PASSED_OVER = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "stream_options", "parallel_tool_calls",
    }
)  # fmt: skip
_SAME_AS_UNSAID: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
}
"""Values that ask for nothing; any other is refused as unknown."""


def read_body(
    text: str, url: str, names: tuple[str, ...], decoding: str | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The payload and the sampling values, which are still to be checked.

    `names` are those that a body may call the model, the alias first; a `decoding` of None is any.

    Raises:
        RowError: the body cannot be asked; the message says what and what to do.
    """
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):  # it was read before, but with less of the stack in use
        raise RowError("invalid_request", "body is nested too deeply: flatten it") from None
    except TypeError:  # Parquet with these four columns may hold anything in them
        body = None
    if not isinstance(body, dict):
        raise RowError("invalid_request", "body is no JSON object: write one")
    model = body.pop("model", None)
    if model is not None and model not in names:
        raise RowError("invalid_request", f"body.model is another than the job's, {names[0]!r}: submit it apart")
    if body.get("stream"):
        raise RowError("invalid_request", "stream is true: a batch cannot stream, leave it out")
    _check_extension(body.pop(FORQ_KEY, None), decoding)
    if url == CHAT_URL:
        payload: dict[str, Any] = {"messages": _messages(body.pop("messages", None))}
        _name_chat_fields(body)
    elif url == COMPLETIONS_URL:
        payload = {"prompt": body.pop("prompt", None), "raw": True}
    else:
        raise RowError("invalid_request", f"url is {url!r}: {' and '.join(ENDPOINTS)} are served")
    if body.get("max_completion_tokens") is not None:
        body["max_tokens"] = body["max_completion_tokens"]
    body.pop("max_completion_tokens", None)
    _name_structure(body)
    said = {
        name: value
        for name, value in body.items()
        if value is not None and name not in _PASSED_OVER and value not in _SAME_AS_UNSAID.get(name, ())
    }
    return payload, said


def _messages(value: Any) -> list[dict[str, str]]:
    messages = check_messages(value)
    return [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]


def _check_extension(said: Any, decoding: str | None) -> None:
    if said is None:
        return
    if not isinstance(said, dict) or set(said) - {"decoding"}:
        raise RowError("invalid_request", f'body.{FORQ_KEY} has one key, as in {{"decoding": "apar"}}')
    if decoding is not None and said.get("decoding", decoding) != decoding:
        raise RowError(
            "invalid_request",
            f"body.{FORQ_KEY}.decoding is another than the job's, {decoding!r}: a job has one, say it when you submit",
        )


def _name_chat_fields(body: dict[str, Any]) -> None:
    """Chat says `logprobs` and how many in two fields; completions, and we, in one number."""
    wanted, top = body.pop("logprobs", None), body.pop("top_logprobs", None)
    if wanted is not None and not isinstance(wanted, bool):
        raise RowError("invalid_request", "logprobs is no true or false: say true, and how many as top_logprobs")
    if wanted:
        body["logprobs"] = 0 if top is None else top
    elif top:
        raise RowError("invalid_request", "top_logprobs stands without logprobs: say logprobs true, too")


def _name_structure(body: dict[str, Any]) -> None:
    asked = body.pop("response_format", None)
    if asked is None or asked == {"type": "text"}:
        return
    kind = asked.get("type") if isinstance(asked, dict) else None
    if kind == "json_object":
        body["structured"] = {"json_schema": {"type": "object"}}
        return
    schema = asked.get("json_schema") if kind == "json_schema" else None
    if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
        raise RowError(
            "invalid_request",
            "response_format is none that is served: use text, json_object, or json_schema with its schema",
        )
    body["structured"] = {"json_schema": schema["schema"]}
