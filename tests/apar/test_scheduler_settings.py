"""Engines with other settings than usual, on requests that fork: pools, priorities, split prefills, adapters."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import ROOMY, TIGHT, Reference, engine, greedy, receipt, tokens_of
from tiny_models import random_prompts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.usefixtures("in_process")]

PROMPTS = random_prompts(16, seed=1)
M = 150


def test_a_pool_at_its_share_holds_no_more_while_another_waits(tiny_folder: Path, tiny_reference: Reference) -> None:
    num_blocks, share = 40, 0.25
    held: list[int] = []
    with engine(tiny_folder, num_blocks, tiny_reference) as started:
        small: set[str] = set()
        large: set[str] = set()

        waited = False

        def look(scheduler: Any) -> None:
            nonlocal waited
            blocks: set[int] = set()
            mine = [r.request_id for r in scheduler.running if r.request_id.split("#")[0] in small]
            for name in mine:
                blocks.update(scheduler.kv_cache_manager.get_block_ids(name)[0])
            waits = any(
                name.split("#")[0] in large and request.status.name != "RUNNING"
                for name, request in scheduler.requests.items()
            )
            if waits and waited and len(mine) > 1:
                held.append(len(blocks) - len(mine))  # a step's growth is given back before the next step
            waited = waits

        started.watch.on_step = look
        prompts = random_prompts(40, seed=3, min_tokens=40, max_tokens=90)
        names = []
        for i, prompt in enumerate(prompts):
            apar = {"pool": "small", "pool_share": share} if i % 2 else {"pool": "large", "pool_share": 1.0}
            names.append(started.add(prompt, greedy(M, apar)))
            (small if i % 2 else large).add(started.internal[names[-1]])
        outputs = started.finish()
        assert len(held) > 20
        assert max(held) <= share * num_blocks
        for prompt, name in zip(prompts, names, strict=True):
            started.assert_expected(prompt, outputs[name], max_tokens=M)
        started.assert_empty()


def test_the_more_urgent_start_first_and_no_token_changes(tiny_folder: Path, tiny_reference: Reference) -> None:
    with engine(tiny_folder, TIGHT, tiny_reference, scheduling_policy="priority") as started:
        prompts = random_prompts(24, seed=3, min_tokens=30, max_tokens=60)
        late = [started.add(prompt, greedy(M), priority=5) for prompt in prompts[:12]]
        outputs = {output.request_id: output for _ in range(5) for output in started.step() if output.finished}
        early = [started.add(prompt, greedy(M), priority=-1) for prompt in prompts[12:]]
        outputs.update(started.finish())
        for prompt, name in zip(prompts, [*late, *early], strict=True):
            started.assert_expected(prompt, outputs[name], max_tokens=M)
        first: dict[str, int] = {}
        for step, seen in enumerate(started.watch.steps):
            for thread in seen.started:
                first.setdefault(thread, step)
        begun = [first[started.internal[name]] for name in (*late, *early)]
        passed = [step for step in begun[:12] if step > min(begun[12:])]
        assert passed, "all had started before the others came"
        assert min(passed) > max(begun[12:])  # what has started goes on; what has not is passed
        started.assert_empty()


def test_seeded_requests_and_chunked_prefill_do_not_kill_the_engine(tiny_folder: Path) -> None:
    """On CPU vLLM cannot wind a generator back, so a seeded prefill must not be split."""
    with engine(tiny_folder, ROOMY, max_num_batched_tokens=80, max_num_seqs=32) as started:
        prompts = random_prompts(30, seed=5, max_tokens=75)
        params = [greedy(60, temperature=0.8, seed=i if i % 3 else None) for i in range(30)]
        outputs = started.run(prompts, params)
        assert all(output.outputs[0].finish_reason in ("stop", "length") for output in outputs)
        for i in (1, 4, 8):
            (alone,) = started.run([prompts[i]], params[i])
            assert tokens_of(alone) == tokens_of(outputs[i])
        long = random_prompts(1, seed=6, min_tokens=200, max_tokens=200)
        refused, *others = started.run([*long, *prompts[:6]], greedy(20, temperature=0.8, seed=1))
        assert refused.outputs[0].finish_reason == "error"
        assert all(output.outputs[0].finish_reason in ("stop", "length") for output in others)
        started.assert_empty()


def write_adapter(folder: Path, model: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    """A random adapter as peft writes it, and what it adds to each weight."""
    from safetensors.torch import save_file

    folder.mkdir()
    rank, alpha = 4, 8
    generator = torch.Generator().manual_seed(1)
    tensors, added = {}, {}
    for name, module in model.named_modules():
        if name.split(".")[-1] in ("q_proj", "v_proj", "o_proj", "down_proj"):
            a = torch.randn(rank, module.in_features, generator=generator) * 0.2
            b = torch.randn(module.out_features, rank, generator=generator) * 0.2
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
            added[f"{name}.weight"] = b @ a * (alpha / rank)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "bias": "none",
        "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"], "base_model_name_or_path": None,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder, added


def test_children_keep_their_parents_adapter(tiny_folder: Path, tiny_reference: Reference, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM
    from vllm.lora.request import LoRARequest

    merged = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
    adapter, added = write_adapter(tmp_path / "adapter", merged)
    with torch.no_grad():
        for name, weight in merged.named_parameters():
            weight += added.get(name, 0.0)
    reference = Reference(merged)
    # On CPU vLLM gives requests without an adapter that of the last slot: the second of these, which is empty.
    with engine(tiny_folder, TIGHT, reference, enable_lora=True, max_lora_rank=8, max_loras=2) as started:
        request = LoRARequest("random", 1, str(adapter))
        with_it = [started.add(prompt, greedy(M), lora_request=request) for prompt in PROMPTS]
        without = [started.add(prompt, greedy(M)) for prompt in PROMPTS[:8]]
        outputs = started.finish()
        for prompt, name in zip(PROMPTS, with_it, strict=True):
            started.assert_expected(prompt, outputs[name], max_tokens=M)
        assert sum(len(receipt(outputs[name])["nodes"]) > 3 for name in with_it) > 2
        started.reference = tiny_reference
        for prompt, name in zip(PROMPTS, without, strict=False):
            started.assert_expected(prompt, outputs[name], max_tokens=M)
        started.assert_empty()
