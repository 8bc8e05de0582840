"""Tiny models with real random weights, in ordinary Hugging Face folders, whose greedy answers fork, nest and end.

Two layers of Llama, 64 wide, float32, a byte-level tokenizer of printable ASCII. Each token depends on the whole path,
so wrong KV shows in the tokens, which forced tokens would hide: a hundred tokens later, one token in ten still
changes with a single one.

Measured with the defaults on 200 random prompts of 4 to 40 tokens, 300 tokens at most: 4.0 threads on average, 1 in 46%
of the answers and up to 25, nested in 40%; 16 tokens per thread (90%: at most 39). The two best logits are 0.7 apart in
the middle, under 0.001 once in 1,000 tokens, under 0.0003 three times in 14,000, while float32 errs by 0.00001 in the
middle and 0.0001 at most.
"""

from pathlib import Path
from random import Random

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BOS, EOS, UNKNOWN, FORK, CHILD = range(5)
CHARACTERS = ["\n", *map(chr, range(32, 127))]
PAIRS = "th he in er an re on at en nd ti es or te of ed is it al ar st to nt".split()  # noqa: SIM905
"""Tokens of two letters, so that text and tokens are not the same thing."""
FIRST_PLAIN = 5
VOCAB_SIZE = FIRST_PLAIN + len(CHARACTERS) + len(PAIRS)
MAX_MODEL_LEN = 512
FLOAT32_ERROR = 3e-4
"""More than two logits of these models move apart with the order in which float32 numbers are added."""
STANDARD_DEVIATIONS = {
    "embed_tokens": 1.0,
    "q_proj": 0.3,  # sharper attention errs more, softer attention repeats itself
    "k_proj": 0.3,
    "v_proj": 0.2,
    "o_proj": 0.6,
    "mlp": 0.15,
    "lm_head": 0.3,
}


def make_tiny_model(
    folder: Path,
    *,
    seed: int = 3,
    fork_scale: float = 2.2,
    end_scale: float = 1.75,
    max_depth: int = 2,
) -> Path:
    """Write a model folder, the same for the same arguments; returns `folder`.

    Args:
        seed: of the weights. Others fork too, some much more (5, 11), some less (2, 15).
        fork_scale: how much longer [Fork]'s output row is than an ordinary token's: how often threads fork.
        end_scale: the same for EOS: how soon threads end.
        max_depth: of forks, as config.json says it.
    """
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=None,
        dtype="float32",
        apar={"fork_token_id": FORK, "child_token_id": CHILD, "max_depth": max_depth},
    )
    model = LlamaForCausalLM(config).to(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:  # the others are the norms' scales, 1
                std = next(std for part, std in STANDARD_DEVIATIONS.items() if part in name)
                weight.normal_(0.0, std, generator=generator)
        model.lm_head.weight[FORK] *= fork_scale
        model.lm_head.weight[EOS] *= end_scale
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    """Printable ASCII as bytes, some pairs merged; control tokens are ordinary added tokens, as in trained models."""
    special = ["<s>", "</s>", "<unk>"]
    spelled = [{" ": "Ġ", "\n": "Ċ"}.get(character, character) for character in CHARACTERS]  # as ByteLevel writes them
    texts = [*special, "[Fork]", "[Child]", *spelled, *PAIRS]
    vocabulary = {text: token_id for token_id, text in enumerate(texts)}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[(a, b) for a, b in PAIRS], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken(text, normalized=False) for text in ("[Fork]", "[Child]")])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=MAX_MODEL_LEN,
        chat_template="{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}",
    )


def random_prompts(n: int, seed: int, min_tokens: int = 4, max_tokens: int = 40) -> list[list[int]]:
    """Token ids of `n` prompts without control tokens, the same for the same arguments."""
    random = Random(seed)
    return [
        [random.randrange(FIRST_PLAIN, VOCAB_SIZE) for _ in range(random.randint(min_tokens, max_tokens))]
        for _ in range(n)
    ]


class GapRecorder:
    """A greedy `choose` for the reference decoder that remembers how near the second token came.

    Over some ten thousand tokens two logits come nearer than float32's error, and two right decoders may then differ:
    leave out a prompt whose `smallest_gap` is below `FLOAT32_ERROR`.
    """

    def __init__(self) -> None:
        self.smallest_gap = float("inf")

    def __call__(self, logits_v: torch.Tensor) -> int:
        (best, second), (token, _) = (values.tolist() for values in logits_v.topk(2))
        self.smallest_gap = min(self.smallest_gap, best - second)
        return int(token)
