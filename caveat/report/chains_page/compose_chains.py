"""Puts the page about chains together: the verdict, its numbers, and plots of what they rest on."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from caveat.engine.chains import RHAT_THRESHOLD
from caveat.evaluate.diagnosis import Diagnosis, Evidence, Mixing, Surface
from caveat.report.chains_page.chain_plots import (
    chain_style,
    energy_plot,
    rank_plot,
    rhat_plot,
    surface_plot,
    trace_plot,
)
from caveat.report.draw import graph_objects, plot_grid, scrolling, section, toggle_button, write_page
from caveat.report.wording import plural

__all__ = ["write_chains"]

COLOUR_OF = {"trust": "var(--good)", "caution": "#D59A00", "do not trust": "var(--bad)"}


def write_chains(
    evidence: Evidence, diagnosis: Diagnosis, path: str | Path, *, surface: Surface | None = None, title: str = "Chains"
) -> Path:
    """Write the page of a diagnosis, with the posterior's surface where there is one, and return where it is."""
    graph_objects()  # says what to install before any work is done
    body = _verdict_card(diagnosis) + _mixing_tables(evidence, diagnosis) + _prediction_section(evidence, diagnosis)
    body += _sampler_section(evidence) + _weight_section(evidence, diagnosis) + _surface_section(surface)
    return write_page(path, title, _chain_legend(diagnosis.chains), body)


def _verdict_card(diagnosis: Diagnosis) -> str:
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in diagnosis.reasons)
    verdict = f'<h3>Verdict</h3><p class="best">{escape(diagnosis.verdict.capitalize())}</p><ul>{reasons}</ul>'
    style = f"--colour:{COLOUR_OF[diagnosis.verdict]}"
    card = f'<div class="answers"><article class="answer" style="{style}">{verdict}</article></div>'
    length = f"{plural(diagnosis.chains, 'chain')} of {plural(diagnosis.draws, 'draw')}"
    lead = f"{diagnosis.method}: {length}, judged by what they predict for {plural(diagnosis.rows, 'row')}."
    return section("summary", "In short", lead, card)


def _mixing_tables(evidence: Evidence, diagnosis: Diagnosis) -> str:
    heads = ["", "Quantities", "That never change", "Largest R-hat", "By chance up to", f"Above {RHAT_THRESHOLD}"]
    heads += ["Fewest effective draws", "In the tails"]
    parts = {"Predictions": diagnosis.predictions, "Log density": diagnosis.log_density}
    parts["Weights (a sample)"] = diagnosis.weights
    caption = (
        f"R-hat is to be below {RHAT_THRESHOLD}, or below what independent draws reach in 99 of 100 cases; effective "
        "draws are to be 100 a chain. Weights do not count: equal modes have different ones."
    )
    body = _plain_table("table", heads, [[name, *_mixing_cells(mixing)] for name, mixing in parts.items()], caption)
    columns = _chain_columns(evidence, diagnosis)
    chains = [[f"Chain {c}", *(values[c] for values in columns.values())] for c in range(diagnosis.chains)]
    caption = "E-BFMI is to be at least 0.3, and no draw to diverge."
    body += "<h3>Each chain</h3>" + _plain_table("chains", ["", *columns], chains, caption)
    return section("numbers", "The numbers", "What the verdict goes by.", body)


def _mixing_cells(mixing: Mixing) -> list[str]:
    values = {
        ".3f": [mixing.rhat_max, mixing.null.limit if mixing.null else None],
        ".1%": [mixing.rhat_share_above],
        ",.0f": [mixing.ess_bulk_min, mixing.ess_tail_min],
    }
    shown = ["–" if value is None else format(value, form) for form, group in values.items() for value in group]
    return [f"{mixing.quantities:,}", f"{mixing.constant:,}", *shown]


def _chain_columns(evidence: Evidence, diagnosis: Diagnosis) -> dict[str, list[str]]:
    """The columns of the table of chains for which the sampler recorded something."""
    stats, columns = evidence.stats, {}
    if diagnosis.acceptance_rate is not None:
        columns["Acceptance"] = [f"{value:.2f}" for value in diagnosis.acceptance_rate]
    if diagnosis.divergences is not None:
        columns["Divergences"] = [f"{value:,}" for value in diagnosis.divergences]
    if diagnosis.e_bfmi is not None:
        columns["E-BFMI"] = [f"{value:.2f}" for value in diagnosis.e_bfmi]
    if "step_size" in stats:
        columns["Last step size"] = [f"{float(value):.3g}" for value in stats["step_size"][:, -1]]
    if "n_steps" in stats:
        columns["Steps a draw"] = [f"{float(value):.4g}" for value in stats["n_steps"].double().mean(1)]
    return columns


def _plain_table(identity: str, heads: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    head = "".join(f'<th scope="col">{escape(one)}</th>' for one in heads)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for name, *cells in rows
    )
    table = f'<table id="{identity}"><caption><span>{escape(caption)}</span></caption>'
    table += f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return scrolling("Table, scrolls sideways", table)


def _prediction_section(evidence: Evidence, diagnosis: Diagnosis) -> str:
    part = evidence.predictions
    name, values = part.names[part.worst].capitalize(), part.draws[..., part.worst].numpy()
    plots = [rhat_plot("predictions", part)] if diagnosis.predictions.null else []
    plots += [trace_plot(name, values), rank_plot(name, values)]
    lead = (
        "Probabilities or means, and the log density of each row. Dotted: 1.01; dashed: what the largest R-hat of "
        "independent draws stays below. Trace and ranks are those of the worst prediction."
    )
    return section("predictions", "What the chains predict", lead, plot_grid(plots))


def _sampler_section(evidence: Evidence) -> str:
    heights = evidence.log_density.draws[..., 0].numpy()
    plots = [trace_plot("Log posterior density", heights), rank_plot("Log posterior density", heights)]
    if "energy" in evidence.stats:
        plots.append(energy_plot(evidence.stats["energy"].numpy()))
    lead = "The log posterior density of every draw, and the energies between which the sampler moves."
    return section("sampler", "How the chains move", lead, plot_grid(plots))


def _weight_section(evidence: Evidence, diagnosis: Diagnosis) -> str:
    if diagnosis.weights.null is None:
        return ""
    part = evidence.weights
    name, values = part.names[part.worst], part.draws[..., part.worst].numpy()
    lead = "Large values are expected here: a network's units can be swapped without any change of its predictions."
    return section("weights", "Weights", lead, plot_grid([rhat_plot("weights", part), trace_plot(name, values)]))


def _surface_section(surface: Surface | None) -> str:
    if surface is None:
        return ""
    lead = "Between draws of different chains there may be low ground that no chain crosses, though they predict alike."
    return section("surface", "The posterior between chains", lead, plot_grid([surface_plot(surface)]))


def _chain_legend(chains: int) -> str:
    """The bar with one button a chain, which hides and shows the chain everywhere."""
    buttons = "".join(toggle_button(chain_style(chain), f"Chain {chain}", "chain") for chain in range(chains))
    return f'<div class="legend" role="group" aria-label="Chains: press to hide or show">{buttons}</div>'
