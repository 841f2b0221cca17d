"""ResNet-18 (He et al., 2016) for small images: a 3x3 stem of stride 1 and no max pooling.

Four stages of two residual blocks, y = relu(body(x) + shortcut(x)), of widths w, 2w, 4w and 8w; the last three halve
the image. 11,173,962 parameters for 3 channels, 10 classes and w = 64. Nothing is done in place.
"""

from collections import OrderedDict

from torch import Tensor, nn


def resnet18(in_channels: int = 3, out_features: int = 10, width: int = 64) -> nn.Sequential:
    """Build the network; it takes square or oblong images of any size.

    Args:
        in_channels: 1 for grey, 3 for colour
        out_features: classes
        width: channels of the first stage; the others have 2, 4 and 8 times as many
    """
    stages = []
    channels = width
    for stage in range(4):
        out_channels = width * 2**stage
        first = _block(channels, out_channels, stride=1 if stage == 0 else 2)
        stages.append(nn.Sequential(first, _block(out_channels, out_channels, stride=1)))
        channels = out_channels
    return nn.Sequential(
        OrderedDict(
            stem=nn.Sequential(*_convolution(in_channels, width, kernel_size=3, stride=1), nn.ReLU()),
            stages=nn.Sequential(*stages),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            head=nn.Linear(channels, out_features),
        )
    )


class Residual(nn.Module):
    """activation(body(x) + shortcut(x))."""

    def __init__(self, body: nn.Module, shortcut: nn.Module, activation: nn.Module):
        super().__init__()
        self.body = body
        self.shortcut = shortcut
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.activation(self.body(x) + self.shortcut(x))


def _block(in_channels: int, out_channels: int, stride: int) -> Residual:
    body = nn.Sequential(
        *_convolution(in_channels, out_channels, kernel_size=3, stride=stride),
        nn.ReLU(),
        *_convolution(out_channels, out_channels, kernel_size=3, stride=1),
    )
    if stride == 1 and in_channels == out_channels:
        return Residual(body, nn.Identity(), nn.ReLU())
    return Residual(
        body, nn.Sequential(*_convolution(in_channels, out_channels, kernel_size=1, stride=stride)), nn.ReLU()
    )


def _convolution(in_channels: int, out_channels: int, kernel_size: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2, bias=False)
    return [convolution, nn.BatchNorm2d(out_channels)]
