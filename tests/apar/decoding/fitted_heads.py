"""Medusa heads fitted to a tiny model's own answers, so that drafts of theirs are taken."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tiny_models import CHILD, EOS, FORK, MAX_MODEL_LEN

from apar.decoding.medusa_heads import MedusaHeads, save_heads
from apar.options import ControlTokens, ForkLimits
from apar.reference import ReferenceDecoder


def fitted_heads(folder: Path, model: Any, prompts: Sequence[list[int]], max_tokens: int = 60) -> Path:
    """Write heads for a model, fitted to its greedy answers to these prompts; returns `folder`."""
    decoder = ReferenceDecoder(model, ControlTokens(FORK, CHILD), ForkLimits(), [EOS], MAX_MODEL_LEN)
    states, labels = [], []
    for prompt in prompts:
        for thread in decoder.decode(prompt, max_tokens=max_tokens).threads:
            path = torch.tensor(thread.path)
            if len(path) < 4:
                continue
            with torch.no_grad():
                hidden_td = model.get_decoder()(input_ids=path[None]).last_hidden_state[0]
            states.append(hidden_td[:-3])
            labels.append(torch.stack([path[2:-1], path[3:]]))
    states_nd, labels_kn = torch.cat(states), torch.cat(labels, dim=1)
    torch.manual_seed(0)
    heads = MedusaHeads.beginning(model.get_output_embeddings().weight.detach(), 2, 2)
    optimizer = torch.optim.Adam(heads.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(heads(states_nd).flatten(0, 1), labels_kn.flatten()).backward()
        optimizer.step()
    folder.mkdir()
    save_heads(heads, folder, torch.float32)
    return folder
