"""Image models of transformers, timm, open_clip, MONAI and segmentation_models_pytorch."""

from typing import Any

from torch import Tensor, nn

import caveat

from .cases import Case, case, images
from .language import adapted

WIDE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def classifier(kind: str, **settings: Any) -> nn.Module:
    """A transformers image classifier of two classes."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(image_size=16, num_labels=2, **settings)
    return getattr(transformers, f"{kind}ForImageClassification")(config)


@case("ViT", "transformers")
def vit() -> Case:
    x, y = images()
    return Case(classifier("ViT", patch_size=8, **WIDE), {"pixel_values": x}, y)


@case("DINOv2", "transformers")
def dinov2() -> Case:
    x, y = images()
    return Case(classifier("Dinov2", patch_size=8, mlp_ratio=2, **WIDE), {"pixel_values": x}, y)


@case("Swin", "transformers")
def swin() -> Case:
    x, y = images()
    settings = {"patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
    return Case(classifier("Swin", **settings), {"pixel_values": x}, y)


@case("ConvNeXt", "transformers")
def convnext() -> Case:
    x, y = images()
    return Case(classifier("ConvNext", hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], patch_size=2), _named(x), y)


def _named(x: Tensor) -> dict[str, Tensor]:
    return {"pixel_values": x}


@case("ViT with LoRA", "transformers", "peft")
def vit_lora() -> Case:
    x, y = images()
    module = adapted(
        classifier("ViT", patch_size=8, **WIDE), None, target_modules=["query", "value", "q_proj", "v_proj"],
        modules_to_save=["classifier"],
    )  # fmt: skip
    return Case(module, _named(x), y, learning_rate=1e-2)


@case("timm ResNet", "timm")
def timm_resnet() -> Case:
    from timm.models.resnet import BasicBlock, ResNet

    x, y = images()
    return Case(ResNet(BasicBlock, (1, 1, 1, 1), num_classes=2, channels=(8, 8, 16, 16), stem_width=8), x, y)


def _timm(name: str, **settings: Any) -> nn.Module:
    import timm

    return timm.create_model(name, pretrained=False, num_classes=2, **settings)


@case("timm ViT", "timm")
def timm_vit() -> Case:
    x, y = images()
    settings = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
    return Case(_timm("vit_tiny_patch16_224", **settings), x, y)


@case("timm MLP-Mixer", "timm")
def timm_mixer() -> Case:
    from timm.models.mlp_mixer import MlpMixer

    x, y = images()
    return Case(MlpMixer(num_classes=2, img_size=16, patch_size=8, num_blocks=2, embed_dim=16), x, y)


@case("timm EfficientNet", "timm")
def timm_efficientnet() -> Case:
    x, y = images(32)
    return Case(_timm("test_efficientnet"), x, y)


@case("timm ConvNeXt", "timm")
def timm_convnext() -> Case:
    x, y = images(32)
    return Case(_timm("test_convnext"), x, y)


class ImageTower(nn.Module):
    """The image tower of an open_clip model, normalised, and a head."""

    def __init__(self) -> None:
        super().__init__()
        from open_clip.transformer import VisionTransformer

        self.body = VisionTransformer(
            image_size=16, patch_size=8, width=16, layers=2, heads=2, mlp_ratio=2.0, output_dim=8
        )
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(5 * nn.functional.normalize(self.body(x), dim=-1))


@case("CLIP's image tower", "open_clip")
def clip() -> Case:
    x, y = images()
    return Case(ImageTower(), x, y, learning_rate=1e-2)


def pixels() -> tuple[Tensor, Tensor]:
    """Images and a label for each pixel."""
    x, _ = images(16, 1)
    x = nn.functional.avg_pool2d(x, 5, 1, 2) * 5
    return x, (x[:, 0] > 0).long()


@case("MONAI U-Net", "monai")
def monai_unet() -> Case:
    from monai.networks.nets import UNet

    x, y = pixels()
    module = UNet(spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8, 8), strides=(2, 2), num_res_units=1)
    return Case(module, x, y, caveat.Categorical(class_axis=1), epochs=15)


@case("Segmentation U-Net", "segmentation_models_pytorch")
def segmentation_unet() -> Case:
    from segmentation_models_pytorch import Unet

    x, y = pixels()
    x, y = (nn.functional.interpolate(part.float().reshape(len(x), 1, 16, 16), size=32) for part in (x, y))
    module = Unet(
        "timm-mobilenetv3_small_minimal_100", encoder_weights=None, encoder_depth=3, decoder_channels=(16, 8, 8),
        in_channels=1, classes=2,
    )  # fmt: skip
    return Case(module, x, y[:, 0].long(), caveat.Categorical(class_axis=1), epochs=15)


@case("ResNet with weight and spectral norm")
def parametrised() -> Case:
    from torch.nn.utils import parametrizations

    x, y = images(8)
    first = parametrizations.weight_norm(nn.Conv2d(3, 8, 3, padding=1))
    second = parametrizations.spectral_norm(nn.Conv2d(8, 8, 3, padding=1))
    head = parametrizations.weight_norm(nn.Linear(8, 2))
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Case(nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), pool, head), x, y, learning_rate=1e-2)


@case("Pooling by argument, BatchNorm and dropout")
def convolutional() -> Case:
    x, y = images(8)
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(inplace=True), nn.Dropout2d(0.1))
    return Case(nn.Sequential(*layers, nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(32, 2)), x, y)
