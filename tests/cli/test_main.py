"""The command line as a whole: help, exit codes, complaints, and what a Ctrl-C says."""

import json
from pathlib import Path

import pytest
import torch

from caveat.methods import discover
from tests.cli.command import QUICK, run


def test_help_shows_every_knob(capsys: pytest.CaptureFixture[str]) -> None:
    import dataclasses

    for name, method in discover().items():
        code, out, _ = run(capsys, "fit", name, "--help")
        assert code == 0
        for field in (field for field in dataclasses.fields(method) if field.init):
            nested = dataclasses.is_dataclass(getattr(method(), field.name))
            names = (
                [f"{field.name}.{f.name}" for f in dataclasses.fields(getattr(method(), field.name))]
                if nested
                else [field.name]
            )
            for knob in names:
                assert f"--{knob.replace('_', '-')}" in out, f"{name} --help does not show {knob}"
    code, out, _ = run(capsys, "--help")
    for verb in ("demo", "fit", "predict", "evaluate", "bench", "report", "methods"):
        assert verb in out


def test_methods_are_listed_by_their_first_lines_before_they_are_imported() -> None:
    from caveat.cli.commands import method_summaries
    from caveat.cli.verb import summary

    assert method_summaries() == {name: summary(method) for name, method in discover().items()}


def test_methods_lists_them_with_their_likelihoods(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "methods")
    assert code == 0
    for name in discover():
        assert name in out
    listed = json.loads(run(capsys, "methods", "--json")[1])
    assert listed["map"]["likelihoods"] == list(discover()["map"].likelihoods)


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["fit", "map", "--training.learning-rate", "-1"], 2, "learning_rate=-1.0): must be above 0"),
        (["fit", "map", "--training.epochs", "many"], 2, "--training.epochs"),
        (["fit", "swag", "--rank", "-2"], 2, "SWAG(rank=-2): must be at least 0"),
        (["fit", "deep_ensemble", "--members", "0"], 2, "DeepEnsemble(members=0): must be at least 1"),
        (["fit", "mapp"], 2, "mapp"),
        (["fit", "map", "--data", "no_such_set"], 1, "no_such_set"),
        (["fit", "map", "--model", "no_such_model"], 1, "no model 'no_such_model'"),
        (["fit", "map", "--device", "cuda:99"], 1, "cuda"),
        (["fit", "map", "--device", "abacus"], 1, "--device abacus: must be auto, cpu"),
        (["fit", "map", "--validation", "1.0"], 2, "validation=1.0): must be in [0, 1)"),
        (["fit", "map", "--prior-precision", "-2"], 2, "prior_precision=-2.0): must be above 0"),
        (["fit", "map", "--model", "lenet5", "--data", "diabetes"], 1, "lenet5 takes images"),
    ],
)
def test_complaints(
    arguments: list[str], code: int, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments[-2] == "--device" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    found, _, err = run(capsys, *arguments, "--out", tmp_path / "p")
    flat = " ".join(err.replace("│", " ").split())
    assert found == code, err
    assert complaint in flat
    assert "Traceback" not in err
    assert not (tmp_path / "p").exists(), "nothing is left behind"


def test_a_stop_says_whether_anything_was_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from caveat.engine.run import Run
    from caveat.engine.training import loop

    def stop(self: object, bar: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(loop.Loop, "run_epoch", stop)
        code, _, err = run(capsys, "fit", "map", "--out", tmp_path / "p", *QUICK)
    assert (code, "every 10 seconds), so nothing was kept" in err) == (130, True)
    assert not list(tmp_path.iterdir()), "nothing that would block another command"
    checkpoint = loop.Loop.checkpoint
    monkeypatch.setattr(Run, "checkpoint_due", lambda self: True)
    monkeypatch.setattr(loop.Loop, "checkpoint", lambda self: (checkpoint(self), stop(self, None)))
    code, _, err = run(capsys, "fit", "map", "--out", tmp_path / "p", *QUICK)
    assert (code, "goes on from its last checkpoint" in err) == (130, True)
    for options, other in (
        (["map", "--training.epochs", 4], "other knobs of the method"),
        (["map", *QUICK, "--seed", 1], "another seed"),
        (["map", *QUICK, "--prior-precision", 2], "another prior"),
        (["mean_field_vi", *QUICK], "another method"),
    ):
        code, _, err = run(capsys, "fit", *options, "--out", tmp_path / "p")
        assert (code, f"p.partial holds an unfinished fit with {other}: delete it" in err) == (1, True), err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import caveat

    assert run(capsys, "--version")[:2] == (0, f"{caveat.__version__}\n")
