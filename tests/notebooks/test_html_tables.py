"""What notebooks show: escaped, in the page's own colours, of every object that people look at."""

from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import caveat
from caveat.engine.run import Info
from caveat.evaluate import Score, Scored, Scores
from caveat.notebooks import facts_html, table_html
from caveat.predictive import BernoulliPredictive, CategoricalPredictive, GaussianPredictive, PoissonPredictive

HOSTILE = "<script>alert(1)</script>"
DRAWS = torch.Generator().manual_seed(0)


class Texts(HTMLParser):
    """The text of a piece of HTML, and whether every element was closed."""

    def __init__(self, text):
        super().__init__()
        self.texts, self.open = [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        assert tag in {"div", "p", "b", "table", "thead", "tbody", "tr", "th", "td"}
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def shown(thing):
    return Texts(thing._repr_html_()).texts


def predictions():
    logits = torch.randn(4, 7, 3, generator=DRAWS)
    return [
        CategoricalPredictive(logits.log_softmax(-1)),
        BernoulliPredictive(logits),
        GaussianPredictive(logits, logits.exp(), torch.zeros(7, 3)),
        PoissonPredictive(logits.exp()),
    ]


@pytest.mark.parametrize("prediction", predictions(), ids=lambda p: type(p).__name__)
def test_predictions_show_their_first_rows(prediction):
    texts = shown(prediction)
    assert texts[0] == repr(prediction)
    rows = 7 if isinstance(prediction, CategoricalPredictive) else 21
    assert f"{rows - 5} more" in texts
    assert {"aleatoric", "epistemic"} <= set(texts)


def test_text_is_escaped():
    assert HOSTILE in Texts(table_html(HOSTILE, ["", HOSTILE], [(HOSTILE, 1.5)])).texts
    assert HOSTILE in Texts(facts_html("facts", {HOSTILE: HOSTILE})).texts
    info = Info([{"layer": HOSTILE, "kind": "Linear", "parameters": 1000}], warnings=[HOSTILE])
    assert {HOSTILE, f"Warning: {HOSTILE}", "1,000"} <= set(shown(info))
    scored = Scored("clean", "clean", None, "test", 10, {"nll": Score(0.5, 0.1)})
    scores = Scores(HOSTILE, "classification", [scored, replace(scored, name="x", metrics={})], {}, (HOSTILE,))
    assert shown(scores).count(HOSTILE) == 2
    assert "clean, 10 rows" in shown(scored)


def test_nothing_sets_a_colour_of_its_own():
    page = table_html("t", ["a"], [(1,)]) + facts_html("t", {"a": 1})
    assert "color:inherit" in page
    assert "#" not in page


def fitted():
    network = nn.Sequential(nn.Linear(2, 3))
    x = torch.randn(20, 2, generator=DRAWS)
    task = caveat.Task(network, (x, torch.arange(20) % 3), caveat.Categorical())
    return caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=1)), progress=False), x


def test_a_posterior_says_what_it_is_and_what_its_fit_was():
    posterior, _ = fitted()
    texts = shown(posterior)
    assert texts[0] == "Posterior by MAP"
    assert {"likelihood", "fitted in", "treatment"} <= set(texts)


def test_frames_of_predictions():
    pandas = pytest.importorskip("pandas")
    classes, _, numbers, _ = predictions()
    frame = classes.to_frame(class_names=("a", "b", "c"))
    assert isinstance(frame, pandas.DataFrame)
    assert [*frame] == [
        "row",
        "predicted",
        "probability",
        "prob_a",
        "prob_b",
        "prob_c",
        "entropy",
        "aleatoric",
        "epistemic",
    ]
    assert frame["predicted"].tolist() == ["abc"[label] for label in classes.label]
    frame = numbers.to_frame(levels=(0.5,))
    assert len(frame) == 7
    lower, _ = numbers.interval(0.5)
    torch.testing.assert_close(torch.tensor(frame["lower_50_1"].to_numpy()), lower[:, 1])
    deviation = torch.tensor(frame["standard_deviation_2"].to_numpy())
    torch.testing.assert_close(deviation, numbers.variance[:, 2].sqrt())


def test_a_loader_or_a_data_set_is_predicted_in_its_order():
    posterior, x = fitted()
    expected = posterior.predict(x).probs
    labelled = torch.utils.data.TensorDataset(x, torch.zeros(20))
    alone = torch.utils.data.TensorDataset(x)
    for dataset in (labelled, alone):
        loader = torch.utils.data.DataLoader(dataset, batch_size=6, shuffle=True)
        torch.testing.assert_close(posterior.predict(loader).probs, expected)
        torch.testing.assert_close(posterior.predict(dataset).probs, expected)
    torch.testing.assert_close(posterior.predict(x.numpy()).probs, expected)
    with pytest.raises(TypeError, match="make a tensor of it, or a DataLoader"):
        posterior.predict([1, 2])
