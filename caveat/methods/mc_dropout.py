"""MC dropout: dropout left on when predicting, each pass a draw (Gal & Ghahramani 2016).

    p(y | x) ~ 1/S sum_s p(y | f(x, masks_s)),   masks ~ Bernoulli(1 - rate) on activations

A network with dropout layers needs nothing more than this. A network without them gets dropout before every linear and
convolutional layer but the first, inserted while it runs: the module itself does not change. Masks are on activations
and differ from row to row, so they belong to no weight vector, and there are no weight draws.

Dropout is on because calls of it are answered here, whatever mode the network is in. Attention often asks its module's
mode before the call, `dropout_p=self.dropout if self.training else 0`, so that the rate is not known from it: a module
that makes such a call is in training mode while it runs, it alone, and all others (BatchNorm) stay as they are.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from caveat.batches import Inputs, count_rows, move, slices
from caveat.engine.method import Method
from caveat.engine.predictors import PIECE_ROWS, Replicas
from caveat.engine.run import Info, Run, StartsFrom
from caveat.engine.state_checks import check_hyper, check_names, check_point
from caveat.engine.training import ADAM, BatchPart, Training, train_point
from caveat.knobs import Count, Range, check_knobs
from caveat.likelihoods import Hyper
from caveat.network import Network, Params, layer_of
from caveat.randomness import seeded
from caveat.storage import State
from caveat.task import Task

__all__ = ["MCDropout"]

# Dropout inside recurrent layers and attention draws from torch's global generator, of which there is one.
_GLOBAL_GENERATOR = threading.Lock()


@dataclass(frozen=True)
class MCDropout(Method):
    """Dropout left on at prediction: the network's own layers, or inserted at a rate."""

    # The rate of inserted dropout; None uses the network's own layers.
    rate: Annotated[float, Range(0, 1, open_low=True, open_high=True)] | None = None
    default_draws: Count = 30  # passes of a prediction
    training: Training = replace(ADAM, epochs=0)  # with dropout on, from the start's weights; 0 epochs keeps them
    starts_from: ClassVar[StartsFrom] = "trained"
    quick: ClassVar["MCDropout"]

    def __post_init__(self) -> None:
        check_knobs(self)
        object.__setattr__(self, "training", self.training.filled(ADAM))

    def memory(self, network: Network) -> int:
        """Bytes of one copy of the weights."""
        return network.n_parameters * network.dtype.itemsize

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """Train with dropout on if there are epochs to train for; otherwise use the weights as they are."""
        network = task.network.to(run.device)
        probe, _ = next(task.train.batches([torch.arange(1)], run.device))
        asking = _asking_their_mode(network.replica(), network.params(), probe)
        masks = self._masks_per_pass(network, probe, asking)
        if asking.writing:
            run.warnings.append(
                f"dropout inside {', '.join(asking.writing[:3])} stays off, if there is any: the module writes into "
                "its buffers in training mode; call dropout there with its rate and training=self.training"
            )
        if not masks and self.rate is not None:
            raise ValueError(
                f"MCDropout(rate={self.rate}) reached no layer: it comes before every linear and convolutional layer "
                "but the first, and the network has no such layer; give the network dropout of its own"
            )
        if not masks:
            raise ValueError(
                "the network has no dropout layers, so every pass would be the same: "
                "give MCDropout(rate=0.1, training=Training(epochs=100))"
            )

        def forward(trainee: Network, x: Inputs, part: BatchPart, rng: torch.Generator) -> Tensor:
            with _Masks(self.rate, rng, (part.start, count_rows(x), part.batch_rows)):
                return trainee.training_pass(x)

        point = train_point(task, network, start, self.training, run, forward=forward)
        if self.rate is not None and self.training.epochs == 0:
            run.warnings.append(
                "dropout was inserted into weights that were trained without it: set training.epochs to adapt them"
            )
        diagnostics = {"history": point.history, "masks_per_pass": masks}
        return {"params": point.params, "hyper": point.hyper}, run.info(
            network, "dropout masks on activations", diagnostics
        )

    def _masks_per_pass(self, network: Network, x: Inputs, asking: "_Asking") -> int:
        """How many masks one pass over x [B, ...] draws."""
        params, network = network.params(), _with_dropout_on(network.replica(), asking.switched)
        with _Masks(self.rate, torch.Generator(network.device).manual_seed(0)) as masks, torch.no_grad():
            network(params, x)
        return masks.drawn

    def check_state(self, state: State, network: Network) -> None:
        """Refuse a state that is not a point of the network."""
        check_names("state", state, ["params", "hyper"])
        check_point("params", state["params"], network)
        check_hyper(state["hyper"], network)

    def predictor(self, state: State, network: Network) -> "_MaskPredictor":
        """A predictor that makes passes with dropout on."""
        return _MaskPredictor(self.rate, state, network)


