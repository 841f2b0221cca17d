from caveat.report import read, table
from caveat.report.numbers import answers, verdicts
from caveat.report.wording import joined_by_and


def test_the_best_run_and_its_lead_are_named(classification):
    clean, shifted, ood = answers(read(classification))
    assert (clean.question, clean.best) == ("On clean data", "Deep ensemble")
    assert "ahead of" in clean.sentence
    assert clean.tied == ()
    assert "95% interval" in clean.sentence
    assert shifted.question == "Under shift"
    assert ood.question == "Telling photographs from clean data"
    assert ood.best == "Deep ensemble"


def test_a_tie_is_called_a_tie(classification):
    base, _, same = read(classification)
    (clean, *_) = answers([base, same])
    assert "cannot be told apart" in clean.sentence
    assert len(clean.tied) == 1
    assert set(clean.tied) < {"MAP", "SWAG"}
    assert verdicts(clean) == {"better": [], "level": [], "not distinguishable": ["SWAG"], "worse": []}


def test_worse_than_the_baseline_is_said(classification, change_metrics):
    change_metrics(classification / "map", lambda content: content["method"].update(name="laplace"))
    change_metrics(classification / "deep_ensemble", lambda content: content["method"].update(name="map"))
    clean = answers(read(classification))[0]
    assert verdicts(clean)["worse"] == ["MAP", "SWAG"]


def test_an_infinite_score_is_named_and_not_ranked(classification, change_metrics):
    def lose(content):
        content["data"][0]["metrics"]["nll"].update(mean=None, stderr=None)

    change_metrics(classification / "deep_ensemble", lose)
    clean = answers(read(classification))[0]
    assert clean.best != "Deep ensemble"
    assert "No finite NLL for Deep ensemble." in clean.sentence


def test_without_a_baseline_nothing_is_compared(binary):
    (answer,) = answers(read(binary))
    assert (answer.best, answer.sentence, answer.against_baseline) == ("Laplace", "", {})


def test_regression_is_compared_by_likelihood(regression):
    clean, shifted, ood = answers(read(regression))
    assert ood.value.startswith("AUROC 0.9")
    assert clean.best == shifted.best == "Laplace"
    assert verdicts(clean)["better"] == ["Laplace"]


def test_lists_read_like_sentences():
    assert [joined_by_and(words) for words in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a and b", "a, b and c"]


def test_the_answer_under_shift_is_over_what_all_runs_have(classification, change_metrics):
    change_metrics(classification / "map", lambda content: content["data"].pop(3))
    runs = read(classification)
    shifted = answers(runs)[1]
    key = [column.key for column in table(runs).columns].index("rotated.nll")
    means = {label: cells[key].mean for label, cells in zip(table(runs).labels, table(runs).cells, strict=True)}
    assert shifted.value.startswith(f"NLL {means[shifted.best]:.3f}"), "the same number as in the table"
    assert means[shifted.best] == min(means.values())


def test_a_run_that_was_not_scored_there_is_named(classification, change_metrics):
    for _ in range(3):
        change_metrics(classification / "swag", lambda content: content["data"].pop(1))
    shifted = answers(read(classification))[1]
    assert shifted.question == "Under shift"
    assert "SWAG was not scored on it." in shifted.sentence


def test_a_difference_that_does_not_show_is_level(classification, change_metrics):
    for run, nll in (("map", 0.26941), ("deep_ensemble", 0.26938)):
        change_metrics(classification / run, lambda c, nll=nll: c["data"][0]["metrics"]["nll"].update(mean=nll))
    clean = answers(read(classification)[:2])[0]
    assert clean.against_baseline["Deep ensemble"].low > 0, "the rows tell them apart"
    assert verdicts(clean) == {"better": [], "level": ["Deep ensemble"], "not distinguishable": [], "worse": []}
    assert "MAP is level with it to the digits shown" in clean.sentence


def test_a_shift_that_not_all_runs_have_is_not_in_the_answer(classification, change_metrics):
    change_metrics(classification / "swag", lambda content: content["data"].pop(3))
    assert "Over rotated 15 and rotated 30 alone." in answers(read(classification))[1].sentence
