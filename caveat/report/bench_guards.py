"""The first thing that a bench page says: where methods are no better than a MAP whose temperature was fitted.

The verdicts are those of `caveat bench`: paired 95% intervals, over seeds and rows, of the NLL and, for inputs from
outside, of the AUROC. They are turned round here, one sentence a method.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from caveat.report.bench_runs import Bench, Group
from caveat.report.compare import Gain
from caveat.report.drawing import styles
from caveat.report.markup import plot_figure, plural, section, swatch
from caveat.report.plots import gain_plot
from caveat.report.sections import verdict_list
from caveat.report.shared import listed
from caveat.report.summary import Answer

__all__ = ["guard_sections", "method_sentence"]

Guard = dict[str, Any]
TEMPERED = "map_tempered"
FEW_SEEDS = 3  # below it an interval has little to go by


def guard_sections(bench: Bench) -> str:
    """The sentences, method by method, then the gains that they rest on."""
    said = drawn = ""
    many = len(bench.groups) > 1
    for group in bench.groups:
        guards = [g for g in bench.index["guards"] if (g["data"], g["model"]) == (group.data, group.model)]
        if not guards:
            continue
        head = f"<h3>{escape(group.title)}</h3>" if many else ""
        plots = "".join(
            plot_figure(gain_plot(group.runs, answer), verdict_list(answer, guard["baseline"]))
            for guard in guards
            if (answer := _answer(guard)).against_baseline
        )
        said += f'<div data-set="{group.index}">{head}{_sentences(group, guards)}{_warned(group, guards)}</div>'
        drawn += f'<div data-set="{group.index}">{head}<div class="grid">{plots}</div></div>' if plots else ""
    said = (
        said or '<p class="note">There is nothing to compare: no method was fitted with the seeds of the baseline.</p>'
    )
    base = next((guard["baseline"] for guard in bench.index["guards"]), "")
    lead = f"What a posterior has to beat is {base}: the same network as a point"
    lead += ", with its temperature fitted, at next to no cost." if base == TEMPERED else "."
    told = f"<p>{escape(lead)}</p>" if base else ""
    over = next((guard["over"] for guard in bench.index["guards"]), "")
    first = section("summary", "In short", _scope(bench), f"{told}{said}{_cautions(bench)}")
    why = f"Gains are paired: the same seeds, the same rows. Right of zero is better. Intervals are 95%, over {over}."
    return first + section("gains", "What the verdicts rest on", why, drawn)


def _scope(bench: Bench) -> str:
    index = bench.index
    parts = (
        [plural(len(index["shifts"]), "kind") + f" of shift ({', '.join(index['shifts'])})"] if index["shifts"] else []
    )
    parts += [f"data from outside ({', '.join(index['ood'])})"] if index["ood"] else []
    judged = f", judged on clean data{''.join(f' and {part}' for part in parts)}"
    where = listed([group.title for group in bench.groups])
    return f"{plural(len(bench.methods), 'method')} on {where}, {plural(len(index['seeds']), 'seed')}{judged}."


def _sentences(group: Group, guards: Sequence[Guard]) -> str:
    """Cards that sort the methods by their verdicts, then what is to be said of each, those that gain nothing first."""
    style, base = styles(group.runs), guards[0]["baseline"]
    compared = [run.label for run in group.done if any(run.label in guard["verdicts"] for guard in guards)]
    found = {label: method_sentence(label, guards) for label in compared}
    both, either = (f"{base} and map", f"{base} or from map") if base == TEMPERED else (base, base)
    level = any("level" in guard["verdicts"].values() for guard in guards)
    titles = {
        "worse": ("var(--bad)", f"Worse than {base} somewhere, nowhere shown to be better than {both}"),
        "not": ("var(--quiet)", f"{'Level with, or not' if level else 'Not'} distinguishable from {either}"),
        "mixed": ("#D59A00", f"Better than {base} somewhere, worse elsewhere"),
        "better": ("var(--good)", f"Better than {base} somewhere, nowhere shown to be worse"),
    }
    cards = items = ""
    for state, (colour, title) in titles.items():
        labels = [label for label, (of_method, _) in found.items() if of_method == state]
        names = "".join(
            f'<span data-run="{style[label].index}">{swatch(style[label])} {escape(label)}</span>' for label in labels
        )
        if labels:
            cards += f'<article class="answer" style="--colour:{colour}"><h3>{escape(title)}</h3>'
            cards += f'<p class="best names">{names}</p></article>'
        items += "".join(
            f'<li class="{state}" data-run="{style[label].index}"><b>{escape(label)}</b> {escape(found[label][1])}</li>'
            for label in labels
        )
    return f'<div class="answers">{cards}</div><ul class="verdicts plain">{items}</ul>'


def _warned(group: Group, guards: Sequence[Guard]) -> str:
    """The fits that warned; of what all others are compared with, what it said."""
    warned = {run.label: run.info["warnings"] for run in group.done if run.info.get("warnings")}
    if not warned:
        return ""
    base, link = guards[0]["baseline"], '<a href="#configuration">how they were fitted</a>'
    names = listed([f"{label} ({len(texts)})" for label, texts in warned.items()])
    body = f'<p class="note">Fits with warnings: {escape(names)}; see {link}.'
    if base in warned:
        body += f" All verdicts are against {escape(base)}, which says: {escape('; '.join(warned[base]))}"
    return f"{body}</p>"


def method_sentence(method: str, guards: Sequence[Guard]) -> tuple[str, str]:
    """A word for all verdicts on a method (worse, not, mixed, better), and the sentence that tells them."""
    places: dict[str, list[Guard]] = {"worse": [], "not distinguishable": [], "level": [], "better": [], "marked": []}
    for guard in guards:
        if method in guard["verdicts"]:
            word = "marked" if method in guard["marked"] else guard["verdicts"][method]
            places[word].append(guard)
    words = {
        "worse": "worse %s",
        "not distinguishable": "not distinguishable %s",
        "level": "level to the digits shown %s",
        "better": "better %s",
        "marked": "better %s, but there not shown to be better than plain map",
    }
    told = [words[word] % _places(where) for word, where in places.items() if where]
    if places["better"]:
        state = "mixed" if places["worse"] else "better"
    else:
        state = "worse" if places["worse"] else "not"
    return state, f"is {'; '.join(told)}."


def _places(guards: Sequence[Guard]) -> str:
    """Where verdicts are from, as it stands in a sentence: `on clean data and under fog and snow`."""
    forms = {"clean": "on clean data", "shift": "under {}", "ood": "at telling {} apart"}
    named = {role: [guard["shift"] for guard in guards if guard["role"] == role] for role in forms}
    return listed([form.format(listed(named[role])) for role, form in forms.items() if named[role]])


def _answer(guard: Guard) -> Answer:
    titles = {
        "clean": "On clean data",
        "shift": f"Under {guard['shift']}",
        "ood": f"Telling {guard['shift']} from clean data",
    }
    gains = {
        method: Gain(gain, low, high, level=guard["verdicts"][method] == "level")
        for method, (gain, low, high) in guard["intervals"].items()
        if None not in (gain, low, high)
    }
    unit = "nats a row" if guard["metric"] == "nll" else "in AUROC"
    return Answer(titles[guard["role"]], unit, "", "", "", gains)


def _cautions(bench: Bench) -> str:
    index = bench.index
    count = sum(len(guard["verdicts"]) for guard in index["guards"])
    notes = []
    if count:
        notes.append(f"Of {count} intervals about {max(1, round(count / 20))} will miss the truth by chance.")
    if len(index["seeds"]) < FEW_SEEDS:
        notes.append(f"With {plural(len(index['seeds']), 'seed')} little can be said of what another seed would give.")
    missing = [cell for cell in index["cells"] if cell["status"] != "done"]
    body = f'<p class="quiet">{escape(" ".join(notes))}</p>' if notes else ""
    if missing:
        text = f"{len(missing)} of {plural(len(index['cells']), 'fit')} failed or are missing; "
        body += f'<p class="note">{escape(text)}see <a href="#configuration">the configuration</a>.</p>'
    return body
