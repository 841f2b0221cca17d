"""The answers a reader came for, in plain words: which run is best, by how much, and is that more than chance?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from caveat.evaluate.comparison import UNKNOWN, Gain, MeanAndError
from caveat.evaluate.metrics import METRICS, format_error, format_number
from caveat.report.numbers.metric_table import OOD
from caveat.report.numbers.run_gains import auroc_gain, log_prob_gain
from caveat.report.saved import SavedRun, mean_over_data, ood_sets, shared_shifts
from caveat.report.wording import joined_by_and

__all__ = ["Answer", "Question", "answers", "baseline", "verdicts"]

MOST_NAMED = 4  # sets that a sentence names one by one


@dataclass(frozen=True)
class Question:
    """What a reader asks: `score` is a run's value, `gain` compares two runs, `sign` is +1 where higher is better."""

    title: str
    names: Sequence[str]  # of the data sets that it is about
    metric: str  # its title
    unit: str  # of a gain
    sign: int
    score: Callable[[SavedRun], MeanAndError]
    gain: Callable[[SavedRun, SavedRun], Gain | None]


@dataclass(frozen=True)
class Answer:
    """One question answered: the best run, how it stands to the next, and every run's gain over the baseline."""

    question: str
    unit: str
    best: str
    value: str
    sentence: str
    against_baseline: dict[str, Gain]
    tied: tuple[str, ...] = ()  # runs that cannot be told from the best, or are level with it


def baseline(runs: Sequence[SavedRun]) -> SavedRun | None:
    """Return the MAP run that the others are compared with, which is the first there is."""
    return next((run for run in runs if run.method == "map"), None)


def answers(runs: Sequence[SavedRun]) -> list[Answer]:
    """Answer one question each about clean data, shifted data, and every out-of-distribution set, if there are any."""
    candidates = (_answer(question, runs) for question in _questions(runs))
    return [answer for answer in candidates if answer is not None]


def _questions(runs: Sequence[SavedRun]) -> list[Question]:
    clean = [run.clean.name for run in runs if run.clean][:1]
    likelihood = [("On clean data", clean), ("Under shift", shared_shifts(runs))]
    questions = [_likelihood_question(title, names) for title, names in likelihood if names]
    return questions + [_ood_question(name) for name in ood_sets(runs)]


def _likelihood_question(title: str, names: Sequence[str]) -> Question:
    def score(run: SavedRun) -> MeanAndError:
        known = all(name in run.by_name for name in names)
        return mean_over_data([run.by_name[name] for name in names], "nll") if known else UNKNOWN

    metric = METRICS["nll"]
    return Question(
        title,
        names,
        metric.title,
        "nats a row",
        metric.sign,
        score,
        lambda run, other: log_prob_gain(run, other, names),
    )


def _ood_question(name: str) -> Question:
    def score(run: SavedRun) -> MeanAndError:
        return run.by_name[name].metrics.get(OOD[run.kind], UNKNOWN) if name in run.by_name else UNKNOWN

    title = f"Telling {name} from clean data"
    return Question(title, [name], "AUROC", "in AUROC", 1, score, lambda run, other: auroc_gain(run, other, name))


def _answer(question: Question, runs: Sequence[SavedRun]) -> Answer | None:
    scores = {run.label: question.score(run) for run in runs}
    losses = {label: -question.sign * score.mean for label, score in scores.items() if score.mean is not None}
    ranked = sorted((run for run in runs if run.label in losses), key=lambda run: losses[run.label])
    if not ranked:
        return None
    best = scores[ranked[0].label]
    error = "" if best.stderr is None else f" ± {format_error(best.stderr)}"
    sentences = [_runner_up(question, ranked[0], ranked[1])] if len(ranked) > 1 else []
    unknown = [run for run in runs if run.label not in losses]
    unscored = [run.label for run in unknown if not all(name in run.by_name for name in question.names)]
    infinite = [run.label for run in unknown if run.label not in unscored]
    if infinite:
        sentences.append(f"No finite {question.metric} for {joined_by_and(infinite)}.")
    if unscored:
        sentences.append(f"{joined_by_and(unscored)} {'was' if len(unscored) == 1 else 'were'} not scored on it.")
    all_shifted = {data.name for run in runs for family in run.shifts.values() for data in family}
    if question.names and set(question.names) < all_shifted:
        many = f"the {len(question.names)} shifted sets that all runs with shifts have"
        sentences.append(f"Over {joined_by_and(question.names) if len(question.names) <= MOST_NAMED else many} alone.")
    base = baseline(runs)
    gains = {run.label: _gain(question, run, base) for run in runs if base and run is not base}
    return Answer(
        question=question.title,
        unit=question.unit,
        best=ranked[0].label,
        value=f"{question.metric} {format_number(best.mean)}{error}",
        sentence=" ".join(sentences),
        against_baseline={label: gain for label, gain in gains.items() if gain is not None},
        tied=_tied(question, ranked),
    )


def _gain(question: Question, run: SavedRun, other: SavedRun) -> Gain | None:
    gain = question.gain(run, other)
    shown = [format_number(question.score(one).mean) for one in (run, other)]
    return gain and replace(gain, level=shown[0] == shown[1])


def _tied(question: Question, ranked: Sequence[SavedRun]) -> tuple[str, ...]:
    """The runs that the best one is not shown to be better than."""
    gains = {run.label: _gain(question, ranked[0], run) for run in ranked[1:]}
    return tuple(label for label, gain in gains.items() if gain is not None and gain.verdict != "better")


def _runner_up(question: Question, best: SavedRun, second: SavedRun) -> str:
    gain = _gain(question, best, second)
    extreme = "highest" if question.sign > 0 else "lowest"
    if gain is None:
        return f"The {extreme} {question.metric}; {second.label} comes next."
    size = f"{format_number(gain.mean)} {question.unit}"
    interval = f"95% interval {format_number(gain.low)} to {format_number(gain.high)}"
    if gain.verdict == "better":
        return f"The {extreme} {question.metric}, ahead of {second.label} by {size} ({interval})."
    same = "is level with it to the digits shown" if gain.verdict == "level" else "cannot be told apart from it"
    return f"The {extreme} {question.metric}, but {second.label} {same}: they differ by {size} ({interval})."


def verdicts(answer: Answer) -> dict[str, list[str]]:
    """Sort labels by their verdict against the baseline: better, level, not distinguishable, worse, in this order."""
    order = ("better", "level", "not distinguishable", "worse")
    return {word: [label for label, gain in answer.against_baseline.items() if gain.verdict == word] for word in order}
