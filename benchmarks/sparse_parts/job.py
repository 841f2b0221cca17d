"""One measurement in a process of its own: what it is asked for, and the asking."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .cases import PEERS
from .sizes import MIB


@dataclass(frozen=True)
class Job:
    """Training, or bayesian-torch's prediction."""

    case: str
    way: str
    batch: int
    device: str
    threads: int
    interval: int  # steps of a block, of which the last exchanges weights
    blocks: int  # of which the first is not timed
    processor_time: bool
    compiled: bool = False
    part: str = "training"  # or "prediction", in as many rounds as a block has steps

    @property
    def steps(self) -> int:
        """In all."""
        return self.interval * self.blocks


def measure(job: Job, peer: str | None, limit: float) -> dict[str, Any]:
    """Run a job in a new process; -P keeps scripts that have the names of packages from the head of its path."""
    python = str(peer) if job.way in PEERS else sys.executable
    script = Path(__file__).resolve().parent.parent / "sparse.py"
    command = [python, "-P", str(script), "--job", json.dumps(dataclasses.asdict(job))]
    root, given = str(script.parent.parent), os.environ.get("PYTHONPATH")
    environment = os.environ | {"PYTHONPATH": root if given is None else f"{root}{os.pathsep}{given}"}
    environment["OMP_NUM_THREADS"] = str(job.threads)
    failure = ""
    found: dict[str, Any] = {}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]  # a library may print as well
        found = json.loads(lines[-1]) if lines else {}
        if done.returncode or not lines:
            failure = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        failure = "over the time limit"
    what = f"step {found.get('plain_s', math.nan):.4f} s, exchanging {found.get('update_s') or math.nan:.4f} s"
    if job.part == "prediction":
        what = f"prediction, batch {job.batch}, {found.get('step_s', math.nan):.4f} s"
    size = found.get("training_bytes", found.get("stored_bytes", math.nan)) / MIB
    print(
        f"{job.case:<18} {job.way:<34} {'compiled' if job.compiled else '':<8} {what}, {size:.1f} MiB, "
        f"load {os.getloadavg()[0]:.1f} {failure}",
        flush=True,
    )
    return found | {"failure": failure}
