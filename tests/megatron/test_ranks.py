"""The launcher: what ranks return, and how their failures are told."""

from __future__ import annotations

import os
import pickle
import signal
import time

import pytest
import torch

from mcore_snap.testing.ranks import RankFailure, run_ranks


def summed(rank: int, offset: int) -> tuple[int, int, int]:
    """Add the ranks up with a collective."""
    total = torch.tensor(rank + offset)
    torch.distributed.all_reduce(total)
    return rank, int(total), torch.get_num_threads()


def process_ids(rank: int) -> tuple[int, int]:
    """Tell which process this is, and which one forked it."""
    del rank
    return os.getpid(), os.getppid()


def fail_on_rank_one(rank: int, how: str) -> None:
    """Fail in one of several ways on rank 1, while rank 0 waits for it in a collective."""
    if rank == 1:
        if how == "raise":
            raise ValueError("a message to find again")
        if how == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(3)
        time.sleep(60)
    torch.distributed.barrier()


def unpicklable(rank: int) -> object:
    """Return what cannot travel."""
    return lambda: rank


def test_results_come_in_rank_order_from_one_group() -> None:
    """Each rank has its number, a working group, the arguments, and one thread."""
    assert run_ranks(summed, 2, 10) == [(0, 21, 1), (1, 21, 1)]


def test_ranks_are_fresh_forks_of_one_launcher() -> None:
    """No rank is reused, and Megatron-Core is imported once for all of them."""
    first, second = run_ranks(process_ids, 1) + run_ranks(process_ids, 1)
    assert first[0] != second[0]
    assert first[1] == second[1] != os.getpid()


def test_autograd_in_this_process_does_not_harm_the_ranks() -> None:
    """Ranks fork from the launcher, never from a process whose autograd threads run."""
    torch.ones(2, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]  # torch has no types for it
    assert run_ranks(summed, 1, 1) == [(0, 1, 1)]


@pytest.mark.parametrize(
    ("how", "message"),
    [("raise", "ValueError: a message to find again"), ("signal", "SIGKILL"), ("exit", "exit status 3")],
)
def test_a_failing_rank_is_named_while_its_peer_hangs(how: str, message: str) -> None:
    """The rank that failed first is reported, at once, with what happened to it."""
    begin = time.monotonic()
    with pytest.raises(RankFailure, match=message) as caught:
        run_ranks(fail_on_rank_one, 2, how)
    assert caught.value.rank == 1
    assert time.monotonic() - begin < 30


def test_a_late_rank_is_killed() -> None:
    """The time limit ends ranks that hang, and the next call works."""
    with pytest.raises(RankFailure, match=r"no result after 1.0 seconds .*\[0, 1\]"):
        run_ranks(fail_on_rank_one, 2, "hang", timeout=1.0)
    assert run_ranks(summed, 1, 1) == [(0, 1, 1)]


def test_an_unpicklable_result_is_a_failure_of_its_rank() -> None:
    """It is not lost, and does not hang the caller."""
    with pytest.raises(RankFailure, match="unpicklable"):
        run_ranks(unpicklable, 1)


def test_a_failure_can_be_pickled() -> None:
    """Test runners send exceptions between processes."""
    failure = pickle.loads(pickle.dumps(RankFailure(1, "it died")))
    assert (failure.rank, failure.details, str(failure)) == (1, "it died", "rank 1 failed: it died")


def test_no_ranks_are_refused() -> None:
    """Zero ranks would return an empty list, which passes every check of results."""
    with pytest.raises(ValueError, match="world=0"):
        run_ranks(summed, 0, 1)


def test_a_function_of_the_script_is_refused() -> None:
    """The launcher has another __main__, where it might even find another function of that name."""

    def local(rank: int) -> int:
        return rank

    local.__module__ = "__main__"
    with pytest.raises(ValueError, match="importable module"):
        run_ranks(local, 1)


def die_the_first_time(rank: int, marker: str) -> str:
    """Crash, unless that has happened before."""
    import os
    import signal
    from pathlib import Path

    if rank == 0 and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGABRT)
    return "done"


def test_a_crash_that_does_not_happen_again_is_not_ours(tmp_path) -> None:
    """Gloo crashes now and then while it starts; a second crash is told."""
    assert run_ranks(die_the_first_time, 1, str(tmp_path / "crashed")) == ["done"]
