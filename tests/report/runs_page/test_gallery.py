import numpy as np

from caveat.report import read
from caveat.report.runs_page.gallery import exhibits, gallery_section


def test_only_mistakes_are_shown_the_surest_first(classification):
    runs = read(classification)
    clean, ood = exhibits(runs)
    probs = np.stack([run.clean.predictions["probs"][clean.positions] for run in runs])
    wrong = probs.argmax(axis=2) != clean.targets[clean.positions]
    assert wrong.any(axis=0).all()
    sure = (probs.max(axis=2) * wrong).sum(axis=0)
    assert list(sure) == sorted(sure, reverse=True)
    every = runs[0].clean.predictions["thumbnail_rows"]
    missed = [run.clean.predictions["probs"].argmax(axis=1) != clean.targets for run in runs]
    assert set(clean.positions) == {row for row in every if np.any([one[row] for one in missed])}
    assert ood.targets is None
    assert len(ood.positions) == 6


def test_a_run_without_thumbnails_is_shown_too(classification):
    for run in ("map", "swag"):
        path = classification / run / "predictions" / "clean.npz"
        arrays = {key: value for key, value in np.load(path).items() if not key.startswith("thumbnail")}
        np.savez(path, **arrays)
    assert list(exhibits(read(classification))[0].predictions) == ["MAP", "Deep ensemble", "SWAG"]


def test_images_kept_by_different_runs_are_put_together(classification):
    kept = exhibits(read(classification))[0].positions
    path = classification / "swag" / "predictions" / "clean.npz"
    arrays = dict(np.load(path))
    np.savez(path, **{**arrays, "thumbnail_rows": arrays["thumbnail_rows"] + 40})
    runs = read(classification)
    wrong = np.any(
        [run.clean.predictions["probs"].argmax(1) != run.clean.predictions["targets"] for run in runs], axis=0
    )
    together = {row for row in (*range(8), *range(40, 48)) if wrong[row]}
    assert set(exhibits(runs)[0].positions) == together > set(kept)


def test_no_thumbnails_no_gallery(binary):
    assert gallery_section(read(binary)) == ""


def test_classes_without_names_are_numbered(classification, change_metrics):
    for run in ("map", "deep_ensemble", "swag"):
        change_metrics(classification / run, lambda content: content.update(class_names=[]))
    runs = read(classification)
    target = runs[0].clean.predictions["targets"][exhibits(runs)[0].positions[0]]
    assert f"true label {target}<" in gallery_section(runs)


def test_cards_say_what_each_run_said(classification):
    runs = read(classification)
    position = int(exhibits(runs)[0].positions[0])
    text = gallery_section(runs)
    target = runs[0].clean.predictions["targets"][position]
    assert f"true label {runs[0].class_names[target]}" in text
    probs = runs[2].clean.predictions["probs"][position]
    assert f"{probs.max():.0%}" in text
    assert runs[0].class_names[probs.argmax()] in text
