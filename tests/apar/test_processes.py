"""The plugin in vLLM's own process arrangement, its engine core in another process, and what it refuses there.

Every engine runs in a script of its own, as a user would write it: that is also what shows the terminal's last lines.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from serving import (
    NUM_BLOCKS,
    ROOT,
    SCHEDULER,
    Reference,
    differs,
    engine_environment,
    free_port,
    serve_command,
    text_of,
    with_vllms_command,
)
from tiny_models import CHILD, FORK, MAX_MODEL_LEN, make_tiny_model, random_prompts

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

GENERATE = """
import json, sys

def main(model, engine, prompts, max_tokens):
    from vllm import LLM, SamplingParams
    llm = LLM(model=model, **engine)
    print("CLIENT", type(llm.llm_engine.engine_core).__name__)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    for output in llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False):
        answer = output.outputs[0]
        print("ANSWER", json.dumps([list(answer.token_ids), answer.finish_reason, output.kv_transfer_params["apar"]]))
    try:
        wrong = SamplingParams(extra_args={"apar": {"wide": 1}})
        for output in llm.generate([{"prompt_token_ids": prompts[0]}], wrong, use_tqdm=False):
            print("ERROR", output.outputs[0].finish_reason, len(output.outputs[0].token_ids))
    except Exception as error:
        print("ERROR", type(error).__name__, error)
    more = llm.generate([{"prompt_token_ids": prompts[0]}], params, use_tqdm=False)[0].outputs[0]
    print("AFTER", json.dumps(list(more.token_ids)))

if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
"""

STREAM = """
import asyncio, json, sys

async def main(model, engine, prompts, max_tokens):
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **engine))

    async def one(name, prompt, num_pieces=None):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA)
        tokens, text, pieces = [], "", 0
        async for output in llm.generate({"prompt_token_ids": prompt}, params, request_id=name):
            tokens += output.outputs[0].token_ids
            text += output.outputs[0].text
            pieces += 1
            if pieces == num_pieces:
                break
        return [tokens, text, pieces, output.outputs[0].finish_reason, output.kv_transfer_params]

    async def abort(name, after):
        while not after.done():
            await asyncio.sleep(0.02)
        await llm.abort(name)

    # Half of them are given up, some by their reader, some by name.
    tasks = []
    for i, prompt in enumerate(prompts):
        tasks.append(asyncio.create_task(one(f"r{i}", prompt)))
        tasks.append(asyncio.create_task(one(f"given up {i}", prompt, num_pieces=2)))
    answers = await asyncio.gather(*tasks)
    for answer in answers[::2]:
        print("ANSWER", json.dumps(answer))
    by_name = asyncio.create_task(one("by name", prompts[3]))
    first = asyncio.create_task(one("first", prompts[3], num_pieces=2))
    await abort("by name", first)
    try:
        print("ABORTED", json.dumps(await asyncio.wait_for(by_name, 60)))
    except asyncio.CancelledError:
        print("ABORTED", json.dumps("cancelled"))
    again = await one("again", prompts[3])
    print("AGAIN", json.dumps(again[0]))
    llm.shutdown()

if __name__ == "__main__":
    asyncio.run(main(*json.loads(sys.argv[1])))
"""

REFUSE = """
import json, sys

def main(model, engine, cases):
    from vllm import LLM
    for case in cases:
        try:
            LLM(model=model, **{**engine, **case})
        except Exception as error:
            print("REFUSED", type(error).__name__, error)
        else:
            print("STARTED")

