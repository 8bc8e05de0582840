"""A checkpoint on a full disk: the error the system has, nothing half-written, the one before still there."""

import errno
from typing import Any

import pytest
import torch

from apar.training import checkpoints


def test_a_full_disk_leaves_the_checkpoint_before_and_nothing_half_written(small_disk: Any) -> None:
    disk = small_disk(6 << 20)
    folder = disk.folder / "checkpoints"
    state = {"weights": {"a": torch.arange(400_000)}}  # 3.2 MB
    checkpoints.save(folder, 1, state)
    with pytest.raises(OSError, match="No space left on device") as caught:
        checkpoints.save(folder, 2, state)
    assert caught.value.errno == errno.ENOSPC
    assert disk.names() == ["checkpoints", "checkpoints/step-00000001", "checkpoints/step-00000001/state.pt"]
    found = checkpoints.latest(folder)
    assert found is not None
    assert found[0] == 1
    assert torch.equal(found[1]["weights"]["a"], state["weights"]["a"])


def test_an_error_that_is_no_full_disk_stays_itself(tmp_path: Any) -> None:
    with pytest.raises(Exception, match=r"pickle|Can't"):
        checkpoints.save(tmp_path, 1, {"weights": lambda: None})
    assert list(tmp_path.iterdir()) == []
