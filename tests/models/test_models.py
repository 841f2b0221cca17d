import inspect

import pytest
import torch
from torch import nn
from torch.func import functional_call, jvp, stack_module_state, vmap

from caveat.models import MODELS, cnn_lstm, lenet5, lenet_caffe, mlp, resnet18, resnet20_frn
from caveat.models.cnn_lstm import LastStateLSTM
from caveat.models.resnet20_frn import FilterResponseNorm


def small_mlp():
    return mlp(12, 3, hidden=(8, 5), activation=nn.SiLU)


def small_cnn_lstm():
    return cnn_lstm(vocabulary=30, embedding=6, channels=4, kernel=3, hidden=5, out_features=2)


def images(n, channels, size):
    return torch.randn(n, channels, size, size, generator=torch.Generator().manual_seed(0))


def tokens(n, length):
    return torch.randint(0, 30, (n, length), generator=torch.Generator().manual_seed(0))


CASES = {  # builder, input of four rows, outputs
    "mlp": (small_mlp, images(4, 3, 2), 3),
    "lenet_caffe": (lambda: lenet_caffe(image_size=18, out_features=7), images(4, 1, 18), 7),
    "lenet5": (lambda: lenet5(image_size=14, out_features=7), images(4, 1, 14), 7),
    "resnet18": (lambda: resnet18(width=4, out_features=5), images(4, 3, 16), 5),
    "resnet20_frn": (lambda: resnet20_frn(in_channels=1, width=4), images(4, 1, 16), 10),
    "cnn_lstm": (small_cnn_lstm, tokens(4, 20), 2),
}


@pytest.fixture(params=CASES)
def case(request):
    torch.manual_seed(0)
    build, x, outputs = CASES[request.param]
    return build, x, outputs


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_every_model_has_a_case_and_full_defaults_in_its_signature():
    assert set(CASES) == set(MODELS)
    for name, builder in MODELS.items():
        assert builder.__name__ == name
        assert "kwargs" not in inspect.signature(builder).parameters


def test_output_shape(case):
    build, x, outputs = case
    assert build()(x).shape == (4, outputs)


def test_a_batch_of_one_equals_its_row_in_the_batch_in_eval_mode(case):
    build, x, _ = case
    model = build().eval().double()
    x = x.double() if x.is_floating_point() else x
    torch.testing.assert_close(model(x[:1]), model(x)[:1], rtol=1e-10, atol=1e-12)


def test_gradient_reaches_every_parameter(case):
    build, x, _ = case
    model = build()
    model(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_float64_gives_float64_close_to_float32(case):
    build, x, _ = case
    model = build().eval()
    single = model(x)
    double = model.double()(x.double() if x.is_floating_point() else x)
    assert double.dtype == torch.float64
    torch.testing.assert_close(single.double(), double, rtol=1e-3, atol=1e-4)


def test_the_input_is_not_changed(case):
    build, x, _ = case
    before = x.clone()
    build()(x)
    assert torch.equal(x, before)


def test_functional_call_uses_the_given_parameters(case):
    build, x, _ = case
    model, other = build().eval(), build().eval()
    given = dict(other.named_parameters()) | dict(other.named_buffers())
    torch.testing.assert_close(functional_call(model, given, (x,)), other(x))
    assert not torch.allclose(model(x), other(x))


def test_vmap_over_stacked_parameters_equals_a_loop(case):
    build, x, _ = case
    models = [build().eval() for _ in range(3)]
    parameters, buffers = stack_module_state(models)
    skeleton = build().eval()
    together = vmap(lambda p, b: functional_call(skeleton, p | b, (x,)))(parameters, buffers)
    torch.testing.assert_close(together, torch.stack([model(x) for model in models]), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own, on first use
def test_forward_mode_agrees_with_finite_differences(case):
    build, x, _ = case
    model = build().eval().double()
    x = x.double() if x.is_floating_point() else x
    point = {name: parameter.detach() for name, parameter in model.named_parameters()}
    direction = {name: torch.randn_like(parameter) for name, parameter in point.items()}

    def along(step):
        return functional_call(model, {name: point[name] + step * direction[name] for name in point}, (x,))

    _, tangent = jvp(along, (torch.zeros((), dtype=torch.float64),), (torch.ones((), dtype=torch.float64),))
    torch.testing.assert_close(tangent, (along(1e-7) - along(-1e-7)) / 2e-7, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        (mlp(8, 2), 8 * 50 + 50 + 50 * 2 + 2),
        (mlp(784, 10, hidden=()), 7_850),
        (lenet5(), 61_706),
        (lenet_caffe(), 431_080),
        (lenet5(in_channels=3, image_size=32), 83_126),
        (resnet18(), 11_173_962),
        (resnet20_frn(), 274_042),
        (cnn_lstm(), 2_700_098),
    ],
    ids=["mlp", "linear", "lenet5", "lenet_caffe", "lenet5 colour", "resnet18", "resnet20_frn", "cnn_lstm"],
)
def test_parameter_count(model, parameters):
    assert count(model) == parameters


@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU, nn.Tanh])
def test_mlp_puts_the_activation_between_linear_layers(activation):
    kinds = [type(layer) for layer in mlp(4, 2, hidden=(6, 5), activation=activation)]
    assert kinds == [nn.Flatten, nn.Linear, activation, nn.Linear, activation, nn.Linear]


