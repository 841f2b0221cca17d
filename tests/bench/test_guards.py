"""Guard rails: the verdict on every method."""

import dataclasses
from pathlib import Path

from caveat import bench
from caveat.bench.compare import comparisons
from caveat.bench.guards import guard_text, guards
from caveat.bench.results import Result, read_results


def test_guard_rails_say_where_a_method_is_not_better() -> None:
    def row(
        method: str, shift: str, gain: float, reach: float, verdict: str, severity: object = None
    ) -> dict[str, object]:
        who = {"data": "digits", "model": "mlp", "method": method, "baseline": "map_tempered"}
        where = {"shift": shift, "severity": severity, "role": "clean" if shift == "clean" else "shift"}
        interval = {"gain": gain, "low": gain - reach, "high": gain + reach, "over": "seeds and rows"}
        return who | where | interval | {"metric": "nll", "verdict": verdict}

    table = [
        row("map", "clean", -0.5, 0.1, "worse"),
        row("swag", "clean", -0.2, 0.1, "worse"),
        row("swag", "rotation", 0.01, 0.1, "not distinguishable"),
        row("swag", "rotation", 0.9, 0.1, "better", severity=15.0),
        row("ensemble", "clean", 0.2, 0.1, "better"),
        row("ensemble", "rotation", 0.3, 0.1, "better"),
    ]
    with_map = [
        row("swag", "clean", -0.3, 0.1, "worse"),
        row("ensemble", "clean", 0.7, 0.1, "better"),
        row("ensemble", "rotation", 0.05, 0.1, "not distinguishable"),
    ]
    found = guards(table, with_map)
    assert [(g.shift, g.verdicts, g.marked) for g in found] == [
        ("clean", {"map": "worse", "swag": "worse", "ensemble": "better"}, ()),
        ("rotation", {"swag": "not distinguishable", "ensemble": "better"}, ("ensemble",)),
    ]
    text = guard_text(found)
    assert "worse                map -0.500 [-0.600, -0.400], swag -0.200 [-0.300, -0.100]" in text
    assert "better               ensemble* +0.300" in text
    assert "* not shown to be better than map there" in text
    assert "Nowhere shown to be better than map_tempered and map: swag." in text
    assert "digits, mlp, clean, NLL: worse: map" in found[0].sentence()
    only_there = guard_text(guards([r for r in table if r["shift"] == "rotation"], with_map))
    assert "Nowhere shown to be better than map_tempered and map: swag, ensemble." in only_there


def test_a_gain_that_does_not_show_is_level() -> None:
    who = {"data": "d", "model": "m", "shift": "clean", "severity": None, "role": "clean", "metric": "nll"}
    rows = [
        who | {"method": m, "baseline": "map_tempered", "gain": gain, "low": gain - 1e-5, "high": gain + 1e-5}
        for m, gain in (("a", 0.0004), ("b", -0.0004), ("c", 0.0006))
    ]
    rows = [row | {"over": "rows", "verdict": "worse" if row["gain"] < 0 else "better"} for row in rows]
    (found,) = guards(rows)
    assert found.verdicts == {"a": "level", "b": "level", "c": "better"}
    assert "level                a +0.000 [+0.000, +0.000], b -0.000" in guard_text([found])
    (found,) = guards([row | {"gain": 0.3} for row in rows[:1]], [row | {"baseline": "map"} for row in rows[:1]])
    assert (found.verdicts, found.marked) == ({"a": "better"}, ("a",)), "level with the plain MAP"


def test_several_labels_together_are_judged_where_seeds_give_an_interval() -> None:
    who = {"data": "d", "model": "m", "severity": None, "baseline": "map_tempered", "over": "seeds"}
    clean, shifted = who | {"shift": "clean", "role": "clean"}, who | {"shift": "fog", "role": "shift"}
    sure, alone = {"gain": 0.3, "low": 0.2, "high": 0.4}, {"gain": 0.3, "low": None, "high": None}
    joint = {"metric": "joint_nll", "verdict": "better"}
    nll = clean | {"method": "a", "metric": "nll", "verdict": "worse", "gain": -0.3, "low": -0.4, "high": -0.2}
    found = guards([nll, clean | joint | sure | {"method": "a"}, shifted | joint | sure | {"method": "a"}])
    assert [(guard.metric, guard.verdicts) for guard in found] == [
        ("nll", {"a": "worse"}),
        ("joint_nll", {"a": "better"}),
    ]
    assert "d, m, clean, joint NLL\n  better               a +0.300" in guard_text(found)
    assert len(guards([nll, clean | joint | alone | {"method": "a"}])) == 1


def with_said(result: Result, warning: str | None, note: str) -> Result:
    """A result whose fit warned, scored against another model's reference."""
    info = result.saved.info | {"warnings": [] if warning is None else [warning]}
    return dataclasses.replace(result, saved=dataclasses.replace(result.saved, info=info, notes=(note,)))


def test_warnings_and_notes_stand_beside_the_verdicts(finished: tuple[Path, Path], table: Path) -> None:
    file, out = finished
    experiment = bench.read_experiment(file)
    words = "the temperature ran to the end of its range"
    results = [
        with_said(r, words if r.cell.label == "map_tempered" else None, "another prior")
        for r in read_results(experiment, out)
    ]
    found = guards(comparisons(results, "map_tempered"), (), results)
    assert all(guard.warned == {"map_tempered": (words,)} and guard.notes == ("another prior",) for guard in found)
    text = " ".join(guard_text(found).split())
    assert text.count("clouds, mlp: fits with warnings: map_tempered (1)") == 1
    assert f"all verdicts are against map_tempered, which says: {words}" in text
    assert text.count("closeness to the reference is not of methods alone: another prior.") == 1
