"""A run: what a fit is given beside its task. Generator, device, ranks, progress, and the folder that keeps its place.

A long fit calls `checkpoint(carry, note)` now and then and `append(name, draw)` for each finished draw or member;
started again with the same folder it finds both with `resume()` and `appended(name)`. The folder remembers which
method, network, data and seed it belongs to, and refuses any other.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from tqdm.auto import tqdm

from caveat.engine.distributed import Ranks
from caveat.files import remove_folder
from caveat.network import Layer, Network
from caveat.notebooks import facts_html, notes_html, table_html
from caveat.storage import FORMAT, CorruptFile, State, read_json, read_state, write_json, write_state
from caveat.typed_json import read_as

__all__ = ["Beside", "Info", "Run", "RunFile", "StartsFrom", "digest_of_finished"]

_FINISHED = "finished.json"

# "trained" refuses a network that has learned nothing, "scratch" trains the weights it is given, "fresh" draws its own.
StartsFrom = Literal["trained", "scratch", "fresh"]


@dataclass(frozen=True)
class Info:
    """What a person wants to know of a fit; plain json."""

    coverage: list[dict[str, Any]]  # one entry a layer: layer, kind, parameters, treatment, why
    diagnostics: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0
    peak_bytes: int = 0  # of the device's allocator, or of this process on a CPU
    gradient_evaluations: int = 0  # passes over all training rows, forward and backward
    flops: float = 0.0  # of those passes
    stored_bytes: int = 0
    start: dict[str, float] = field(default_factory=dict)  # what the posterior that it started from cost besides
    seed: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    forward: dict[str, Any] = field(default_factory=dict)  # what the network computes: see `forward_probe.py`

    def _repr_html_(self) -> str:
        facts = {
            "fitted in": f"{self.seconds:.1f} s",
            "stored": f"{self.stored_bytes:,} bytes",
            "peak memory": f"{self.peak_bytes:,} bytes",
            "passes over the data": self.gradient_evaluations,
            "seed": self.seed,
        }
        heads = ("layer", "kind", "parameters", "treatment", "why")
        layers = [[layer.get(head, "") for head in heads] for layer in self.coverage]
        warnings = notes_html([f"Warning: {warning}" for warning in self.warnings])
        return facts_html("Info", facts, warnings + table_html("What the fit is about", heads, layers))


class Beside(Protocol):
    """Other fits that are made at the same time, as `engine.training.Meeting`."""

    def enter(self, run: "Run") -> None:
        """The fit begins."""

    def leave(self) -> None:
        """The fit ends."""

    def train(self, loops: Sequence[Any]) -> bool:
        """Run loops of the fit with those of others; False, with nothing done, if there are no others any more."""


@dataclass
class Run:
    """One fit's surroundings."""

    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    ranks: Ranks = field(default_factory=Ranks)
    folder: Path | None = None
    identity: dict[str, Any] = field(default_factory=dict)  # what the folder belongs to
    forward: dict[str, Any] = field(default_factory=dict)  # what the network computes
    progress: bool = False
    label: str = ""
    seconds_between_checkpoints: float = 10.0
    warnings: list[str] = field(default_factory=list)
    gradient_evaluations: float = 0.0
    flops: float = 0.0
    beside: Beside | None = None

    def __post_init__(self) -> None:
        self.rng = torch.Generator().manual_seed(self.seed)
        self._saved_at = self._started_at = time.monotonic()
        self._share = 1.0  # of the time since then that is this run's
        self._seconds_before = 0.0  # of an earlier, interrupted run that this one goes on from
        self._written: set[str] = set()  # what this run itself has kept: its time is counted already
        if self.folder is None:
            return
        if (self.folder / "run.json").exists():
            claimed = dict(read_as(self.folder / "run.json", RunFile).identity)
            identity = json.loads(json.dumps(self.identity))  # as it would be read
            if "knobs" in identity and "knobs" not in claimed:  # begun when method and knobs were one entry
                claimed |= {"method": identity["method"], "knobs": claimed.get("method")}
            if "code of augment" not in claimed:  # begun when only its name was kept
                identity.pop("code of augment", None)
            different = sorted(key for key in claimed.keys() | identity.keys() if claimed.get(key) != identity.get(key))
            if different:
                told = f"{self.folder} holds an unfinished fit with {_told(different)}"
                raise ValueError(f"{told}: delete it, or choose another folder")
        elif self.ranks.first:
            self.folder.mkdir(parents=True, exist_ok=True)
            content = {"format": FORMAT, "identity": self.identity, "forward": self.forward}
            write_json(self.folder / "run.json", content)
        self.ranks.wait()

    def child(self, name: str, *, alone: bool = False) -> "Run":
        """A run for a part of this one, with a seed of its own that does not depend on what ran before it.

        Costs are added to the parent by `absorb`. With `alone` the part is the work of this rank only.
        """
        seed = int.from_bytes(hashlib.sha256(f"{self.seed}/{name}".encode()).digest()[:7], "big")
        return Run(
            seed,
            self.device,
            Ranks() if alone else self.ranks,
            None if self.folder is None else self.folder / name,
            self.identity | {"part": name},
            self.forward,
            self.progress,
            f"{self.label} {name}".strip(),
            self.seconds_between_checkpoints,
            beside=self.beside,
        )

    def seconds(self) -> float:
        """Time spent so far, earlier runs that this one goes on from included."""
        return self._seconds_before + self._share * (time.monotonic() - self._started_at)

    def restart_clock(self, share: float = 1.0) -> None:
        """Count time from now on, and a share of it only where several runs work at the same time."""
        self._started_at, self._share = time.monotonic(), share

    def leave_out(self, seconds: float) -> None:
        """Do not count so many of the seconds until now."""
        self._started_at += seconds

    def absorb(self, part: "Run") -> None:
        """Count a part's costs and warnings as this run's, and the time that an earlier run had spent on it."""
        self.gradient_evaluations += part.gradient_evaluations
        self.flops += part.flops
        self._seconds_before += part._seconds_before
        self.warnings.extend(w for w in part.warnings if w not in self.warnings)

    def add_costs_of_ranks(self) -> None:
        """Count what every rank did alone."""
        costs = torch.tensor([self.gradient_evaluations, self.flops], dtype=torch.float64, device=self.device)
        self.ranks.add([costs])
        self.gradient_evaluations, self.flops = costs.tolist()

    def absorb_start(self, info: Info, *, earlier: bool) -> None:
        """Count the fit that this one starts from; its time too when it was made by an `earlier`, killed run."""
        self.gradient_evaluations += info.gradient_evaluations
        self.flops += info.flops
        self.warnings.extend(info.warnings)
        self._seconds_before += info.seconds if earlier else 0.0

    def bar(self, total: int, unit: str) -> tqdm:
        """A progress bar on standard error that shows itself after a second."""
        hidden = not (self.progress and self.ranks.first)
        return tqdm(total=total, unit=unit, desc=self.label, delay=1.0, disable=hidden, leave=False)

    @contextmanager
    def counting(self, unit: str) -> Iterator[Callable[[int, int], None]]:
        """A progress bar for work that tells how far it is, of how much."""
        with self.bar(0, unit) as bar:

            def counted(done: int, of: int) -> None:
                bar.total = of
                bar.update(done - bar.n)

            yield counted

    @staticmethod
    def tell(bar: tqdm, text: str) -> None:
        """Put words beside a progress bar between its steps, once the bar is visible."""
        bar.set_postfix_str(text, refresh=not bar.disable and bar.format_dict["elapsed"] > bar.delay)

    def checkpoint_due(self) -> bool:
        """Whether enough time has passed since the last checkpoint to write another."""
        return self.folder is not None and time.monotonic() - self._saved_at >= self.seconds_between_checkpoints

    def checkpoint(self, carry: State, note: dict[str, Any]) -> None:
        """Write what is needed to go on from here: tensors, and json beside them."""
        started = time.monotonic()
        if self.ranks.first:
            self.append("checkpoint", carry, note)
        self._saved_at = time.monotonic()
        # Large carries take long to write: not more than a twentieth of the time goes into it.
        self.seconds_between_checkpoints = max(self.seconds_between_checkpoints, 20 * (self._saved_at - started))

    def resume(self) -> tuple[State, dict[str, Any]] | None:
        """The last checkpoint, or None when there is none."""
        return self.appended("checkpoint")

    def append(self, name: str, draw: State, note: dict[str, Any] | None = None) -> None:
        """Keep a finished draw or member under a name, in place of an earlier one of that name."""
        if self.folder is None:
            return
        described = self.folder / f"{name}.json"
        earlier = _piece(described).file if described.exists() else None
        # Two files take turns: until the json is replaced, the one it speaks of stays as it is.
        file = f"{name}-1.safetensors" if earlier == f"{name}-0.safetensors" else f"{name}-0.safetensors"
        digest = write_state(self.folder / file, draw)
        costs = {"gradient_evaluations": self.gradient_evaluations, "flops": self.flops, "seconds": self.seconds()}
        content = {"format": FORMAT, "file": file, "digest": digest, "note": note or {}, "costs": costs}
        write_json(described, content)
        self._written.add(name)
        if earlier is not None:
            (self.folder / earlier).unlink(missing_ok=True)

    def appended(self, name: str) -> tuple[State, dict[str, Any]] | None:
        """What was kept under a name and its note, or None; what it had cost by then counts as this run's."""
        if self.folder is None or not (self.folder / f"{name}.json").exists():
            return None
        entry = _piece(self.folder / f"{name}.json")
        self.gradient_evaluations = max(self.gradient_evaluations, entry.costs.gradient_evaluations)
        self.flops = max(self.flops, entry.costs.flops)
        if name not in self._written:
            self._seconds_before = max(self._seconds_before, entry.costs.seconds)
        return read_state(self.folder / entry.file, entry.digest), entry.note

    def finish(self, digest: str) -> None:
        """Note which posterior the folder's content is about to become, by the digest of its tensors.

        Whoever finds the folder beside that posterior knows that the process was killed before it could remove it.
        """
        if self.folder is not None:
            write_json(self.folder / _FINISHED, {"format": FORMAT, "digest": digest})

    def discard(self) -> None:
        """Remove the folder, once its content has become a posterior."""
        if self.folder is not None:
            remove_folder(self.folder)

    def info(
        self,
        network: Network,
        treatment: str | Callable[[Layer], str],
        diagnostics: dict[str, Any] | None = None,
    ) -> Info:
        """What a person wants to know of this fit; `treatment` is that of all selected parameters, or of each layer."""
        coverage = [
            {
                "layer": layer.name or "(module)",
                "kind": layer.kind,
                "parameters": layer.parameters,
                "treatment": _treated(layer, treatment),
                "why": layer.why,
            }
            for layer in network.layers()
        ]
        return Info(coverage, diagnostics or {}, list(self.warnings))


