"""A probe of what a network computes: its outputs at made-up weights for made-up inputs.

Names and shapes of parameters do not say what is done with them: a tanh in the place of a ReLU goes unnoticed, and a
posterior of the one is none of the other. A few outputs tell them apart. Weights and inputs are drawn from fixed
seeds, so that nothing of the data is kept; a large parameter repeats the numbers that were drawn for it, since drawing
eleven million takes longer than many a fit.
"""

import hashlib
import math
from typing import Any

import torch
from torch import Tensor

from caveat.batches import Inputs
from caveat.engine.torch_settings import full_precision
from caveat.network import Network, Params, without_autocast
from caveat.randomness import seeded
from caveat.storage import CorruptFile

__all__ = ["differs_from", "forward_probe", "likeness_of", "made_up"]

ROWS, NUMBERS = 3, 32  # of the inputs, and kept of the outputs
DRAWN = 65_521  # numbers of a parameter, before they repeat; a prime, so that no two rows of a matrix are alike
LARGEST = 2**28  # numbers of an input that a file may ask to be made up
TOLERANCE = 0.05  # of the largest output: what devices round differently is far less, another activation far more


def forward_probe(network: Network, x: Inputs) -> dict[str, Any]:
    """Made-up inputs in the likeness of x, as json, and the network's outputs for them; {} where there are none.

    There are none where the network draws random numbers, or cannot take such inputs.
    """
    likeness = likeness_of(x)
    if likeness is None:
        return {}
    outputs, again = _outputs(network, likeness, DRAWN, seeds=2)
    if outputs is None or again is None or not torch.equal(outputs, again):
        return {}
    return {"inputs": likeness, "outputs": outputs.tolist()}


def differs_from(probe: dict[str, Any], network: Network) -> bool:
    """Whether a network computes something else than the one that the probe was taken of."""
    if not probe:
        return False
    if probe.keys() != {"inputs", "outputs"} or not _is_likeness(probe["inputs"]) or not _are_numbers(probe["outputs"]):
        raise CorruptFile("what the file says of the network's outputs is not whole")
    known = torch.tensor(probe["outputs"], dtype=torch.float64)
    if not _differs(_outputs(network, probe["inputs"], DRAWN)[0], known):
        return False
    large = any(parameter.numel() > DRAWN for parameter in network.params().values())
    return not large or _differs(_outputs(network, probe["inputs"], None)[0], known)  # older files: all were drawn


def _differs(outputs: Tensor | None, known: Tensor) -> bool:
    if outputs is None or outputs.shape != known.shape:
        return True
    return bool(((outputs - known).abs() > TOLERANCE * known.abs().max().clamp_min(1e-6)).any())


def likeness_of(x: Inputs) -> Any:
    """The structure of inputs as json: shapes, types and the largest whole number; None where it cannot be said."""
    if isinstance(x, Tensor):
        whole = not x.is_floating_point() and not x.is_complex()
        high = int(x.max()) if whole and x.dtype != torch.bool and x.numel() else 1
        shape = list(x.shape[1:]) if x.ndim else None
        return {"shape": shape, "type": str(x.dtype).removeprefix("torch."), "high": high}
    if isinstance(x, dict):
        entries = {str(key): likeness_of(value) for key, value in x.items()}
        return None if None in entries.values() else {"entries": entries}
    if isinstance(x, list | tuple):
        items = [likeness_of(value) for value in x]
        return None if None in items else {"items": items}
    return {"value": x} if isinstance(x, str | bool | int | float) else None


def _is_likeness(value: Any, depth: int = 0) -> bool:
    """Whether json is what `likeness_of` makes, of a size that can be made up."""
    if not isinstance(value, dict) or depth > 20:
        return False
    if value.keys() == {"entries"} and isinstance(value["entries"], dict):
        return all(_is_likeness(entry, depth + 1) for entry in value["entries"].values())
    if value.keys() == {"items"} and isinstance(value["items"], list):
        return all(_is_likeness(item, depth + 1) for item in value["items"])
    if value.keys() == {"value"}:
        return isinstance(value["value"], str | bool | int | float)
    if value.keys() != {"shape", "type", "high"} or type(value["high"]) is not int or abs(value["high"]) >= 2**62:
        return False
    shape, dtype = value["shape"], value["type"]
    plain = shape is None or (isinstance(shape, list) and all(type(n) is int and 0 <= n < 2**31 for n in shape))
    known = isinstance(dtype, str) and isinstance(getattr(torch, dtype, None), torch.dtype)
    return plain and known and math.prod(shape or ()) < LARGEST


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) in (int, float) for number in value)


def made_up(likeness: Any, rng: torch.Generator, device: torch.device) -> Inputs:
    """Inputs of that structure, [ROWS, ...]."""
    if "entries" in likeness:
        return {key: made_up(value, rng, device) for key, value in likeness["entries"].items()}
    if "items" in likeness:
        return tuple(made_up(value, rng, device) for value in likeness["items"])
    if "value" in likeness:
        return likeness["value"]
    dtype, shape = getattr(torch, likeness["type"]), likeness["shape"]
    size = () if shape is None else (ROWS, *shape)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(size, generator=rng, dtype=torch.float64).to(device, dtype)
    return torch.randint(max(likeness["high"], 0) + 1, size, generator=rng).to(device, dtype)


def _outputs(network: Network, likeness: Any, drawn: int | None, seeds: int = 1) -> list[Tensor | None]:
    """The first outputs, float64, at weights that depend on names and shapes alone; None where there are none.

    They come for each seed, 0 and up, of what the module itself may draw.
    """
    x, device = made_up(likeness, torch.Generator().manual_seed(0), network.device), network.device
    outputs = []
    try:
        weights = _weights(network, drawn)  # once for all seeds: a large network has many
        for seed in range(seeds):
            with torch.no_grad(), seeded(seed, device), without_autocast(device), full_precision(device):
                outputs.append(network.replica()(weights, x).double().cpu().flatten()[:NUMBERS])
    except Exception:  # whatever a module says about inputs that nobody gave it
        return [None] * seeds
    return [flat if bool(flat.isfinite().all()) else None for flat in outputs]


def _weights(network: Network, drawn: int | None) -> Params:
    """Normal numbers for every selected parameter, as large as an initialisation would make them.

    Of each so many are `drawn`, or all.
    """
    weights = {}
    for name, parameter in network.params().items():
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
        rng, size = torch.Generator().manual_seed(seed), parameter.numel()
        fan_in = parameter[0].numel() if parameter.ndim > 1 else 1
        count = size if drawn is None else min(size, drawn)
        numbers = torch.randn(count, generator=rng, dtype=torch.float64) / math.sqrt(max(fan_in, 1))
        numbers = numbers.to(parameter.device, parameter.dtype)
        times = -(-size // count) if count else 1
        weights[name] = (numbers.repeat(times)[:size] if times > 1 else numbers).view(parameter.shape)
    return weights
