"""All day long: resident memory is flat after the first rounds, on a real model."""

from __future__ import annotations

from soak_rank import rounds_of_one_version, rounds_of_versions

from mcore_snap.testing.ranks import run_ranks

WARM = 100
"""Rounds after which allocators have seen all sizes."""

SLACK = 256 << 10
"""Bytes that allocators may take for our part of all later rounds together: less than three snapshots."""


def test_500_rounds_of_train_snapshot_load_drop() -> None:
    """After round `WARM`, taking, loading and dropping adds nothing to resident memory; one slab serves all rounds.

    Training by itself adds some 6 KiB a round, so the whole is held against a fifth of a snapshot a round.
    """
    (found,) = run_ranks(rounds_of_one_version, 1, 500)
    assert len(found["resident"]) == 500
    size = found["stats"][0][2]
    assert found["stats"] == [(0, size, size)]
    assert len(found["ours"]) == 125
    assert sum(found["ours"][WARM // 4 :]) <= SLACK
    assert found["resident"][-1] - found["resident"][WARM] <= (500 - WARM) * size / 5


def test_200_rounds_in_which_versions_are_kept_and_dropped() -> None:
    """The account of memory fits the versions that there are, and resident memory stays as after the first rounds."""
    (found,) = run_ranks(rounds_of_versions, 1, 200, 3)
    assert found["peak"] <= 4
    assert found["leased"] == found["count"]
    assert found["free"] == 1
    assert found["after"] == (1, 0, 0)
    assert max(found["resident"][WARM:]) - found["resident"][WARM] <= (200 - WARM) * found["size"] / 5
