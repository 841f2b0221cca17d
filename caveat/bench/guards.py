"""Guard rails: where a Bayesian method is worse than MAP with temperature scaling, or cannot be told from it.

A posterior costs more than a point. On each data set, clean, under each shift (severities averaged) and on out-of-
distribution inputs, every method gets one word: better, worse or not distinguishable, from the paired 95% interval of
one score: the NLL, which no overconfidence escapes, and out of distribution the AUROC of the whole uncertainty. Clean
rows have a second word where there are several seeds, for what no temperature can give: the NLL of several labels
together. A difference that the interval is sure of and that the digits shown do not show is called level.

A temperature is fitted on clean rows and can make a network too sure of shifted ones. Then the plain MAP is better than
the tempered one too, and a posterior that did nothing would look good: one that is better than the tempered MAP and not
than the plain one is marked.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from caveat.bench.plan import MAP
from caveat.bench.results import Result, Row

__all__ = ["Guard", "guard_text", "guards"]

SCORES = ("nll", "auroc_entropy", "auroc_variance")  # what a verdict goes by; a condition has one of them
JOINT = "joint_nll"  # and clean rows this one too
DIGITS = 3  # decimals of a gain that are shown
WORDS = ("worse", "not distinguishable", "level", "better")


@dataclass(frozen=True)
class Guard:
    """What is to be said of all methods on one condition of a data set."""

    data: str
    model: str
    shift: str
    role: str
    metric: str
    baseline: str
    verdicts: dict[str, str]  # method -> one of WORDS; the plain MAP among them
    intervals: dict[str, tuple[float | None, float | None, float | None]]  # method -> gain, low, high
    marked: tuple[str, ...]  # better than the baseline, but not than the plain MAP
    over: str  # what the intervals speak of
    warned: dict[str, tuple[str, ...]] = field(default_factory=dict)  # method, baseline too -> what its fits warned of
    notes: tuple[str, ...] = ()  # what beside the methods differs from the reference that they are scored against

    def of(self, word: str) -> list[str]:
        """The methods with a verdict."""
        return [method for method, verdict in self.verdicts.items() if verdict == word]

    @property
    def place(self) -> str:
        """The condition and the score that the verdicts go by."""
        where = "clean" if self.role == "clean" else f"{self.shift} told apart" if self.role == "ood" else self.shift
        score = {"nll": "NLL", JOINT: "joint NLL"}.get(self.metric, "AUROC")
        return f"{self.data}, {self.model}, {where}, {score}"

    def told(self, method: str) -> str:
        """A method with its gain and interval; a star where it is marked."""
        gain, low, high = self.intervals[method]
        if low is None or high is None:
            size = "(no interval)"
        else:
            size = f"{gain:+.{DIGITS}f} [{low:+.{DIGITS}f}, {high:+.{DIGITS}f}]"
        return f"{method}{'*' if method in self.marked else ''} {size}"

    def sentence(self) -> str:
        """In plain words, for one line or a paragraph."""
        told = [f"{word}: {', '.join(map(self.told, self.of(word)))}" for word in WORDS if self.of(word)]
        return f"{self.place}: {'; '.join(told)}."


def guards(comparisons: Sequence[Row], with_map: Sequence[Row] = (), results: Sequence[Result] = ()) -> list[Guard]:
    """One guard for each data set, model and condition.

    Args:
        comparisons: with the tempered MAP, see `caveat.bench.compare`.
        with_map: the same with the plain MAP.
        results: the cells, whose fits may have warned.
    """
    better_than_map = {key for key, row in _chosen(with_map) if _verdict(row) == "better"}
    places: dict[tuple[str, ...], list[Row]] = {}
    for (*where, _), row in _chosen(comparisons):
        places.setdefault(tuple(where), []).append(row)
    rails = []
    for (data, model, shift, role, metric), rows in places.items():
        verdicts = {row["method"]: _verdict(row) for row in rows}
        intervals = {row["method"]: (row["gain"], row["low"], row["high"]) for row in rows}
        marked = tuple(
            method
            for method, verdict in verdicts.items()
            if with_map and method != MAP and verdict == "better"
            if (data, model, shift, role, metric, method) not in better_than_map
        )
        baseline, over = rows[0]["baseline"], rows[0]["over"]
        here = [r for r in results if (r.cell.data.label, r.cell.model) == (data, model)]
        said = _warned(here), tuple(dict.fromkeys(note for result in here for note in result.saved.notes))
        rails.append(Guard(data, model, shift, role, metric, baseline, verdicts, intervals, marked, over, *said))
    return rails


def _verdict(row: Row) -> str:
    """The verdict of an interval, but `level` where the gain is nothing to the digits shown."""
    nothing = row["gain"] is not None and f"{abs(row['gain']):.{DIGITS}f}" == f"{0:.{DIGITS}f}"
    return "level" if nothing and row["verdict"] in ("better", "worse") else str(row["verdict"])


def _warned(results: Sequence[Result]) -> dict[str, tuple[str, ...]]:
    warned: dict[str, list[str]] = {}
    for result in results:
        texts = warned.setdefault(result.cell.label, [])
        texts += [text for text in result.saved.warnings if text not in texts]
    return {method: tuple(texts) for method, texts in warned.items() if texts}


def _chosen(comparisons: Sequence[Row]) -> list[tuple[tuple[str, ...], Row]]:
    """The rows that verdicts are about, by place and method: of a shift the one over all severities."""
    keys = ("data", "model", "shift", "role", "metric", "method")
    return [
        (tuple(row[key] for key in keys), row)
        for row in comparisons
        if (row["metric"] in SCORES and (row["role"] != "shift" or row["severity"] is None))
        or (row["metric"] == JOINT and row["role"] == "clean" and row["low"] is not None)
    ]


def _cautions(guards: Sequence[Guard]) -> list[str]:
    """Of each data set and model: the fits that warned, and how the reference is not of this model."""
    lines = []
    for (data, model), guard in {(guard.data, guard.model): guard for guard in guards}.items():
        if guard.warned:
            names = ", ".join(f"{method} ({len(texts)})" for method, texts in guard.warned.items())
            lines.append(f"{data}, {model}: fits with warnings: {names}; they are in metrics.json of the cells.")
        if guard.baseline in guard.warned:
            told = "; ".join(guard.warned[guard.baseline])
            lines.append(f"{data}, {model}: all verdicts are against {guard.baseline}, which says: {told}")
        if guard.notes:
            told = "; ".join(guard.notes)
            lines.append(f"{data}, {model}: closeness to the reference is not of methods alone: {told}.")
    return [part for line in lines for part in textwrap.wrap(line, 116, subsequent_indent="  ")]


def guard_text(guards: Sequence[Guard]) -> str:
    """What `caveat bench` prints at its end."""
    if not guards:
        return "There is nothing to compare with the baseline."
    baseline, over = guards[0].baseline, guards[0].over
    lines = [f"Against {baseline}: gains a row, positive is better than it, with 95% intervals over {over}."]
    for guard in guards:
        lines.append(guard.place)
        for word in WORDS:
            told = ", ".join(guard.told(method).replace(" ", "\xa0") for method in guard.of(word))  # kept together
            wrapped = textwrap.wrap(told, 116, initial_indent=f"  {word:<19}  ", subsequent_indent=" " * 23)
            lines += [line.replace("\xa0", " ") for line in wrapped]
    if any(guard.marked for guard in guards):
        lines.append(f"* not shown to be better than {MAP} there: a posterior is not what made the difference.")
    lines += _cautions(guards)
    methods = dict.fromkeys(method for guard in guards for method in guard.verdicts if method != MAP)
    never = [m for m in methods if not any(m in guard.of("better") and m not in guard.marked for guard in guards)]
    if never:
        both = baseline if baseline == MAP else f"{baseline} and {MAP}"
        lines.append(f"Nowhere shown to be better than {both}: {', '.join(never)}.")
    count = sum(len(guard.verdicts) for guard in guards)
    lines.append(f"Of {count} intervals about {max(1, round(count / 20))} will miss the truth by chance.")
    return "\n".join(lines)
