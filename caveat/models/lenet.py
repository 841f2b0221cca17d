"""LeNet-5 (LeCun et al., 1998) as used today: ReLU and max pooling in place of tanh and trained subsampling.

`lenet5` has 61,706 parameters for 28x28 grey images and 10 classes; 83,126 for 32x32 colour images. `lenet_caffe` is
the wider one that came with Caffe, 431,080 parameters, on which most work on pruning reports.
"""

from torch import nn

SMALLEST_IMAGE = 12  # 12 -> conv 12 -> pool 6 -> conv 2 -> pool 1
SMALLEST_FOR_CAFFE = 16  # 16 -> conv 12 -> pool 6 -> conv 2 -> pool 1


def lenet5(in_channels: int = 1, out_features: int = 10, image_size: int = 28) -> nn.Sequential:
    """Two 5x5 convolutions (6 and 16 channels; the first padded by 2), then linear layers 120 - 84 - out_features.

    Args:
        in_channels: 1 for grey, 3 for colour
        out_features: classes
        image_size: height and width of the square images, at least 12
    """
    if image_size < SMALLEST_IMAGE:
        raise ValueError(f"image_size={image_size} leaves no pixels after two poolings: at least {SMALLEST_IMAGE}")
    side = (image_size // 2 - 4) // 2  # pixels left along each edge
    return nn.Sequential(
        nn.Conv2d(in_channels, 6, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * side * side, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, out_features),
    )


def lenet_caffe(in_channels: int = 1, out_features: int = 10, image_size: int = 28) -> nn.Sequential:
    """Two 5x5 convolutions without padding (20 and 50 channels), then linear layers 500 - out_features.

    ReLU follows every layer but the last; in Caffe's own file only the linear one.

    Args:
        in_channels: 1 for grey, 3 for colour
        out_features: classes
        image_size: height and width of the square images, at least 16
    """
    if image_size < SMALLEST_FOR_CAFFE:
        raise ValueError(f"image_size={image_size} leaves no pixels after two poolings: at least {SMALLEST_FOR_CAFFE}")
    side = ((image_size - 4) // 2 - 4) // 2  # pixels left along each edge
    return nn.Sequential(
        nn.Conv2d(in_channels, 20, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 50, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(50 * side * side, 500),
        nn.ReLU(),
        nn.Linear(500, out_features),
    )
