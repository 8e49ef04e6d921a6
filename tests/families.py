"""Families of CNNs that nobody here wrote, from torchvision and timm: each once, and small.

``make test`` installs both libraries beside the others, in ``zoo`` of the virtual environment: torchvision's compiled operators do not
load beside a CPU build of torch, and libraries that would find it (lightning, torchmetrics) could then not be imported.
"""

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

PLACE = Path(sys.prefix) / "zoo"
CLASSES = 3
OPERATORS = (
    "nms",
    "qnms",
    "roi_align",
    "_roi_align_backward",
    "roi_pool",
    "_roi_pool_backward",
    "ps_roi_align",
    "_ps_roi_align_backward",
    "ps_roi_pool",
    "_ps_roi_pool_backward",
    "deform_conv2d",
    "_deform_conv2d_backward",
    "interpolate_bilinear2d_aa",
)


@cache
def libraries() -> tuple[Any, Any, torch.library.Library]:
    """torchvision and timm. The names of torchvision's operators are defined first: its import asks for them, no network here does."""
    operators = torch.library.Library("torchvision", "DEF")  # names last as long as this object
    for name in OPERATORS:
        operators.define(f"{name}() -> ()")
    sys.path.append(str(PLACE))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        import timm
        import torchvision

    return torchvision, timm, operators


@dataclass(frozen=True)
class Family:
    """One network: "torchvision:NAME" or "timm:NAME", its options, and the side of its square images."""

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    size: int = 32
    slow: bool = False
    long: bool = False  # a minute or more of a core: visited by benchmarks/zoo.py, not by the tests

    def build(self) -> nn.Module:
        library, name = self.model.split(":")
        torchvision, timm, _ = libraries()
        models = (torchvision if library == "torchvision" else timm).models
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # theirs
            return getattr(models, name)(num_classes=CLASSES, **self.options)


