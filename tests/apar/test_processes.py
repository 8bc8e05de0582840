"""The plugin in vLLM's own process arrangement, its engine core in another process, and what it refuses there."""

import asyncio
import importlib
import importlib.metadata
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import (
    NUM_BLOCKS,
    ROOT,
    SCHEDULER,
    Reference,
    differs,
    engine_environment,
    free_port,
    options,
    text_of,
    vllm_is_named_otherwise,
    with_vllms_command,
)
from tiny_models import CHILD, FORK, MAX_MODEL_LEN, make_tiny_model, random_prompts
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.structured_output import StructuredOutputManager

from apar.options import OptionError
from apar.scheduler import SyncForkingScheduler
from apar.scheduler.compat import TESTED_VERSIONS, UnsupportedEngine, check_version

pytestmark = pytest.mark.engine

TIMEOUT_S = 240
PROMPTS = random_prompts(16, seed=1)
MAX_TOKENS = 150
ENGINE = {
    "scheduler_cls": SCHEDULER,
    "dtype": "float32",
    "block_size": 32,
    "max_model_len": MAX_MODEL_LEN,
    "num_gpu_blocks_override": NUM_BLOCKS + 1,
    "kv_cache_memory_bytes": 64 << 20,
    "enforce_eager": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("processes") / "tiny")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the processes that vLLM starts from here."""
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    for name, value in engine_environment().items():
        monkeypatch.setenv(name, value)


def test_answers_and_receipts_cross_the_process_boundary(
    monkeypatch: pytest.MonkeyPatch, folder: Path, reference: Reference
) -> None:
    from vllm import LLM, SamplingParams

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # vLLM's default, on CPU with a worker process as well
    llm = LLM(model=str(folder), **ENGINE)
    try:
        assert type(llm.llm_engine.engine_core).__name__ == "SyncMPClient"

        def generate(prompts: list[list[int]], params: Any) -> list[Any]:
            return list(llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False))

        greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
        for prompt, output in zip(PROMPTS, generate(PROMPTS, greedy), strict=True):
            expected, answer = reference(prompt, max_tokens=MAX_TOKENS), output.outputs[0]
            assert (list(answer.token_ids), answer.finish_reason) == (expected.token_ids, expected.finish_reason)
            assert not differs(output.kv_transfer_params["apar"], expected)
        # A request with a wrong option ends alone; the engine goes on.
        wrong = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, extra_args={"apar": {"wide": 1}})
        refused, other = generate(PROMPTS[:2], [wrong, greedy])
        assert refused.outputs[0].finish_reason == "error"
        for output, prompt in ((other, PROMPTS[1]), (generate([PROMPTS[0]], greedy)[0], PROMPTS[0])):
            assert list(output.outputs[0].token_ids) == reference(prompt, max_tokens=MAX_TOKENS).token_ids
    finally:
        llm.llm_engine.engine_core.shutdown()


async def stream(llm: Any, name: str, prompt: list[int], num_pieces: int | None = None) -> tuple[list[int], str, Any]:
    """Token ids and text of an answer taken in deltas, or of its first pieces, and the last output."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, output_kind=RequestOutputKind.DELTA)
    tokens, text, pieces = list[int](), "", 0
    async for output in llm.generate({"prompt_token_ids": prompt}, params, request_id=name):
        tokens += output.outputs[0].token_ids
        text += output.outputs[0].text
        pieces += 1
        if pieces == num_pieces:
            break
    return tokens, text, output


async def streams_and_aborts(folder: Path, reference: Reference) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), **ENGINE))
    try:
        # Each beside one that its reader gives up.
        given_up = [stream(llm, f"given up {i}", prompt, 2) for i, prompt in enumerate(PROMPTS)]
        kept = [stream(llm, f"kept {i}", prompt) for i, prompt in enumerate(PROMPTS)]
        answers = await asyncio.gather(*given_up, *kept)
        for prompt, (tokens, text, last) in zip(PROMPTS, answers[len(PROMPTS) :], strict=True):
            expected = reference(prompt, max_tokens=MAX_TOKENS)
            assert (tokens, text) == (expected.token_ids, text_of(expected.token_ids))
            assert last.outputs[0].finish_reason == expected.finish_reason
            assert not differs(last.kv_transfer_params["apar"], expected)
        for prompt, (tokens, _, _) in zip(PROMPTS, answers, strict=False):
            assert tokens == reference(prompt, max_tokens=MAX_TOKENS).token_ids[: len(tokens)]
        # One that is aborted by its name, once it has written something.
        prompt = max(PROMPTS, key=lambda prompt: len(reference(prompt, max_tokens=MAX_TOKENS).token_ids))
        whole = reference(prompt, max_tokens=MAX_TOKENS).token_ids
        aborted = asyncio.create_task(stream(llm, "aborted", prompt))
        await stream(llm, "beside it", prompt, 2)
        await llm.abort("aborted")
        tokens, _, last = await asyncio.wait_for(aborted, 60)
        assert last.outputs[0].finish_reason == "abort"
        assert tokens == whole[: len(tokens)]
        assert len(tokens) < len(whole)
        again, _, _ = await stream(llm, "again", prompt)
        assert again == whole
    finally:
        llm.shutdown()


