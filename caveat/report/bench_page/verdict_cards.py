"""The first thing that a bench page says: where methods are no better than a MAP whose temperature was fitted.

The verdicts are those of `caveat bench`: paired 95% intervals, over seeds and rows, of the NLL, the joint NLL and, for
inputs from out of distribution, the AUROC. The bench lists them by condition; here they become one sentence a method.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from caveat.evaluate.comparison import Gain
from caveat.report.draw import gain_plot, plot_figure, section, styles, swatch, verdict_list, warning_note
from caveat.report.numbers import Answer
from caveat.report.saved import BenchGroup, SavedBench, marginal_notes
from caveat.report.wording import joined_by_and, plural

__all__ = ["method_sentence", "verdict_sections"]

SavedGuard = dict[str, Any]  # an entry of bench.json: what is to be said of all methods on one condition
TEMPERED = "map_tempered"
FEW_SEEDS = 3  # with fewer an interval has little to go by


def verdict_sections(bench: SavedBench) -> str:
    """Show the sentences, method by method, then the gains that they rest on."""
    sentences = gains = ""
    many = len(bench.groups) > 1
    for group in bench.groups:
        guards = [g for g in bench.index["guards"] if (g["data"], g["model"]) == (group.data, group.model)]
        if not guards:
            continue
        head = f"<h3>{escape(group.title)}</h3>" if many else ""
        plots = "".join(
            plot_figure(gain_plot(group.runs, answer), verdict_list(answer, guard["baseline"]))
            for guard in guards
            if (answer := _answer_of(guard)).against_baseline
        )
        marginals = "".join(f'<p class="note">{escape(note)}</p>' for note in marginal_notes(group.done))
        verdicts = f"{head}{_sentences(group, guards)}{_warning_note(group, guards)}{marginals}"
        sentences += f'<div data-set="{group.index}">{verdicts}</div>'
        gains += f'<div data-set="{group.index}">{head}<div class="grid">{plots}</div></div>' if plots else ""
    nothing = '<p class="note">There is nothing to compare: no method was fitted with the seeds of the baseline.</p>'
    base = next((guard["baseline"] for guard in bench.index["guards"]), "")
    lead = f"What a posterior has to beat is {base}: the same network as a point"
    lead += ", with its temperature fitted, at next to no cost." if base == TEMPERED else "."
    to_beat = f"<p>{escape(lead)}</p>" if base else ""
    over = next((guard["over"] for guard in bench.index["guards"]), "")
    over += ", of several labels over seeds" if any(_about(g) == "joint" for g in bench.index["guards"]) else ""
    first = section("summary", "In short", _scope(bench), f"{to_beat}{sentences or nothing}{_caution_notes(bench)}")
    why = f"Gains are paired: the same seeds, the same rows. Right of zero is better. Intervals are 95%, over {over}."
    return first + section("gains", "What the verdicts rest on", why, gains)


def _scope(bench: SavedBench) -> str:
    index = bench.index
    parts = (
        [plural(len(index["shifts"]), "kind") + f" of shift ({', '.join(index['shifts'])})"] if index["shifts"] else []
    )
    parts += [f"out-of-distribution data ({', '.join(index['ood'])})"] if index["ood"] else []
    judged_on = f", judged on clean data{''.join(f' and {part}' for part in parts)}"
    where = joined_by_and([group.title for group in bench.groups])
    return f"{plural(len(bench.methods), 'method')} on {where}, {plural(len(index['seeds']), 'seed')}{judged_on}."


def _sentences(group: BenchGroup, guards: Sequence[SavedGuard]) -> str:
    """Cards that sort the methods by their verdicts, then what is to be said of each, those that gain nothing first."""
    style, base = styles(group.runs), guards[0]["baseline"]
    compared = [run.label for run in group.done if any(run.label in guard["verdicts"] for guard in guards)]
    by_label = {label: method_sentence(label, guards) for label in compared}
    both, either = (f"both {base} and map", f"{base} or from map") if base == TEMPERED else (base, base)
    level = any("level" in guard["verdicts"].values() for guard in guards)
    titles = {
        "worse": ("var(--bad)", f"Worse than {base} somewhere, nowhere shown to be better than {both}"),
        "not": ("var(--quiet)", f"{'Level with, or not' if level else 'Not'} distinguishable from {either}"),
        "mixed": ("#D59A00", f"Better than {base} somewhere, worse elsewhere"),
        "better": ("var(--good)", f"Better than {base} somewhere, nowhere shown to be worse"),
    }
    cards = items = ""
    for state, (colour, title) in titles.items():
        labels = [label for label, (of_method, _) in by_label.items() if of_method == state]
        names = "".join(
            f'<span data-run="{style[label].index}">{swatch(style[label])} {escape(label)}</span>' for label in labels
        )
        if labels:
            cards += f'<article class="answer" style="--colour:{colour}"><h3>{escape(title)}</h3>'
            cards += f'<p class="best names">{names}</p></article>'
        for label in labels:
            sentence = f"<b>{escape(label)}</b> {escape(by_label[label][1])}"
            items += f'<li class="{state}" data-run="{style[label].index}">{sentence}</li>'
    return f'<div class="answers">{cards}</div><ul class="verdicts plain">{items}</ul>'


def _warning_note(group: BenchGroup, guards: Sequence[SavedGuard]) -> str:
    """Which fits warned; of the one that all others are compared with, also what it said."""
    base, addition = guards[0]["baseline"], ""
    texts = {run.label: run.info["warnings"] for run in group.done if run.info.get("warnings")}
    if base in texts:
        addition = f" All verdicts are against {escape(base)}, which says: {escape('; '.join(texts[base]))}"
    return warning_note(group.done, addition)


def method_sentence(method: str, guards: Sequence[SavedGuard]) -> tuple[str, str]:
    """Sum up the verdicts on a method in a word (worse, not, mixed, better) and in a sentence."""
    by_verdict: dict[str, list[SavedGuard]] = {
        verdict: [] for verdict in ("worse", "not distinguishable", "level", "better", "marked")
    }
    for guard in guards:
        if method in guard["verdicts"]:
            word = "marked" if method in guard["marked"] else guard["verdicts"][method]
            by_verdict[word].append(guard)
    words = {
        "worse": "worse %s",
        "not distinguishable": "not distinguishable %s",
        "level": "level to the digits shown %s",
        "better": "better %s",
        "marked": "better %s, but there not shown to be better than plain map",
    }
    parts = [words[word] % _conditions_in_words(where) for word, where in by_verdict.items() if where]
    if by_verdict["better"]:
        state = "mixed" if by_verdict["worse"] else "better"
    else:
        state = "worse" if by_verdict["worse"] else "not"
    return state, f"is {'; '.join(parts)}."


def _conditions_in_words(guards: Sequence[SavedGuard]) -> str:
    """The conditions of verdicts as they stand in a sentence: `on clean data and under fog and snow`."""
    forms = {
        "clean": "on clean data",
        "joint": "for several labels together",
        "shift": "under {}",
        "ood": "at telling {} apart",
    }
    named = {role: [guard["shift"] for guard in guards if _about(guard) == role] for role in forms}
    return joined_by_and([form.format(joined_by_and(named[role])) for role, form in forms.items() if named[role]])


def _about(guard: SavedGuard) -> str:
    """What a verdict is about: clean, joint, shift, ood."""
    return "joint" if guard["metric"] == "joint_nll" else str(guard["role"])


def _answer_of(guard: SavedGuard) -> Answer:
    """A guard as the answer to a question, which is what plots of gains are drawn from."""
    titles = {
        "clean": "On clean data",
        "joint": "Several labels together",
        "shift": f"Under {guard['shift']}",
        "ood": f"Telling {guard['shift']} from clean data",
    }
    gains = {
        method: Gain(gain, low, high, level=guard["verdicts"][method] == "level")
        for method, (gain, low, high) in guard["intervals"].items()
        if None not in (gain, low, high)
    }
    unit = {"nll": "nats a row", "joint_nll": "nats a label"}.get(guard["metric"], "in AUROC")
    return Answer(titles[_about(guard)], unit, "", "", "", gains)


def _caution_notes(bench: SavedBench) -> str:
    index = bench.index
    count = sum(len(guard["verdicts"]) for guard in index["guards"])
    notes = []
    if count:
        notes.append(f"Of {count} intervals about {max(1, round(count / 20))} will miss the truth by chance.")
    if len(index["seeds"]) < FEW_SEEDS:
        notes.append(f"With {plural(len(index['seeds']), 'seed')} little can be said of what another seed would give.")
    body = f'<p class="quiet">{escape(" ".join(notes))}</p>' if notes else ""
    if bench.unfinished_cells:
        text = f"{len(bench.unfinished_cells)} of {plural(len(index['cells']), 'fit')} failed or are missing; "
        body += f'<p class="note">{escape(text)}see <a href="#configuration">the configuration</a>.</p>'
    return body
