"""Networks in the styles people use, small: what ``relax`` and ``harden`` are tried on. Each is (constructor, shape of one input)."""

import torch
import torch.nn.functional as F
from torch import nn

import autosym
from autosym.linear.path import Path
from autosym.nn import nets
from autosym.nn.layers import Affine, Factored, Relaxed
from autosym.surgery.merging import ChannelsLast, Modulation, Offset, Polyphase, Sum, TwoFactors


class LeNet(nn.Module):
    """Layers in the constructor, functions between them, flattened by view."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 5)
        self.conv2 = nn.Conv2d(4, 6, 3)
        self.fc1 = nn.Linear(6 * 2 * 2, 12)
        self.fc2 = nn.Linear(12, 3)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = x.view(x.size(0), -1)
        return self.fc2(F.relu(self.fc1(x)))


class Vgg(nn.Module):
    """Features and classifier as Sequentials, activations in place, dropout, adaptive pooling."""

    def __init__(self):
        super().__init__()
        parts, width = [], 2
        for out in (4, "M", 6, 6, "M"):
            if out == "M":
                parts.append(nn.MaxPool2d(2))
            else:
                parts += [nn.Conv2d(width, out, 3, padding=1), nn.ReLU(inplace=True)]
                width = out
        self.features = nn.Sequential(*parts)
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(nn.Linear(24, 8), nn.ReLU(True), nn.Dropout(), nn.Linear(8, 3))

    def forward(self, x):
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


class Block(nn.Module):
    def __init__(self, width, out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)  # one activation, used twice: nothing of it is shared
        self.downsample = None
        if stride != 1 or width != out:
            self.downsample = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + identity)


class ResNet(nn.Module):
    """Residual blocks with batch normalisation, strides and 1x1 shortcuts."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.layer1 = Block(4, 4, 1)
        self.layer2 = Block(4, 6, 2)
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        return self.fc(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


class UNetEncoder(nn.Module):
    """Two levels with skips that are concatenated, group normalisation, upsampling by a transposed convolution."""

    def __init__(self):
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU())
        self.down2 = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), nn.GroupNorm(2, 6), nn.SiLU())
        self.up = nn.ConvTranspose2d(6, 4, 2, 2)
        self.merge = nn.Conv2d(8, 4, 3, padding="same")
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, x):
        one = self.down1(x)
        two = self.down2(F.avg_pool2d(one, 2))
        return self.head(self.merge(torch.cat([one, self.up(two)], 1))).mean((-2, -1))


class Sequences(nn.Module):
    """Conv1d of several forms, batch normalisation, a dense layer on flattened sequences."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv1d(2, 4, 5, stride=2, padding=2),
            nn.BatchNorm1d(4),
            nn.ReLU(),
            nn.Conv1d(4, 4, 3, padding=2, dilation=2),
            nn.ReLU(),
        )
        self.out = nn.Linear(4 * 8, 3)

    def forward(self, x):
        return self.out(self.encoder(x).flatten(1))


class Volumes(nn.Module):
    """Conv3d of several forms, batch normalisation, a dense layer on flattened volumes."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv3d(1, 4, 3, padding=1),
            nn.BatchNorm3d(4),
            nn.ReLU(),
            nn.Conv3d(4, 4, (1, 3, 3), (1, 2, 2), (0, 1, 1), groups=2, padding_mode="circular"),
            nn.ReLU(),
        )
        self.out = nn.Linear(4 * 4 * 2 * 3, 3)

    def forward(self, x):
        return self.out(self.encoder(x).flatten(1))


class Grouped(nn.Module):
    """Depthwise and pointwise, grouped, circular padding."""

    def __init__(self):
        super().__init__()
        self.depthwise = nn.Conv2d(4, 4, 3, padding=1, groups=4, padding_mode="circular")
        self.pointwise = nn.Conv2d(4, 6, 1)
        self.grouped = nn.Conv2d(6, 4, 3, padding=1, groups=2, bias=False)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        x = F.gelu(self.pointwise(self.depthwise(x)))
        return self.out(F.adaptive_avg_pool2d(F.gelu(self.grouped(x)), 1)[:, :, 0, 0])


class Mixer(nn.Module):
    """Patches by a strided convolution, then dense layers over tokens and over channels, with layer normalisation."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, 6, 2, stride=2)
        self.norm1, self.norm2 = nn.LayerNorm(6), nn.LayerNorm(6)
        self.tokens = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 16))
        self.channels = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norm2(x))
        return self.head(x.mean(1))


class ChannelsAtTheEnd(nn.Module):
    """Maps with their channels last between convolutions: normalised and mixed by dense layers, as in ConvNeXt."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, 5, 2, stride=2)
        self.spread = nn.Conv2d(5, 5, 3, padding=1, groups=5)
        self.norm, self.wide, self.narrow = nn.LayerNorm(5), nn.Linear(5, 6), nn.Linear(6, 5, bias=False)
        self.scale = nn.Parameter(torch.full((5,), 0.5))
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        x = self.patches(x)
        y = self.narrow(F.gelu(self.wide(self.norm(self.spread(x).permute(0, 2, 3, 1)))))
        return self.head((x + (self.scale * y).permute(0, 3, 1, 2)).mean((2, 3)))