@pytest.mark.parametrize("size", [12, 13, 14, 15, 28, 32, 45])
def test_lenet5_takes_any_size_from_twelve(size):
    assert lenet5(image_size=size)(torch.zeros(1, 1, size, size)).shape == (1, 10)


def test_lenet5_refuses_smaller_images():
    with pytest.raises(ValueError, match="image_size=11"):
        lenet5(image_size=11)
    with pytest.raises(ValueError, match="at least 16"):
        lenet_caffe(image_size=15)


def test_resnet18_keeps_the_resolution_in_its_stem_and_first_stage():
    model = resnet18(width=4).eval()
    x = images(1, 3, 32)
    sides = [model.stem(x).shape[-1]]
    x = model.stem(x)
    for stage in model.stages:
        x = stage(x)
        sides.append(x.shape[-1])
    assert sides == [32, 32, 16, 8, 4]


def test_filter_response_norm_is_its_formula():
    layer = FilterResponseNorm(3).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        parameter.data = torch.randn(3, generator=generator, dtype=torch.float64)
    x = torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64)
    x[0, 0] *= 1e-4  # where eps matters
    out = layer(x)
    for image in range(2):
        for channel in range(3):
            plane = x[image, channel]
            power = sum(value.item() ** 2 for value in plane.flatten()) / 20
            gamma, beta, tau = (getattr(layer, name)[channel].item() for name in ("gamma", "beta", "tau"))
            expected = [[max(gamma * v.item() / (power + 1e-6) ** 0.5 + beta, tau) for v in row] for row in plane]
            torch.testing.assert_close(out[image, channel], torch.tensor(expected, dtype=torch.float64))


def test_resnet20_frn_looks_at_each_image_alone_even_in_training_mode():
    model = resnet20_frn(width=4).train().double()
    x = images(4, 3, 16).double()
    torch.testing.assert_close(model(x)[1:2], model(x[1:2]))


def test_lstm_equals_torchs_with_the_forget_bias_raised_by_one():
    ours, theirs = LastStateLSTM(4, 3).double(), nn.LSTM(4, 3, batch_first=True).double()
    bias = ours.input.bias.detach().clone()
    bias[3:6] += 1
    theirs.load_state_dict(
        {
            "weight_ih_l0": ours.input.weight,
            "weight_hh_l0": ours.recurrent.weight,
            "bias_ih_l0": bias,
            "bias_hh_l0": torch.zeros(12),
        }
    )
    x = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x)[0][:, -1])


def test_cnn_lstm_shortest_text():
    model = cnn_lstm(vocabulary=30)
    assert model(tokens(2, 8)).shape == (2, 2)
    with pytest.raises(ValueError, match="pad them on the left to 8"):
        model(tokens(2, 7))
