"""Experiment files: what they may say, and what they are refused for."""

from pathlib import Path

import pytest

from caveat import bench
from tests.bench.small import GOOD, complaint_of


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('data = ["digitz"]\nmodels = ["mlp"]', "data: no data set 'digitz', by name or path (did you mean 'digits'"),
        ('models = ["mlp"]', "data: an experiment needs it"),
        ('data = "digits"\nmodels = ["mlp"]', "data: must be a list of names"),
        ('data = ["digits"]\nmodels = ["mpl"]', "models: there is no 'mpl' (did you mean 'mlp'"),
        ('data = ["digits"]\nmodels = ["mine.py:net"]', "mine.py of 'mine.py:net' is not a file"),
        (GOOD + "sedes = [1]", "sedes: an experiment has no key 'sedes' (did you mean 'seeds'"),
        (GOOD + "seeds = [1, 1]", "seeds: must be different whole numbers"),
        (GOOD + "validation = 0", "validation=0"),
        ('augment = "crop_flip"\n' + GOOD, "augment: there is no 'crop_flip' (did you mean 'crop_and_flip'"),
        (
            "train_rows = 9\n" + GOOD + '\n[reference]\ndigits = "digits"\n',
            "train_rows: a reference is the posterior of its own training rows",
        ),
        (GOOD + "[methods.swagg]", "methods.swagg: there is no 'swagg' (did you mean 'swag'"),
        (GOOD + "[methods.swag]\nrnak = 3", "methods.swag.rnak: SWAG has no knob 'rnak' (did you mean 'rank'"),
        (GOOD + "[methods.swag]\ntraining.epoch = 3", "methods.swag.training.epoch: Training has no knob"),
        (GOOD + "[methods.swag]\nrank = -3", "methods.swag: SWAG(rank=-3): must be"),
        (GOOD + "[methods.a]\nmethod = 'swag'\n[methods.b]\nmethod = 'swag'", "methods: a and b are the same"),
        (GOOD + "[methods.map]\ntemperature = true", "methods.map: is always there"),
        (GOOD + "[map]\nepochs = -1", "map: Training(epochs=-1)"),
        (GOOD + "[shifts]\nrotatoin = [15]", "shifts.rotatoin: there is no shift 'rotatoin': did you mean 'rotation'"),
        (GOOD + "[shifts]\nfog = [6]", "shifts.fog: fog has no severity 6"),
        (GOOD + "[shifts]\nfog = ['hard']", "shifts.fog: severities are numbers"),
        ('ood = ["photos"]\n' + GOOD, "ood: 'photos': there is no 'photos' (did you mean 'photographs'"),
        (GOOD + "[reference]\ndigitz = 'digits'", "reference.digitz: there is no 'digitz'"),
        (GOOD + "[reference]\ndigits = 'digit'", "reference.digits: there is no reference 'digit'"),
        ('baseline = "swag"\n' + GOOD, "baseline: there is no 'swag'"),
        (GOOD + "seeds = [[0]]", "seeds: must be"),
        ("data = [", "is not a TOML file"),
    ],
)
def test_bad_files_are_refused_with_the_key(text: str, complaint: str, tmp_path: Path) -> None:
    assert complaint in complaint_of(tmp_path, text)


def test_one_severity_needs_no_list(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(GOOD + "[shifts]\nfog = 3")
    assert bench.read_experiment(tmp_path / "one.toml").problems[0].shifts == (("fog", (3.0,)),)


def test_digits_can_be_what_is_outside(tmp_path: Path) -> None:
    (tmp_path / "mnist.toml").write_text('data = ["mnist"]\nmodels = ["mlp"]\nood = ["digits", "fashion_mnist"]')
    assert bench.read_experiment(tmp_path / "mnist.toml").problems[0].ood == ("digits", "fashion_mnist")
