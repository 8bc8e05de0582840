"""The bare side of benchmarks/service.py, in a process of its own: `LLM.chat` over all rows at once."""

import json
import sys
import time
from pathlib import Path

from benchmarks.service import WARM_UP_ROWS, bench_engine_args


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    args = bench_engine_args(task["model_path"])
    from vllm import LLM, SamplingParams

    llm = LLM(**args)
    sampling = SamplingParams(temperature=0.0, max_tokens=task["max_tokens"])
    conversations = [[{"role": "user", "content": prompt}] for prompt in task["prompts"]]
    llm.chat(conversations[:WARM_UP_ROWS], sampling, use_tqdm=False)
    conversations = [[{"role": "user", "content": f"{prompt} "}] for prompt in task["prompts"]]
    started = time.perf_counter()
    outputs = llm.chat(conversations, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(
        json.dumps(
            {
                "rows_per_s": len(outputs) / seconds,
                "tokens_per_s": tokens / seconds,
                "seconds": seconds,
                "output_tokens": tokens,
            }
        )
    )


if __name__ == "__main__":
    main()