class _MaskPredictor:
    """Predicts by passes, each of which draws its own masks."""

    def __init__(self, rate: float | None, state: State, network: Network) -> None:
        self._rate, self._state, self._network = rate, state, network
        self._asking: Sequence[str] | None = None  # modules that ask for their mode, known from the first prediction
        self._networks = Replicas(lambda: _with_dropout_on(network.replica(), self._asking or ()))

    def draws(self, n: int, rng: torch.Generator) -> NoReturn:
        """Refused: a mask on activations is not a setting of the weights."""
        raise TypeError(
            "MCDropout has no weight draws: its masks are on activations and differ from row to row; use predict(x)"
        )

    def outputs(self, x: Inputs, n: int, rng: torch.Generator) -> tuple[Tensor, Hyper]:
        """Outputs of n passes, [S, B, ...]."""
        if self._asking is None:
            one = move(next(slices(x, 1)), self._network.device)
            self._asking = _asking_their_mode(self._network.replica(), self._state["params"], one).switched
        with self._networks.lent() as network, torch.no_grad():
            masks = torch.Generator(network.device).manual_seed(int(torch.randint(2**62, (), generator=rng)))

            def one_pass() -> Iterator[Tensor]:
                for piece in slices(x, PIECE_ROWS):
                    with _Masks(self._rate, masks):
                        yield network(self._state["params"], move(piece, network.device))

            return torch.stack([torch.cat([*one_pass()]) for _ in range(n)]), self._state["hyper"]

    def fixed_form(self, n: int | None, rng: torch.Generator, example: Inputs) -> NoReturn:
        """Refused: masks that were fixed would be another posterior than the one that `predict` uses."""
        raise TypeError(
            "MCDropout draws masks for every row anew, so no module without randomness gives its predictions: serve it "
            "with predict, or fit a DeepEnsemble, SWAG or a Laplace method, whose draws are weights"
        )

    def moments(self, x: Inputs, joint: bool = False) -> None:
        """None: there is no closed form."""
        return None


class _Asking(NamedTuple):
    """Names of the modules whose own `forward` calls attention or dropout at rate 0 in a pass in evaluation mode."""

    switched: list[str]  # may be in training mode while they run
    writing: list[str]  # would then write into their buffers, and stay as they are


def _asking_their_mode(network: Network, params: Params, x: Inputs) -> _Asking:
    """The modules that may have dropout which hangs on their mode, seen from a pass over x [B, ...].

    The network is the caller's own, since its modules are watched during the pass.
    """
    names = {module: name for name, module in network.module.named_modules()}
    running: list[nn.Module] = []

    def begins(module: nn.Module, _: Any) -> None:
        running.append(module)

    def ends(module: nn.Module, _: Any, outputs: Any) -> None:
        running.pop()

    handles = [hook for m in names for hook in (m.register_forward_pre_hook(begins), m.register_forward_hook(ends))]
    generator = torch.Generator(network.device).manual_seed(0)
    with _Masks(None, generator, running=running) as masks, torch.no_grad():
        network(params, x)
    for handle in handles:
        handle.remove()
    asking = [names[module] for module in dict.fromkeys(masks.callers)]
    with_buffers = [name for name in asking if [*network.module.get_submodule(name).buffers(recurse=False)]]
    if not with_buffers:
        return _Asking(asking, [])
    before, trial = network.buffers(), _with_dropout_on(network.replica(), with_buffers)
    with _Masks(None, generator), torch.no_grad():
        trial(params, x)
    changed = {layer_of(name) for name, buffer in trial.buffers().items() if not torch.equal(buffer, before[name])}
    return _Asking([name for name in asking if name not in changed], [name for name in asking if name in changed])