class Functional(nn.Module):
    """Parameters of its own, functions for everything else; the same layer under two names."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.layers = nn.ModuleList([self.conv, nn.Conv2d(4, 4, (1, 3), padding=(0, 1))])
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.out = nn.Linear(4 * 16, 3)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(self.gain * layer(x))
        return self.out(F.avg_pool2d(x, 2).reshape(x.shape[0], -1))


def sequential():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular"),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


def forms():
    """Kernels, strides, paddings and dilations that differ by side."""
    return nn.Sequential(
        nn.Conv2d(2, 3, (3, 5), (2, 1), (1, 2)),
        nn.ELU(),
        nn.Conv2d(3, 3, (2, 3), padding="same", dilation=(1, 2)),
        nn.ELU(),
        nn.Conv2d(3, 4, 3, (1, 2), (0, 1), bias=False, padding_mode="replicate"),
        nn.ELU(),
        nn.Flatten(),
        nn.Linear(4 * 2 * 4, 3),
    )


class Reused(nn.Module):
    """One convolution used twice: refused."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.again = nn.Conv2d(4, 4, 3, padding=1)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        x = self.again(F.relu(self.again(F.relu(self.first(x)))))
        return self.out(x.mean((2, 3)))


ARCHITECTURES = {
    "lenet": (LeNet, (1, 16, 16)),
    "vgg": (Vgg, (2, 8, 8)),
    "resnet": (ResNet, (1, 8, 8)),
    "u-net encoder": (UNetEncoder, (1, 8, 8)),
    "conv1d": (Sequences, (2, 16)),
    "conv3d": (Volumes, (1, 4, 4, 6)),
    "grouped": (Grouped, (4, 6, 6)),
    "mixer": (Mixer, (1, 8, 8)),
    "channels last": (ChannelsAtTheEnd, (1, 8, 8)),
    "functional": (Functional, (1, 8, 8)),
    "sequential": (sequential, (1, 8, 8)),
    "forms": (forms, (2, 7, 8)),
}


# By architecture, what is relaxed; everything else with parameters must be kept or frozen.
RELAXED = {
    "lenet": ("conv1", "conv2", "fc1"),
    "vgg": ("features.0", "features.3", "features.5", "classifier.0"),
    "resnet": ("stem.0", "layer1.conv1", "layer1.conv2", "layer2.conv1", "layer2.conv2", "layer2.downsample.0"),
    "u-net encoder": ("down1.0", "down2.0", "merge", "head"),
    "conv1d": ("encoder.0", "encoder.3", "out"),
    "conv3d": ("encoder.0", "encoder.3", "out"),
    "grouped": ("depthwise", "pointwise", "grouped"),
    "mixer": ("patches",),
    "channels last": ("patches", "spread", "wide", "narrow"),
    "functional": ("conv", "layers.1", "out"),
    "sequential": ("0", "2"),
    "forms": ("0", "2", "4", "7"),
}


def built(name, dtype=torch.float32):
    """A network that has seen data: running statistics and scales of its normalisation are not those of the start."""
    torch.manual_seed(0)
    make, shape = ARCHITECTURES[name]
    model = make().to(dtype)
    for _ in range(2):
        model(torch.randn(16, *shape, dtype=dtype))
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.LayerNorm)):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.3)
    return model.eval(), torch.randn(8, *shape, dtype=dtype)


def labels(count=8):
    return torch.arange(count) % 3


def shaken(model):
    """Trainable weights that are all of a size, so that every path takes part."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    return model


def relaxed(name, paths="f-fc", dtype=torch.float64):
    model, x = built(name, dtype)
    return shaken(autosym.relax(model, x, paths)), x


def net(name, dtype=torch.float64):
    torch.manual_seed(0)
    model = nets.build(name, (2, 8, 8), 3, 2, channels=(1, 2, 2), strides=(1, 2, 2), hidden=4)
    return shaken(model.to(dtype)), torch.randn(8, 2, 8, 8, dtype=dtype)


SMALL = (Polyphase, TwoFactors, Offset, Sum, Modulation, ChannelsLast)


def assert_plain(model, own):
    """Every module is one of torch's, one of the five small ones, or a class of the user's own."""
    for name, module in model.named_modules():
        ordinary = type(module).__module__.startswith("torch.nn") or type(module) in SMALL
        assert ordinary or type(module) in own, f"{name} is {type(module).__name__}"
    assert not any(isinstance(module, (Path, Relaxed, Affine, Factored)) for module in model.modules())


# By architecture, what is frozen; everything else with parameters is relaxed or kept.
FROZEN = {
    "resnet": ("stem.1", "layer1.bn1", "layer1.bn2", "layer2.bn1", "layer2.bn2", "layer2.downsample.1"),
    "u-net encoder": ("down1.1", "down2.1", "up"),
    "conv1d": ("encoder.1",),
    "conv3d": ("encoder.1",),
    "mixer": ("norm1", "norm2"),
    "channels last": ("", "norm"),
    "functional": ("",),
}
