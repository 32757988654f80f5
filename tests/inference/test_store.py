"""The host's copy of draws and statistics."""

import types

import numpy as np

from ppleffects.inference.store import Phase, Series


def test_series_turns_rows_and_drops_padding():
    series = Series(num_chains=2, num_rows=5)
    first, second = np.arange(12.0).reshape(2, 3, 2), np.arange(6.0).reshape(1, 3, 2)
    series.append({"x": first})
    series.append({"x": second})
    expected = np.moveaxis(np.concatenate([first, second]), 0, 1)[:2]
    np.testing.assert_array_equal(series.arrays()["x"], expected)


def test_phase_counts_all_transitions_and_keeps_every_second():
    phase = Phase(num_chains=2, num_steps=6, thinning=2)
    ones = np.ones((8, 3))
    infos = {
        "diverging": ones.astype(bool),
        "n_steps": 7 * ones,
        "step_size": ones,
        "lp": np.arange(8.0)[:, None] + ones,
    }
    draws = types.SimpleNamespace(posterior={"x": np.arange(4.0)[:, None] + np.zeros(3)}, log_likelihood={})
    phase.append(6, infos, draws, record=True)
    assert phase.num_diverging.tolist() == [6, 6]
    assert phase.num_leapfrogs.tolist() == [42, 42]
    assert phase.posterior.arrays()["x"].tolist() == [[0.0, 1.0, 2.0]] * 2
    assert phase.sample_stats.arrays()["lp"].tolist() == [[2.0, 4.0, 6.0]] * 2
    assert phase.log_likelihood.arrays() == {}