def _with_dropout_on(network: Network, names: Sequence[str]) -> Network:
    """The network, the caller's own, with these modules in training mode while they run, without what they hold."""

    def begins(module: nn.Module, _: Any) -> None:
        module.training = True

    def ends(module: nn.Module, _: Any, outputs: Any) -> None:
        module.training = False

    for name in names:
        module = network.module.get_submodule(name)
        module.register_forward_pre_hook(begins)
        module.register_forward_hook(ends, always_call=True)
    return network


class _Masks(TorchFunctionMode):
    """A context for one pass, in which dropout is on and draws from one generator; with a rate, also before layers.

    `rows` = (first, count, total) says which rows of a larger batch the pass has. Masks are drawn for the whole batch,
    so that ranks that divide a batch use the masks that a single process would have used. With `running`, the modules
    whose `forward` is under way, the innermost at each call without a rate of its own is kept in `callers`.
    """

    layers = (F.linear, torch.conv1d, torch.conv2d, torch.conv3d)
    recurrent = ("lstm", "gru", "rnn_tanh", "rnn_relu")
    elementwise = (F.dropout, F.alpha_dropout)
    channelwise = (F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout)

    def __init__(
        self,
        rate: float | None,
        rng: torch.Generator,
        rows: tuple[int, int, int] | None = None,
        *,
        running: Sequence[nn.Module] = (),
    ) -> None:
        super().__init__()
        self.rate, self.rng, self.rows, self.running = rate, rng, rows, running
        self.drawn, self.layers_seen = 0, 0
        self.callers: list[nn.Module] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace calls of dropout by ours, and insert ours before layers."""
        kwargs = kwargs or {}
        if function in self.elementwise or function in self.channelwise:
            x, p = args[0] if args else kwargs["input"], args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            if p == 0:
                self.callers.extend(self.running[-1:])
                return x
            keep = self._mask(x, p, 2 if function in self.channelwise else x.ndim)
            return _alpha_dropped(x, keep, p) if "alpha" in function.__name__ else x * keep / max(1 - p, 1e-12)
        if function is F.scaled_dot_product_attention:
            rate = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
            if rate:
                return self._switched_on(function, args, kwargs, rate)
            self.callers.extend(self.running[-1:])
        if function is F.multi_head_attention_forward:
            rate = next(value for value in args if isinstance(value, float))
            return self._switched_on(function, args, kwargs | {"training": True}, rate)
        if getattr(function, "__name__", "") in self.recurrent:
            place = next(i for i, value in enumerate(args) if isinstance(value, float))  # dropout, then training
            return self._switched_on(function, (*args[: place + 1], True, *args[place + 2 :]), kwargs, args[place])
        if self.rate is not None and function in self.layers:
            self.layers_seen += 1
            if self.layers_seen > 1:
                args = (args[0] * self._mask(args[0], self.rate, args[0].ndim) / (1 - self.rate), *args[1:])
        return function(*args, **kwargs)

    def _switched_on(self, function: Any, args: Any, kwargs: Any, rate: float) -> Any:
        """Call a function that has dropout inside, which draws from the global generator, seeded from ours."""
        self.drawn += rate > 0
        seed = int(torch.randint(2**62, (), generator=self.rng, device=self.rng.device))
        with _GLOBAL_GENERATOR, seeded(seed, self.rng.device):
            return function(*args, **kwargs)

    def _mask(self, x: Tensor, rate: float, axes: int) -> Tensor:
        """A mask for x [B, ...]: 1 with probability 1 - rate, else 0, for each entry of the first `axes` axes."""
        self.drawn += 1
        shape = [*x.shape[:axes], *[1] * (x.ndim - axes)]
        first, count, total = self.rows or (0, len(x), len(x))
        if count == len(x):
            shape[0] = total
        uniform = torch.rand(shape, generator=self.rng, device=self.rng.device)
        return (uniform[first : first + count] if count == len(x) else uniform).ge(rate).to(x.dtype)


def _alpha_dropped(x: Tensor, keep: Tensor, rate: float) -> Tensor:
    """Dropout for self-normalising networks: dropped entries get SELU's lowest value, and moments are preserved."""
    lowest = -1.7580993408473766
    gain = ((1 - rate) * (1 + rate * lowest**2)) ** -0.5
    return gain * (x * keep + lowest * (1 - keep)) - gain * lowest * rate


MCDropout.quick = MCDropout(rate=0.1, training=Training(epochs=20))
