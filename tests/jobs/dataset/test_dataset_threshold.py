"""The least likeness that counts as nearly the same: as low as the index still finds what it promises."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.dataset.duplicates import LEAST_RECALL, LEAST_THRESHOLD, bands
from jobs.dataset.flags import options_said
from jobs.dataset.options import ExportOptions
from jobs.errors import BadInput


@given(st.floats(LEAST_THRESHOLD, 1))
def test_the_promised_recall_is_kept_at_every_threshold_that_may_be_said(threshold: float) -> None:
    number, length = bands(threshold)
    assert 1 - (1 - threshold**length) ** number >= LEAST_RECALL


@pytest.mark.parametrize("threshold", [0.0, 0.01, 0.0499, -1.0, float("nan")])
def test_a_lower_threshold_is_refused_with_the_limit(threshold: float) -> None:
    limit = "it should be less than or equal to 1" if threshold != threshold else "greater than or equal to 0.05"
    with pytest.raises(BadInput, match=f"--near-threshold is {threshold}: .*{limit}"):
        options_said(ExportOptions(), {"near_threshold": threshold})
    assert options_said(ExportOptions(), {"near_threshold": 0.05}).near_threshold == 0.05
