"""Keys and values of an answer's threads and drafts, in one pool of slots.

A slot holds one position of every layer. A path is a list of slots, so threads share a prefix by naming the same slots,
a rejected draft gives its slots to the next one, and an accepted path stays where it is: freeing is its compaction.
Where a position lies makes no difference to attention: keys carry their position, and the mask says who sees whom.
"""

import heapq
from collections.abc import Iterable
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

FIRST_SLOTS = 256
"""The pool doubles from here."""


class SlotPool:
    """Which slots are free. Each slot in use has a number of holders, and is free when the last one lets go."""

    def __init__(self) -> None:
        self._holders: list[int] = []
        self._free: list[int] = []
        self.num_used = 0
        self.num_spanned = 0
        """Slots from 0 to the last one in use."""

    def take(self, num_slots: int) -> list[int]:
        """Slots with one holder each, the lowest that are free: attention reads all up to the last one in use."""
        taken = []
        for _ in range(num_slots):
            if self._free:
                slot = heapq.heappop(self._free)
            else:
                slot = len(self._holders)
                self._holders.append(0)
            self._holders[slot] = 1
            taken.append(slot)
        self.num_used += num_slots
        self.num_spanned = max([self.num_spanned, *(slot + 1 for slot in taken)])
        return taken

    def share(self, slots: Iterable[int]) -> None:
        for slot in slots:
            assert self._holders[slot] > 0
            self._holders[slot] += 1

    def release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            assert self._holders[slot] > 0
            self._holders[slot] -= 1
            if self._holders[slot] == 0:
                heapq.heappush(self._free, slot)
                self.num_used -= 1
        while self.num_spanned and self._holders[self.num_spanned - 1] == 0:
            self.num_spanned -= 1


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values, [1, key-value heads, slots, head size]; `writes_to` is set before a forward."""

    is_sliding = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.writes_to = torch.empty(0, dtype=torch.long)
        self.num_spanned = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = _empty(key_states, FIRST_SLOTS)
        self.values = _empty(value_states, FIRST_SLOTS)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.num_spanned > self.keys.shape[2]:
            num_slots = max(self.num_spanned, 2 * self.keys.shape[2])
            self.keys, self.values = _grown(self.keys, num_slots), _grown(self.values, num_slots)
        self.keys.index_copy_(2, self.writes_to, key_states)
        self.values.index_copy_(2, self.writes_to, value_states)
        return self.keys[:, :, : self.num_spanned], self.values[:, :, : self.num_spanned]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_spanned, 0

    def get_seq_length(self) -> int:
        return self.num_spanned

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):  # type: ignore[misc]
    """transformers' view of the pool: a forward writes the slots it was told and reads all that are spanned."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[SlotLayer() for _ in range(num_layers)])
        self.pool = SlotPool()

    def write_to(self, slots: torch.Tensor) -> None:
        """Say where the next forward's keys and values go: slots [tokens] of the pool, int64, on the device."""
        for layer in self.layers:
            assert isinstance(layer, SlotLayer)
            layer.writes_to, layer.num_spanned = slots, self.pool.num_spanned


def _empty(states: torch.Tensor, num_slots: int) -> torch.Tensor:
    # Zeros: a masked slot still takes part in the sum, times zero, which garbage may turn into NaN.
    return states.new_zeros((1, states.shape[1], num_slots, states.shape[3]))


def _grown(states: torch.Tensor, num_slots: int) -> torch.Tensor:
    grown = _empty(states, num_slots)
    grown[:, :, : states.shape[2]] = states
    return grown
