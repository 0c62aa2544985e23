"""Models of pictures of timm and torchvision, as their libraries name them."""

from collections.abc import Callable
from typing import Any

from torch import nn

from models.libraries.case import LibraryModel, pictures


def _of_timm(name: str, options: dict[str, Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        made: nn.Module = timm.create_model(name, num_classes=8, **options)
        return made

    return make


def _timm(name: str, size: int = 64, argument: str = "x", **options: Any) -> LibraryModel:
    return LibraryModel("timm", name, _of_timm(name, options), pictures(size, argument))


def _mixer() -> nn.Module:
    import timm

    made: nn.Module = timm.models.mlp_mixer.MlpMixer(num_classes=8, img_size=64, num_blocks=2, embed_dim=32)
    return made


def _torchvision(name: str, make: Callable[[Any], nn.Module], size: int = 64) -> LibraryModel:
    def made() -> nn.Module:
        import torchvision

        return make(torchvision.models)

    return LibraryModel("torchvision", name, made, pictures(size, "x"))


def _convnext(models: Any) -> nn.Module:
    blocks = [models.convnext.CNBlockConfig(16, 32, 1), models.convnext.CNBlockConfig(32, None, 1)]
    made: nn.Module = models.ConvNeXt(blocks, stochastic_depth_prob=0.2, num_classes=8)
    return made


def _swin(models: Any) -> nn.Module:
    made: nn.Module = models.SwinTransformer([4, 4], 24, [1, 1], [2, 4], [4, 4], num_classes=8)
    return made


TIMM = (
    _timm("test_vit", 160, drop_path_rate=0.2),
    _timm("test_vit_relpos", 160),
    _timm("test_resnet"),
    _timm("test_convnext", drop_path_rate=0.2),
    _timm("test_efficientnet"),
    _timm("test_nfnet"),
    _timm("test_coatnet", 160),
    _timm("test_mambaout"),
    LibraryModel("timm", "MlpMixer", _mixer, pictures(64, "x")),
    _timm("swin_tiny_patch4_window7_224", img_size=64, window_size=4, embed_dim=24, depths=(1, 1), num_heads=(2, 4)),
)
TORCHVISION = (
    _torchvision("resnet18", lambda models: models.resnet18(num_classes=8)),
    _torchvision("DenseNet", lambda models: models.DenseNet(8, (2, 2), 16, num_classes=8)),
    _torchvision("mobilenet_v2", lambda models: models.mobilenet_v2(width_mult=0.25, num_classes=8)),
    _torchvision("mobilenet_v3_small", lambda models: models.mobilenet_v3_small(num_classes=8)),
    _torchvision("shufflenet_v2_x0_5", lambda models: models.shufflenet_v2_x0_5(num_classes=8)),
    _torchvision("squeezenet1_1", lambda models: models.squeezenet1_1(num_classes=8)),
    _torchvision("SwinTransformer", _swin),
    _torchvision("convnext", _convnext),
)
RESNET_50 = _torchvision("ResNet-50", lambda models: models.resnet50())
