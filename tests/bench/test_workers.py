"""Worker processes."""

import os
import signal

from caveat.bench.workers import Died, in_processes


def die(job: int) -> int:
    if job == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return 10 * job


def test_a_worker_that_dies_costs_one_job() -> None:
    found = dict(in_processes(die, [0, 1, 2, 3], lambda job: True, 2))
    assert {job: answer for job, answer in found.items() if job != 1} == {0: 0, 2: 20, 3: 30}
    assert isinstance(found[1], Died)
    assert "SIGKILL" in found[1].reason
