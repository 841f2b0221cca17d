"""`caveat export`: from a posterior to one file that runs without caveat."""

from dataclasses import dataclass
from pathlib import Path

from caveat.cli.verb import Common, Verb

__all__ = ["Export"]


@dataclass(frozen=True)
class Export(Verb):
    """Write a posterior's prediction to one file that returns mean, aleatoric and epistemic, without caveat."""

    posterior: Path  # a folder that `caveat fit` wrote
    out: Path = Path("posterior.pt2")  # the file to write: .pt2 for torch, or .onnx
    model: str | None = None  # takes the place of the stored one: file.py:function, or a name
    draws: int | None = None  # posterior draws; the method's own number, or its closed form, unless given

    def run(self, common: Common) -> None:
        """Export."""
        from caveat.deploy import export
        from caveat.recipe import read_posterior

        posterior, recipe = read_posterior(self.posterior, common.place(), self.model)
        export(posterior, self.out, draws=self.draws, seed=common.seed)
        size = self.out.stat().st_size
        content = {"out": str(self.out), "bytes": size, "input_shape": list(recipe.input_shape)}
        shape = ", ".join(map(str, ("rows", *recipe.input_shape)))
        common.show(content, f"{self.out}: {size:,} bytes; takes [{shape}], gives mean, aleatoric and epistemic")
