"""The same DataTree for draws of one's own, which ArviZ reads."""

import types

import arviz_stats
import numpy as np

from ppleffects.interop.arviz import to_datatree


def test_arviz_summarises_it():
    draws = np.random.default_rng(0).normal(size=(4, 200, 2))
    tree = to_datatree({"posterior": {"a": draws}}, {"a": types.SimpleNamespace(shape=(2,), dims=("place",))})
    summary = arviz_stats.summary(tree, round_to="none")
    assert list(summary.index) == ["a[0]", "a[1]"]
    np.testing.assert_allclose(summary["mean"], draws.mean(axis=(0, 1)))
