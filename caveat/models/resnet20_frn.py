"""ResNet-20 with filter response normalisation, the network of the HMC study of Izmailov et al. (2021).

No layer looks at other images of the batch and SiLU is smooth, so the log posterior is an ordinary function of the
weights: what HMC needs. Three stages of three blocks of widths w, 2w and 4w. A layer is a convolution with bias, then
    y = gamma x / sqrt(mean over pixels of x^2 + eps) + beta,    z = max(y, tau)      (Singh and Krishnan, 2020)
with gamma, beta and tau one number a channel. A block is silu(layer(silu(layer(x))) + shortcut(x)), the shortcut a 1x1
layer of stride 2 where a stage begins and the identity elsewhere. 274,042 parameters for 3 channels, 10 classes and
w = 16. Strided convolutions pad both sides by one, where the study's framework padded only the far side.
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn

from caveat.models.resnet18 import Residual


def resnet20_frn(in_channels: int = 3, out_features: int = 10, width: int = 16) -> nn.Sequential:
    """Build the network; it takes images of any size.

    Args:
        in_channels: 1 for grey, 3 for colour
        out_features: classes
        width: channels of the first stage; the others have 2 and 4 times as many
    """
    stages = []
    channels = width
    for stage in range(3):
        out_channels = width * 2**stage
        first = _block(channels, out_channels, stride=1 if stage == 0 else 2)
        stages.append(nn.Sequential(first, *(_block(out_channels, out_channels, stride=1) for _ in range(2))))
        channels = out_channels
    return nn.Sequential(
        OrderedDict(
            stem=nn.Sequential(*_layer(in_channels, width, kernel_size=3, stride=1), nn.SiLU()),
            stages=nn.Sequential(*stages),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            head=nn.Linear(channels, out_features),
        )
    )


class FilterResponseNorm(nn.Module):
    """max(gamma x / sqrt(mean over pixels of x^2 + eps) + beta, tau), for x of shape [B, C, H, W]."""

    def __init__(self, channels: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.gamma = nn.Parameter(torch.ones(channels))
        self.beta = nn.Parameter(torch.zeros(channels))
        self.tau = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        gamma, beta, tau = (parameter[:, None, None] for parameter in (self.gamma, self.beta, self.tau))  # [C, 1, 1]
        power = x.square().mean(dim=(-2, -1), keepdim=True)  # [B, C, 1, 1]
        return torch.maximum(gamma * x * torch.rsqrt(power + self.eps) + beta, tau)


def _block(in_channels: int, out_channels: int, stride: int) -> Residual:
    body = nn.Sequential(
        *_layer(in_channels, out_channels, kernel_size=3, stride=stride),
        nn.SiLU(),
        *_layer(out_channels, out_channels, kernel_size=3, stride=1),
    )
    if stride == 1:
        return Residual(body, nn.Identity(), nn.SiLU())
    return Residual(body, nn.Sequential(*_layer(in_channels, out_channels, kernel_size=1, stride=stride)), nn.SiLU())


def _layer(in_channels: int, out_channels: int, kernel_size: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2)
    return [convolution, FilterResponseNorm(out_channels)]
