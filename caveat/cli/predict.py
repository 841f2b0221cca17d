"""`caveat predict`: from a posterior and inputs to a file of predictions."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caveat.cli.verb import Common, Verb

__all__ = ["Predict"]


@dataclass(frozen=True)
class Predict(Verb):
    """Write what a posterior says about inputs to a file: probabilities or moments, and their decomposition."""

    posterior: Path  # a folder that `caveat fit` wrote
    out: Path = Path("predictions.npz")  # the file to write: an npz, or a csv with one line a row
    data: str | None = None  # an npz, a table or a folder of images, targets or not; a name; else the posterior's own
    data_dir: Path | None = None  # where named data sets are; else CAVEAT_DATA, else the user's cache
    model: str | None = None  # takes the place of the stored one: file.py:function, or a name
    draws: int | None = None  # posterior draws; the method's own number unless given
    id: str | None = None  # the column of a table that names its rows; the one that the fit had unless given
    level: tuple[float, ...] = ()  # of the intervals of numbers, such as .9 .5; 0.9 unless given

    def run(self, common: Common) -> None:
        """Predict and write."""
        import numpy as np

        from caveat.evaluate.predictions import predict_rows, write_prediction_csv
        from caveat.recipe import inputs_of, read_posterior
        from caveat.storage import write_arrays

        if self.out.suffix not in ("", ".npz", ".csv"):
            raise ValueError(f"--out {self.out}: predictions are written as .npz or .csv")
        if self.out.exists():
            raise FileExistsError(f"--out {self.out} exists: choose another file")
        posterior, recipe = read_posterior(self.posterior, common.place(), self.model)
        if self.level and posterior.network.likelihood.kind != "regression":
            raise ValueError(f"--level {self.level[0]:g}: intervals are of numbers; this posterior predicts classes")
        rows, files, ids, notes = inputs_of(recipe, self.data, self.data_dir, self.id)
        common.note(notes)
        arrays = predict_rows(
            posterior, rows, draws=self.draws, seed=common.seed, levels=self.level, progress=not common.quiet
        )
        names = {"files": files, "ids": ids, "class_names": recipe.class_names}
        arrays |= {name: np.array(texts) for name, texts in names.items() if texts}
        content: dict[str, Any] = {"out": str(self.out), "rows": len(rows)}
        if self.out.suffix == ".csv":
            id_column = self.id or recipe.preprocessing.get("id")
            written = write_prediction_csv(self.out, arrays, self.level or (0.9,), id_column)
            content["columns"] = written
        else:
            write_arrays(self.out, arrays)
            written = list(arrays)
            content["arrays"] = {name: list(array.shape) for name, array in arrays.items()}
        common.show(content, f"{len(rows)} rows -> {self.out} ({', '.join(written)})")
