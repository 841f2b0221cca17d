"""Checks of a state that was read from files, against the network that it is of.

A file may be whole and yet not be what it says: a tensor that is not there, of another shape or type, or with NaN in
it would come out as a wrong prediction, or as an error from deep inside. Each state knows the names, shapes and types
that it has; what they say here is said with the tensor's name.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from caveat.likelihoods import Hyper, learned_noise
from caveat.network import Network, Params, layer_of
from caveat.storage import CorruptFile

__all__ = [
    "buffers_like",
    "check_finite",
    "check_hyper",
    "check_indices",
    "check_like",
    "check_names",
    "check_not_nan",
    "check_point",
    "check_tensor",
    "learned_hyper",
    "network_tensors",
]

LOOKED_THROUGH = 64 * 2**20  # bytes: larger tensors stay in their files, and are not read to look for NaN


def check_names(where: str, found: Collection[str], needed: Collection[str], optional: Collection[str] = ()) -> None:
    """Refuse names that are missing, or that do not belong there."""
    missing = [name for name in needed if name not in found]
    if missing:
        raise CorruptFile(f"{where}/{missing[0]} is missing")
    extra = [name for name in found if name not in needed and name not in optional]
    if extra:
        raise CorruptFile(f"{where}/{extra[0]} does not belong there")


def check_tensor(
    where: str, tensor: Tensor, shape: Sequence[int], dtypes: Collection[torch.dtype], *, logarithm: bool = False
) -> None:
    """Refuse a tensor of another shape or type, or with NaN or infinity in it; a `logarithm` may be that of zero."""
    if tuple(tensor.shape) != tuple(shape):
        raise CorruptFile(f"{where} has shape {list(tensor.shape)}, not {list(shape)}")
    if tensor.dtype not in dtypes:
        known = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise CorruptFile(f"{where} is of type {str(tensor.dtype).removeprefix('torch.')}, not {known}")
    check_finite(where, tensor, logarithm=logarithm)


def check_finite(where: str, tensor: Tensor, *, logarithm: bool = False) -> None:
    """Refuse NaN and infinity, but for minus infinity where it is the logarithm of zero; whole numbers have neither."""
    if not tensor.is_floating_point() or tensor.nbytes > LOOKED_THROUGH:
        return
    if bool(tensor.sum().isfinite()):  # quicker, and enough; of finite numbers it may be infinite, so not the last word
        return
    if not bool((tensor < torch.inf).all() if logarithm else tensor.isfinite().all()):
        raise CorruptFile(f"{where} holds NaN or infinity")


def check_not_nan(where: str, tensor: Tensor) -> None:
    """Refuse NaN."""
    if tensor.is_floating_point() and tensor.nbytes <= LOOKED_THROUGH and bool(tensor.isnan().any()):
        raise CorruptFile(f"{where} holds NaN")


def check_like(where: str, tensors: Params, like: Params, leading: Sequence[int] = ()) -> None:
    """Refuse tensors that are not those of a network: the same names, shapes after leading axes, and types."""
    check_names(where, tensors, like)
    for name, tensor in tensors.items():
        check_tensor(f"{where}/{name}", tensor, (*leading, *like[name].shape), (like[name].dtype,))


def network_tensors(network: Network) -> tuple[Params, Params]:
    """The selected parameters of a network and its buffers, as they are: not copied."""
    parameters = dict(network.module.named_parameters())
    return {name: parameters[name] for name in network.names}, dict(network.module.named_buffers())


def buffers_like(params: Params, buffers: Params) -> Params:
    """The buffers that a point must have, given that it has some: all of a layer that it has any of.

    Training writes those of some layers (BatchNorm) and leaves others as they are.
    """
    written = {layer_of(name) for name in params if name in buffers}
    return {name: buffer for name, buffer in buffers.items() if layer_of(name) in written}


def check_point(
    where: str, params: Params, network: Network, leading: Sequence[int] = (), hyper: Hyper | None = None
) -> None:
    """Refuse what is not one point of the network, or with leading axes several: parameters, and buffers of layers.

    With `hyper` each of several points has what the likelihood learned beside it, shaped as it is there.
    """
    like, buffers = network_tensors(network)
    like = like | buffers_like(params, buffers)
    points = {name: tensor for name, tensor in params.items() if not name.startswith("hyper/")}
    check_like(where, points, like, leading)
    learned = {} if hyper is None else {f"hyper/{name}": t for name, t in hyper.items()}
    own = {name: tensor for name, tensor in params.items() if name.startswith("hyper/")}
    check_names(where, own, learned)
    for name, tensor in own.items():
        check_tensor(f"{where}/{name}", tensor, (*leading, *learned[name].shape), (torch.float32, torch.float64))


def check_hyper(hyper: Hyper, network: Network) -> None:
    """Refuse what is not what the likelihood has beside the weights: one number for each output, and a temperature."""
    likelihood = network.likelihood
    try:
        known = set(likelihood.initial_hyper(torch.zeros(2, 1)))  # of made-up targets: their names are what counts
    except Exception:  # a likelihood of one's own may have targets of another kind
        known = set(hyper) - {"temperature"}
    check_names("hyper", hyper, known, {"temperature"} if likelihood.tempered else ())
    width = {name: tuple(hyper[name].shape) for name in known}
    for name, tensor in hyper.items():
        shape = () if name == "temperature" else next(iter(width.values()))
        check_tensor(f"hyper/{name}", tensor, shape, (torch.float32, torch.float64))
        if name != "temperature" and tensor.ndim != 1:
            raise CorruptFile(f"hyper/{name} has shape {list(tensor.shape)}, not one number for each output")
        if name in ("temperature", "target_scale") and not bool((tensor > 0).all()):
            raise CorruptFile(f"hyper/{name} is not positive")


def learned_hyper(network: Network, hyper: Hyper) -> Hyper:
    """What chains draw of a likelihood's own numbers: the noise, where it is learned."""
    noise = learned_noise(network.likelihood, hyper)
    return {} if noise is None else {"log_noise": noise}


def check_indices(where: str, indices: Tensor, size: int) -> None:
    """Refuse what are not different positions below a size, ascending, int32."""
    check_tensor(where, indices, (indices.numel(),), (torch.int32,))
    if len(indices) and not (int(indices[0]) >= 0 and int(indices[-1]) < size and bool((indices.diff() > 0).all())):
        raise CorruptFile(f"{where} are not ascending positions below {size}")
