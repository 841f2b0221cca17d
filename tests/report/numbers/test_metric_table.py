"""The table of results: means over the severities that all runs have, the best values, and what is left out."""

import pytest

from caveat.report import format_text, read, table
from caveat.report.draw.joint_plots import severity_curves


def cell(runs, label, key):
    found = table(runs)
    index = [column.key for column in found.columns].index(key)
    return found.cells[found.labels.index(label)][index]


def test_one_row_a_run_with_means_over_the_family(classification):
    runs = read(classification)
    rotated = [scored.predictions for scored in runs[1].shifts["rotated"]]
    by_hand = sum(-one["log_prob"].astype(float).mean() for one in rotated) / 3
    errors = [one["log_prob"].astype(float).std(ddof=1) / 120**0.5 for one in rotated]
    assert cell(runs, "Deep ensemble", "rotated.nll").mean == pytest.approx(by_hand, rel=1e-5)
    assert cell(runs, "Deep ensemble", "rotated.nll").stderr == pytest.approx(sum(errors) / 3, rel=1e-5)
    accuracy = (runs[0].clean.predictions["probs"].argmax(1) == runs[0].clean.predictions["targets"]).mean()
    assert cell(runs, "MAP", "accuracy").mean == pytest.approx(accuracy)
    assert cell(runs, "Deep ensemble", "seconds").mean == 15.0
    assert 0.5 < cell(runs, "Deep ensemble", "photographs.auroc_entropy").mean <= 1.0


def test_columns_nobody_filled_are_left_out(binary, change_metrics):
    change_metrics(binary / "laplace", lambda content: content["info"].pop("stored_bytes"))
    assert [column.key for column in table(read(binary)).columns] == ["accuracy", "nll", "brier", "ece", "seconds"]


def test_fidelity_to_a_reference_has_columns_where_it_was_scored(classification, change_metrics):
    def score(content):
        for number, entry in enumerate(content["data"][:4]):  # clean and three rotations
            entry["metrics"]["agreement"] = {"mean": 0.9 - 0.1 * number, "stderr": 0.01}
            entry["metrics"]["total_variation"] = {"mean": 0.1 * number, "stderr": 0.02}

    change_metrics(classification / "swag", score)
    runs = read(classification)
    assert cell(runs, "SWAG", "agreement").mean == 0.9
    assert cell(runs, "SWAG", "rotated.total_variation").mean == pytest.approx(0.2)
    assert cell(runs, "MAP", "total_variation").mean is None
    assert [plot.title for plot in severity_curves(runs, "rotated")] == ["Accuracy", "NLL", "ECE", "TV"]


def test_a_null_mean_leaves_the_family_unknown(classification, change_metrics):
    change_metrics(classification / "swag", lambda c: c["data"][2]["metrics"]["nll"].update(mean=None))
    assert cell(read(classification), "SWAG", "rotated.nll").mean is None
    assert cell(read(classification), "MAP", "rotated.nll").mean is not None


def test_best_knows_which_way_is_better(classification, regression):
    found = table(read(classification))
    keys = [column.key for column in found.columns]
    for key, better in (("accuracy", max), ("nll", min)):
        means = [row[keys.index(key)].mean for row in found.cells]
        assert found.best(keys.index(key)) == {i for i, mean in enumerate(means) if mean == better(means)}
    found = table(read(regression))
    coverage = [column.key for column in found.columns].index("coverage_90")
    assert found.best(coverage) == {1}  # MAP covers far less than 90%, the other nearly that


def test_a_column_without_differences_has_no_best(regression):
    found = table(read(regression))
    assert found.best([column.key for column in found.columns].index("crps")) == set()


def test_what_is_equal_to_the_digits_shown_is_equally_good(classification, change_metrics):
    for run, nll in (("map", 0.26941), ("swag", 0.26938), ("deep_ensemble", 0.5)):
        change_metrics(classification / run, lambda c, nll=nll: c["data"][0]["metrics"]["nll"].update(mean=nll))
    found = table(read(classification))
    nll = [column.key for column in found.columns].index("nll")
    assert found.best(nll) == {0, 2}
    change_metrics(classification / "deep_ensemble", lambda c: c["data"][0]["metrics"]["nll"].update(mean=0.26944))
    assert table(read(classification)).best(nll) == set()


def test_one_run_is_not_called_best(binary):
    found = table(read(binary))
    assert all(found.best(index) == set() for index in range(len(found.columns)))


def drop(number):
    """Takes a data set out of a run, as if it had not been scored on it."""
    return lambda content: content["data"].pop(number)


def test_a_shift_is_averaged_over_the_severities_that_all_runs_have(classification, change_metrics):
    change_metrics(classification / "swag", drop(3))  # 60 degrees
    runs = read(classification)
    for run in runs:
        two = [scored.metrics["nll"].mean for scored in run.shifts["rotated"][:2]]
        assert cell(runs, run.label, "rotated.nll").mean == pytest.approx(sum(two) / 2)
    (note,) = table(runs).notes
    assert note == "rotated: means are over 15 and 30, which all runs with this shift have; 60 is left out."
    assert note in " ".join(format_text(table(runs), width=40).split())
    assert table(read(classification)[:2]).notes == (), "those two have the same"


def test_a_run_without_a_shift_takes_it_from_no_other(classification, change_metrics):
    for _ in range(3):
        change_metrics(classification / "swag", drop(1))
    runs = read(classification)
    assert cell(runs, "SWAG", "rotated.nll").mean is None
    three = [scored.metrics["nll"].mean for scored in runs[0].shifts["rotated"]]
    assert cell(runs, "MAP", "rotated.nll").mean == pytest.approx(sum(three) / 3)
    assert table(runs).notes == ("rotated: not scored for SWAG.",)


def test_runs_that_share_no_severity_are_not_averaged(classification, change_metrics):
    for _ in range(2):
        change_metrics(classification / "swag", drop(2))
    change_metrics(classification / "map", drop(1))
    runs = read(classification)
    assert not any(column.group == "rotated" for column in table(runs).columns)
    assert table(runs).notes == (
        "rotated: no severity is one that all runs with this shift have, so there is no mean.",
    )


def test_clean_data_of_another_name_are_not_compared(classification, change_metrics):
    change_metrics(classification / "swag", lambda c: c["data"][0].update(name="holdout", family="holdout"))
    for _ in range(3):
        change_metrics(classification / "swag", drop(1))
    runs = read(classification)
    assert cell(runs, "SWAG", "nll").mean is None
    assert table(runs).notes[0] == "clean: SWAG was scored on holdout instead, which is left out."