ONE = {"layers": (1, 1, 1, 1)}
SHALLOW = {"depths": (1, 1, 1, 1)}
NARROW = {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)}
FAMILIES = {
    "AlexNet": Family("torchvision:alexnet", size=64, slow=True),
    "VGG": Family("timm:VGG", {"cfg": [8, "M", 16, "M", 16, 16, "M"], "mlp_ratio": 0.01}),
    "SqueezeNet": Family("torchvision:squeezenet1_1", size=64, slow=True),
    "GoogLeNet": Family("torchvision:googlenet", {"aux_logits": False, "init_weights": False}, slow=True),
    "ResNet": Family("torchvision:resnet18", slow=True),
    "ResNet, dilated": Family("timm:resnet18", {**ONE, "output_stride": 16}, slow=True),
    "ResNet-D": Family("timm:resnet18d", ONE),
    "ResNeXt": Family("timm:resnext50_32x4d", {**ONE, "cardinality": 8}, slow=True),
    "Wide ResNet": Family("timm:wide_resnet50_2", {**ONE, "base_width": 8}, slow=True),
    "pre-activation ResNet": Family("timm:resnetv2_18", {**ONE, "channels": (8, 16, 24, 32), "stem_chs": 8}),
    "Big Transfer": Family(
        "timm:ResNetV2", {**ONE, "channels": (128, 128, 128, 256), "stem_chs": 32, "stem_type": "fixed"}, slow=True
    ),
    "ResNet-RS": Family("timm:resnetrs50", {**ONE, "stem_width": 8, "base_width": 16}, slow=True),
    "ECA-ResNet": Family("timm:ecaresnet26t", {**ONE, "stem_width": 8, "base_width": 16}, slow=True),
    "SE-ResNet": Family("timm:legacy_seresnet18", ONE),
    "SK-ResNet": Family("timm:skresnet18", ONE),
    "Res2Net": Family("timm:res2net50_14w_8s", {**ONE, "base_width": 4}, slow=True),
    "ResNeSt": Family("timm:resnest14d", {"stem_width": 8, "base_width": 16}, slow=True),
    "TResNet": Family("timm:tresnet_m", {**ONE, "width_factor": 0.25}, 64),
    "GC-ResNet": Family("timm:gcresnet33ts", {"width_factor": 0.25}, slow=True),
    "NF-ResNet": Family("timm:nf_resnet26", {"width_factor": 0.25}),
    "NF-RegNet": Family("timm:nf_regnet_b0", {"depths": (1, 1, 1, 1)}),
    "NFNet": Family("timm:nfnet_l0", {**SHALLOW, "width_factor": 0.25, "group_size": 8}),
    "DeepMind NFNet": Family("timm:dm_nfnet_f0", {**SHALLOW, "width_factor": 0.125, "group_size": 8}),
    "RegNetX": Family("timm:regnetx_002", slow=True),
    "RegNetY": Family("torchvision:regnet_y_400mf", slow=True),
    "RegNetZ": Family("timm:regnetz_005", slow=True),
    "DenseNet": Family("timm:densenet121", {"growth_rate": 8, "block_config": (2, 2, 2, 2)}),
    "RDNet": Family("timm:rdnet_tiny", {"growth_rates": (8,) * 7, "num_blocks_list": (1,) * 7, "num_init_features": 16}),
    "DLA": Family("timm:dla46_c", slow=True),
    "DLA-X": Family("timm:dla46x_c", slow=True),
    "DPN": Family("timm:dpn48b", {"k_sec": (1, 1, 1, 1)}, slow=True),
    "VoVNet": Family("timm:ese_vovnet19b_slim_dw", slow=True),
    "DarkNet": Family("timm:darknet21", slow=True),
    "CSPNet": Family("timm:cs3darknet_focus_s", slow=True),
    "Inception v3": Family("timm:inception_v3", size=75, slow=True, long=True),
    "Xception": Family("timm:legacy_xception", slow=True, long=True),
    "NASNet": Family("timm:nasnetalarge", {"stem_size": 8, "num_features": 96}, slow=True, long=True),
    "RepVGG": Family("timm:repvgg_a0", {"width_factor": 0.25}, slow=True),
    "GENet": Family("timm:gernet_s", {"width_factor": 0.25}, slow=True),
    "HGNet": Family("timm:hgnetv2_b0", slow=True),
    "MobileNet v1": Family("timm:mobilenetv1_100", slow=True),
    "MobileNet v2": Family("timm:mobilenetv2_035", slow=True),
    "MobileNet v3": Family("timm:mobilenetv3_small_050", slow=True),
    "MobileNet v4": Family("timm:mobilenetv4_conv_small_035", slow=True),
    "MNASNet": Family("torchvision:mnasnet0_5", slow=True),
    "FBNet": Family("timm:fbnetc_100", slow=True),
    "Single-path NAS": Family("timm:spnasnet_100", slow=True),
    "HardCoRe-NAS": Family("timm:hardcorenas_a", slow=True),
    "EfficientNet-B0": Family("timm:efficientnet_b0", slow=True),
    "ReXNet": Family("timm:rexnet_100", slow=True),
    "EfficientNet of TensorFlow": Family("timm:tf_efficientnet_b0", slow=True),
    "EfficientNet v2": Family("timm:tf_efficientnetv2_b0", slow=True),
    "EfficientNet, group norm": Family("timm:efficientnet_b0_gn", slow=True),
    "EfficientNet, grouped": Family("timm:efficientnet_b0_g16_evos", slow=True),
    "TinyNet": Family("timm:tinynet_e", slow=True),
    "MixNet": Family("timm:mixnet_s", slow=True),
    "LCNet": Family("timm:lcnet_035"),
    "LCNet v2": Family("timm:lcnetv2_small", slow=True),
    "GhostNet": Family("timm:ghostnet_050", slow=True),
    "RepGhost": Family("timm:repghostnet_050", slow=True),
    "ShuffleNet v2": Family("torchvision:shufflenet_v2_x0_5", slow=True),
    "FasterNet": Family("timm:fasternet_t0", {**SHALLOW, "embed_dim": 8, "feature_dim": 32}),
    "StarNet": Family("timm:starnet_s050", slow=True),
    "ConvNeXt": Family("timm:convnext_atto", NARROW),
    "ConvNeXt, channels last": Family("timm:convnext_atto", {**NARROW, "conv_mlp": False}),
    "ConvNeXt v2": Family("timm:convnextv2_atto", NARROW),
    "InceptionNeXt": Family("timm:inception_next_atto", {**SHALLOW, "dims": (16, 32, 48, 64)}),
    "EdgeNeXt": Family("timm:edgenext_xx_small", slow=True),
    "ConvMixer": Family("timm:ConvMixer", {"dim": 12, "depth": 4, "kernel_size": 5}),
    "PoolFormer": Family("timm:MetaFormer", NARROW, slow=True),
    "FocalNet": Family("timm:FocalNet", {**SHALLOW, "embed_dim": 8}, slow=True),
    "MambaOut": Family("timm:mambaout_femto", NARROW),
    "RepViT": Family("timm:repvit_m0_9", slow=True),
    "FastViT": Family("timm:FastVit", {**ONE, "embed_dims": (8, 8, 16, 16)}, 64, slow=True),
    "MobileViT": Family("timm:mobilevit_xxs", slow=True),
}

# Visited with waves of position as well: grouped, depthwise, dilated, strided, weight-standardised, channels last, even or long kernels.
WHERE = (
    "VGG",
    "ResNet, dilated",
    "ResNet-D",
    "pre-activation ResNet",
    "SE-ResNet",
    "SK-ResNet",
    "TResNet",
    "NF-ResNet",
    "NF-RegNet",
    "NFNet",
    "DeepMind NFNet",
    "RegNetX",
    "DenseNet",
    "RDNet",
    "RepVGG",
    "MobileNet v3",
    "LCNet",
    "ShuffleNet v2",
    "GhostNet",
    "FasterNet",
    "StarNet",
    "ConvNeXt",
    "ConvNeXt, channels last",
    "ConvNeXt v2",
    "InceptionNeXt",
    "EdgeNeXt",
    "ConvMixer",
    "FocalNet",
    "MambaOut",
    "MobileViT",
)

# Not visited: they take too long for a test, or have no options that make them small.
LEFT_OUT = (
    "ConvFormer",
    "GhostNet v2",
    "HRNet",
    "Inception v4",
    "Inception-ResNet",
    "MobileOne",
    "PNASNet",
    "RegNetV",
    "SelecSLS",
)