@dataclass(frozen=True)
class RunFile:
    """What `run.json` holds: what the folder belongs to, and what its network computes."""

    identity: dict[str, Any]
    forward: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Costs:
    gradient_evaluations: float
    flops: float
    seconds: float


@dataclass(frozen=True)
class _Piece:
    """What the json beside kept tensors holds."""

    file: str
    digest: str
    note: dict[str, Any]
    costs: _Costs


def _piece(path: Path) -> _Piece:
    piece = read_as(path, _Piece)
    if piece.file != Path(piece.file).name:
        raise CorruptFile(f"{path}: file is {piece.file!r}, which is not one beside it")
    return piece


def digest_of_finished(folder: Path) -> str | None:
    """The digest of the posterior that a run's folder was about to become; None for a run that had not come so far."""
    return read_json(folder / _FINISHED).get("digest") if (folder / _FINISHED).exists() else None


def _told(different: list[str]) -> str:
    """What of a fit's identity is different, in words; not what follows from the rest."""
    if "seed" in different:  # all else is drawn by it
        different = ["seed"]
    if "method" in different:
        different = [key for key in different if key not in ("knobs", "start")]
    return ", ".join("other knobs of the method" if key == "knobs" else f"another {key}" for key in different)


def _treated(layer: Layer, treatment: str | Callable[[Layer], str]) -> str:
    if not layer.selected:
        return "fixed"
    if not isinstance(treatment, str):
        treatment = treatment(layer)
    return treatment if layer.selected == layer.parameters else f"{treatment}, in part"
