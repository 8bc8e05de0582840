"""A model that we trained runs in vLLM under the forking scheduler, and forks as it was taught."""

from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic_trees import list_row, make_base, plain_row, write_rows
from transformers import AutoModelForCausalLM

from apar.options import ControlTokens, ForkLimits
from apar.reference import ReferenceDecoder
from apar.training.options import TrainingOptions
from apar.training.run import train
from apar.training.vocabulary import Vocabulary

pytestmark = [pytest.mark.engine, pytest.mark.timeout(280), pytest.mark.usefixtures("in_process")]

LISTS, SENTENCES = ["list the heat", "list the note"], ["say the heat", "say the note"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Knows four prompts by heart: two lists of three points, two plain sentences."""
    folder = tmp_path_factory.mktemp("trained")
    base = make_base(folder / "base", hidden=64, tied=True)
    points = (["the", "it", "an"], ["in the end", "at rest", "not here"])
    rows = [list_row(prompt, *points) for prompt in LISTS] + [plain_row(prompt, "that is it.") for prompt in SENTENCES]
    data = write_rows(folder / "data.parquet", rows)
    result = train(
        TrainingOptions(
            base=base, data=data, out=folder / "run", method="lora", lora_rank=16, steps=150, batch_size=4, lr=1e-2,
            row_lr=2e-2, row_tokens=256, dtype="fp32", eval_share=0.0, save_every=1000,
        )
    )  # fmt: skip
    assert result.model is not None
    return result.model


def test_it_loads_in_vllm_forks_where_taught_and_answers_as_the_reference_does(trained: Path) -> None:
    vocabulary = Vocabulary(trained)
    control: ControlTokens = vocabulary.control
    assert vocabulary.new_texts == []  # the folder's tokenizer knows them
    model = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32).eval()
    assert model.config.vocab_size % 64 != 0
    reference = ReferenceDecoder(model, control, ForkLimits(max_depth=1), [vocabulary.eos_token_id], 256)
    prompts = [vocabulary.encode_prompt(prompt) for prompt in LISTS + SENTENCES]
    expected = [reference.decode(prompt, max_tokens=120) for prompt in prompts]
    assert [answer.num_forks for answer in expected] == [3, 3, 0, 0]

    outputs = generated(trained, prompts)
    for answer, output in zip(expected, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == answer.token_ids
        assert output.kv_transfer_params["apar"]["stats"]["forks"] == answer.num_forks
    texts = [vocabulary.tokenizer.decode(answer.token_ids[:-1]) for answer in expected]
    assert texts[0] == "\n1. the: in the end\n2. it: at rest\n3. an: not here"
    assert texts[2] == "that is it."


def generated(folder: Path, prompts: list[list[int]]) -> list[Any]:
    from in_process import greedy_params
    from vllm import LLM

    llm = LLM(
        model=str(folder), scheduler_cls="apar.scheduler.ForkingScheduler", dtype="float32", block_size=32,
        max_model_len=256, num_gpu_blocks_override=101, kv_cache_memory_bytes=64 << 20, enforce_eager=True,
    )  # fmt: skip
    try:
        return list(llm.generate([{"prompt_token_ids": p} for p in prompts], greedy_params(120), use_tqdm=False))
    finally:
        llm.llm_engine.engine_core.shutdown()
