"""The sentences that a bench page begins with."""

import pytest

from caveat.report.bench_page.verdict_cards import method_sentence

pytest.importorskip("plotly")


def guard(shift: str, role: str, verdicts: dict[str, str], marked: tuple[str, ...] = ()) -> dict[str, object]:
    metric = "auroc_entropy" if role == "ood" else "nll"
    said = {"verdicts": verdicts, "marked": marked, "baseline": "map_tempered"}
    return {"shift": shift, "role": role, "metric": metric} | said


def test_sentences_say_where_a_method_is_worse() -> None:
    verdicts = [
        guard("clean", "clean", {"a": "worse", "b": "not distinguishable", "c": "better", "d": "better"}),
        guard("fog", "shift", {"a": "better", "b": "better", "c": "not distinguishable", "d": "worse"}, ("b",)),
        guard("svhn", "ood", {"a": "worse", "b": "not distinguishable", "c": "better", "d": "better"}),
    ]
    state, sentence = method_sentence("a", verdicts)
    assert (state, sentence) == ("mixed", "is worse on clean data and at telling svhn apart; better under fog.")
    assert method_sentence("b", verdicts)[0] == "not"  # better than tempered MAP only where plain MAP is too
    assert "better under fog, but there not shown to be better than plain map" in method_sentence("b", verdicts)[1]
    assert method_sentence("c", verdicts)[0] == "better"
    assert method_sentence("d", verdicts)[0] == "mixed"
    assert method_sentence("a", [verdicts[0]])[0] == "worse"
    twice = [*verdicts, guard("snow", "shift", {"a": "better"})]
    assert method_sentence("a", twice)[1].endswith("better under fog and snow.")
    joint = guard("clean", "clean", {"a": "better"}) | {"metric": "joint_nll"}
    assert (
        method_sentence("a", [verdicts[0], joint])[1] == "is worse on clean data; better for several labels together."
    )
