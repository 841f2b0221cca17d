"""`caveat methods`: the methods, and which likelihoods each supports."""

import dataclasses
from dataclasses import dataclass

from caveat.cli.verb import Common, Verb, summary

__all__ = ["Methods"]


@dataclass(frozen=True)
class Methods(Verb):
    """List the methods, what each one is, and which likelihoods it supports."""

    def run(self, common: Common) -> None:
        """Print the list and the matrix."""
        from caveat import likelihoods
        from caveat.methods import built_in, discover

        known = [name for name in likelihoods.__all__ if dataclasses.is_dataclass(getattr(likelihoods, name))]
        methods = discover()
        width = max(map(len, methods))
        packages = {name: method.__module__.partition(".")[0] for name, method in methods.items()}
        origins = {name: "" if name in built_in() else f" (of the package {packages[name]})" for name in methods}
        lines = [f"{name:<{width}}  {summary(method)}{origins[name]}" for name, method in methods.items()]
        lines += ["", " " * width + "  " + "  ".join(known)]
        for name, method in methods.items():
            marks = ("yes" if k in method.likelihoods else "-" for k in known)
            lines.append(
                f"{name:<{width}}  " + "  ".join(f"{m:^{len(k)}}" for m, k in zip(marks, known, strict=True)).rstrip()
            )
        content = {
            name: {
                "summary": summary(method),
                "package": packages[name],
                "starts_from": method.starts_from,
                "likelihoods": list(method.likelihoods),
            }
            for name, method in methods.items()
        }
        common.show(content, "\n".join(lines))
