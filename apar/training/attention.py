"""How a model attends to a row of trees: SDPA per tree on CPUs, FlexAttention over the row on CUDA.

Transformers hands unknown keyword arguments of `forward` down to its attention functions; ours finds its masks there.
Per tree costs the sum of the squares of the trees' lengths, a dense mask over the row the square of the sum.
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from apar.training.packing import Row, block_mask, tree_mask

NAME = "forq_tree"


def register() -> None:
    """Make `attn_implementation=NAME` known to transformers; may be called again."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, tree_attention)


def implementation(device: torch.device) -> str:
    """What to load the model with."""
    return "flex_attention" if device.type == "cuda" else NAME


def masks(row: Row, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Keyword arguments for `forward`: the row's mask in the form that `implementation` wants.

    Args:
        dtype: in which attention is computed.
    """
    if device.type == "cuda":
        return {"attention_mask": block_mask(row, device)}
    trees = []
    for tree, (start, end) in zip(row.trees, row.spans(), strict=True):
        sees = torch.from_numpy(tree_mask(tree))
        # Added to the scores. SDPA would make this of a boolean mask anew in every layer.
        added = torch.zeros(sees.shape, dtype=dtype).masked_fill_(~sees, -torch.inf)
        trees.append((start, end, added[None, None].to(device)))
    return {"forq_trees": trees}


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    forq_trees: list[tuple[int, int, torch.Tensor]] | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Shapes: query [1, heads, T, d], key and value [1, key-value heads, T, d]; returns [1, T, heads, d].

    Raises:
        ValueError: the masks did not come through: the model hands its attention no keyword arguments.
    """
    if forq_trees is None:
        raise ValueError("the model does not hand keyword arguments on to its attention")
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # with a mask, `enable_gqa` would leave the fast kernel
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    parts = [
        scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, start:end],
            value[:, :, start:end],
            attn_mask=mask.to(query.dtype),
            dropout_p=dropout,
            scale=scaling,
        )
        for start, end, mask in forq_trees
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None