def test_streamed_deltas_are_the_whole_and_aborts_leave_the_rest_alone(folder: Path, reference: Reference) -> None:
    asyncio.run(streams_and_aborts(folder, reference))


def test_the_example_in_the_documentation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "vllm-plugin.md").read_text()
    example = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "make_tiny_model" in block)
    script = tmp_path / "example.py"
    script.write_text(example)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    runpy.run_path(str(script), run_name="__main__")
    written = capsys.readouterr().out
    assert re.search(r"^\d+ tokens, (stop|length)$", written, re.MULTILINE), written
    assert "node 0 below None: root of thread 0, tokens 0 to " in written


# --- refusals ---


def test_an_untested_version_is_refused() -> None:
    check_version(TESTED_VERSIONS[0] + "+cpu")
    with pytest.raises(UnsupportedEngine) as refusal:
        check_version("0.33.0")
    text = str(refusal.value)
    assert "\n" not in text
    assert "0.33.0" in text
    assert f"install vllm=={TESTED_VERSIONS[-1]}" in text


def test_the_plugin_cannot_be_imported_beside_an_untested_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.__version__", "0.33.0")
    for name in [name for name in sys.modules if name.split(".")[:2] == ["apar", "scheduler"]]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(RuntimeError, match=r"tested with vLLM 0\.32\.0, this is 0\.33\.0: install vllm==0\.32\.0"):
        importlib.import_module("apar.scheduler")


TRANSFER = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"additional_config": {"apar": {"max_width": 0}}}, r"max_width is 0: use a whole number, at least 1"),
    ({"additional_config": {"apar": {"max_depht": 2}}}, r"apar.max_depht is not an option: use .*max_depth"),
    (
        {"additional_config": {"apar": {"fork_token_id": None}}},
        r"fork_token_id and child_token_id go together: name both or neither",
    ),
    (
        {"additional_config": {"apar": {"child_token_id": FORK}}},
        rf"fork_token_id and child_token_id are both {FORK}: they must be two tokens",
    ),
    ({"additional_config": {"apar": {"fork_token_id": "[Fork]"}}}, r"fork_token_id is '\[Fork\]': use a token id"),
    ({"additional_config": {"apar": {"fork_token_id": 100_000}}}, r"fork_token_id is 100000: the model's vocabulary"),
    ({"additional_config": {"apar": ["max_width", 2]}}, r"use a mapping"),
    ({"kv_transfer_config": TRANSFER}, r"does not work with kv_transfer_config"),
]


@pytest.mark.parametrize(("wrong", "pattern"), WRONG)
def test_an_engine_with_wrong_options_does_not_start(folder: Path, wrong: dict[str, Any], pattern: str) -> None:
    """At the scheduler, where all of them are refused."""
    config = EngineArgs(
        model=str(folder), dtype="float32", block_size=32, max_model_len=MAX_MODEL_LEN, enforce_eager=True,
        kv_cache_memory_bytes=64 << 20, **wrong,
    ).create_engine_config()  # fmt: skip
    config.cache_config.num_gpu_blocks = NUM_BLOCKS + 1
    layers = KVCacheGroupSpec(
        ["layer"], FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32)
    )
    with pytest.raises((OptionError, UnsupportedEngine), match=pattern):
        SyncForkingScheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(NUM_BLOCKS + 1, [], [layers]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=32,
            hash_block_size=32,
        )


def test_the_error_of_an_engine_in_this_process_is_the_refusal(folder: Path) -> None:
    from vllm import LLM

    with pytest.raises(OptionError, match=r"^max_width is 0: use a whole number, at least 1$"):
        LLM(model=str(folder), **ENGINE, additional_config={"apar": {"max_width": 0}})


def test_the_terminal_of_vllm_serve_names_the_wrong_value_and_the_remedy(tmp_path: Path, folder: Path) -> None:
    wrong = json.dumps({"apar": {"child_token_id": CHILD, "max_width": 0}})
    command = str(Path(sys.executable).with_name("vllm"))
    done = subprocess.run(
        [command, "serve", str(folder), *options(free_port(), "--additional-config", wrong)],
        env=with_vllms_command(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode != 0
    assert re.search(r"OptionError: max_width is 0: use a whole number, at least 1$", done.stdout, re.MULTILINE), (
        done.stdout[-6000:]
    )
    assert "Engine core initialization failed" in done.stdout


@pytest.mark.skipif(not vllm_is_named_otherwise(), reason="this build's command starts")
def test_the_command_of_the_cpu_build_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the documentation says; when it does start, the documentation is wrong."""
    from vllm.entrypoints.cli.main import main

    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "--help"])
    with pytest.raises(importlib.metadata.PackageNotFoundError, match="vllm"):
        main()
