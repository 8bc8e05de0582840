"""A sample's sampling values as the decoders take them. What they cannot do is refused, never left out in silence."""

from apar.decoding import DecodingError, SamplingOptions
from worker.backend import Sample

GREEDY_BELOW = 1e-5
LEAST_TEMPERATURE = 1e-2
"""vLLM's two limits: colder than the first is greedy, and between them this is used, or the numbers overflow."""
_DONE_ELSEWHERE = ("max_tokens", "seed", "n", "stop")
"""`Sample` has the first two, samples are fanned out before the engine, stop strings are looked for in the text."""
_SAY_NOTHING = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
"""Values not done here, and what makes each of them mean nothing."""


def sampling_options(sample: Sample) -> SamplingOptions:
    """
    Raises:
        DecodingError: a value cannot be honoured, or is out of range; the message names it.
    """
    said = sample.sampling.said()
    for name in _DONE_ELSEWHERE:
        said.pop(name, None)
    temperature = said.pop("temperature", 1.0)
    top_p, top_k, min_p = said.pop("top_p", 1.0), said.pop("top_k", 0), said.pop("min_p", 0.0)
    for name, value in said.items():
        if name not in _SAY_NOTHING or value != _SAY_NOTHING[name]:
            shown = str(value) if len(str(value)) <= 60 else f"{str(value)[:57]}..."
            raise DecodingError(
                f"{name} is {shown}, which the reference backend cannot do: leave it out, or use a model with backend "
                "vllm"
            )
    if temperature < GREEDY_BELOW:
        return SamplingOptions(seed=sample.seed)
    return SamplingOptions(
        temperature=max(temperature, LEAST_TEMPERATURE),
        top_p=top_p,
        top_k=max(top_k, 0),  # -1 is off, too
        min_p=min_p,
        seed=sample.seed,
    )
