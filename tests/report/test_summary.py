from caveat.report import read
from caveat.report.summary import answers, listed, verdicts


def test_the_best_run_and_its_lead_are_named(classification):
    clean, shifted, outside = answers(read(classification))
    assert (clean.question, clean.best) == ("On clean data", "Deep ensemble")
    assert "ahead of" in clean.sentence
    assert "95% interval" in clean.sentence
    assert shifted.question == "Under shift"
    assert outside.question == "Telling photographs from clean data"
    assert outside.best == "Deep ensemble"


def test_a_tie_is_called_a_tie(classification):
    base, _, same = read(classification)
    (clean, *_) = answers([base, same])
    assert "cannot be told apart" in clean.sentence
    assert verdicts(clean) == {"better": [], "not distinguishable": ["SWAG"], "worse": []}


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
    clean, shifted, outside = answers(read(regression))
    assert outside.value.startswith("AUROC 0.9")
    assert clean.best == shifted.best == "Laplace"
    assert verdicts(clean)["better"] == ["Laplace"]


def test_lists_read_like_sentences():
    assert [listed(words) for words in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a and b", "a, b and c"]