if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("processes") / "tiny")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def run(tmp_path: Path, script: str, *arguments: Any, **environment: str) -> str:
    """Run a script with JSON arguments; returns what it wrote, both streams."""
    path = tmp_path / "script.py"
    path.write_text(script)
    done = subprocess.run(
        [sys.executable, str(path), json.dumps(arguments)],
        env=engine_environment(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return done.stdout


def lines(output: str, word: str) -> list[str]:
    found = [line.removeprefix(word + " ") for line in output.splitlines() if line.startswith(word)]
    assert found, output[-6000:]
    return found


def test_answers_and_receipts_cross_the_process_boundary(tmp_path: Path, folder: Path, reference: Reference) -> None:
    output = run(tmp_path, GENERATE, str(folder), ENGINE, PROMPTS, MAX_TOKENS)
    assert lines(output, "CLIENT") == ["SyncMPClient"]
    answers = [json.loads(line) for line in lines(output, "ANSWER")]
    for prompt, (tokens, reason, receipt) in zip(PROMPTS, answers, strict=True):
        expected = reference(prompt, max_tokens=MAX_TOKENS)
        assert (tokens, reason) == (expected.token_ids, expected.finish_reason)
        assert not differs(receipt, expected)
    # A request with a wrong option ends alone; the engine goes on.
    assert json.loads(lines(output, "AFTER")[0]) == answers[0][0]


def test_streamed_deltas_are_the_whole_and_aborts_leave_the_rest_alone(
    tmp_path: Path, folder: Path, reference: Reference
) -> None:
    output = run(tmp_path, STREAM, str(folder), ENGINE, PROMPTS, MAX_TOKENS)
    for prompt, line in zip(PROMPTS, lines(output, "ANSWER"), strict=True):
        expected = reference(prompt, max_tokens=MAX_TOKENS)
        tokens, text, num_pieces, reason, told = json.loads(line)
        assert (tokens, reason, text) == (expected.token_ids, expected.finish_reason, text_of(expected.token_ids))
        assert not differs(told["apar"], expected)
        assert num_pieces > 20 or len(tokens) < 100
    whole = reference(PROMPTS[3], max_tokens=MAX_TOKENS).token_ids
    assert json.loads(lines(output, "AGAIN")[0]) == whole
    aborted = json.loads(lines(output, "ABORTED")[0])
    if aborted != "cancelled":
        tokens, _, _, reason, _ = aborted
        assert tokens == whole[: len(tokens)]
        assert reason in ("abort", "length")


def test_the_example_in_the_documentation_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "vllm-plugin.md").read_text()
    example = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "make_tiny_model" in block)
    output = run(tmp_path, example.replace('"tests/apar"', repr(str(ROOT / "tests" / "apar"))))
    assert re.search(r"^\d+ tokens, (stop|length)$", output, re.MULTILINE), output[-6000:]
    assert "node 0 below None: root of thread 0, tokens 0 to " in output


# --- refusals ---


def test_an_untested_version_is_refused() -> None:
    check_version(TESTED_VERSIONS[0] + "+cpu")
    with pytest.raises(UnsupportedEngine) as refusal:
        check_version("0.33.0")
    text = str(refusal.value)
    assert "\n" not in text
    assert "0.33.0" in text
    assert f"install vllm=={TESTED_VERSIONS[-1]}" in text


def test_the_plugin_cannot_be_imported_beside_an_untested_version(tmp_path: Path) -> None:
    output = run(tmp_path, "import vllm\nvllm.__version__ = '0.33.0'\nimport apar.scheduler\n")
    last = output.strip().splitlines()[-1]
    assert last.startswith("apar.scheduler.compat.UnsupportedEngine: the forking scheduler was tested with vLLM 0.32.0")
    assert "this is 0.33.0" in last


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_width": 0}, r"max_width is 0: use a whole number, at least 1"),
    ({"max_depht": 2}, r"apar.max_depht is not an option: use .*max_depth"),
    ({"fork_token_id": None}, r"fork_token_id and child_token_id go together: name both or neither"),
    ({"child_token_id": FORK}, rf"fork_token_id and child_token_id are both {FORK}: they must be two tokens"),
    ({"fork_token_id": "[Fork]"}, r"fork_token_id is '\[Fork\]': use a token id"),
    ({"fork_token_id": 100_000}, r"fork_token_id is 100000.*"),
]


def test_an_engine_with_wrong_options_does_not_start(tmp_path: Path, folder: Path) -> None:
    cases: list[dict[str, Any]] = [{"additional_config": {"apar": wrong}} for wrong, _ in WRONG]
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "kv")},
    }
    cases.append({"kv_transfer_config": transfer})
    cases.append({"additional_config": {"apar": ["max_width", 2]}})
    output = run(tmp_path, REFUSE, str(folder), ENGINE, cases, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    refused = [line for line in output.splitlines() if line.startswith(("REFUSED", "STARTED"))]
    assert len(refused) == len(cases), output[-6000:]
    patterns = [*(pattern for _, pattern in WRONG), r"does not work with kv_transfer_config", r"use a mapping"]
    for line, pattern in zip(refused, patterns, strict=True):
        assert re.match(rf"REFUSED (OptionError|UnsupportedEngine) .*{pattern}", line), (line, pattern)


@pytest.mark.parametrize("way", ["LLM", "vllm serve"])
def test_the_terminal_names_the_wrong_value_and_the_remedy(tmp_path: Path, folder: Path, way: str) -> None:
    wrong = {"apar": {"child_token_id": CHILD, "max_width": 0}}
    if way == "LLM":
        output = run(tmp_path, REFUSE, str(folder), ENGINE, [{"additional_config": wrong}])
        assert "REFUSED" in output
    else:
        command = serve_command(folder, free_port(), "--additional-config", json.dumps(wrong))
        done = subprocess.run(
            command,
            env=with_vllms_command(tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        output = done.stdout
        assert done.returncode != 0
    assert re.search(r"OptionError: max_width is 0: use a whole number, at least 1$", output, re.MULTILINE)
