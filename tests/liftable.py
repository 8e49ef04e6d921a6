"""Plain CNNs in the styles people use, small: what ``lift`` is tried on. Each is (constructor, shape of one input)."""

import torch
import torch.nn.functional as F
from torch import nn

from architectures import ResNet


class Tutorial(nn.Module):
    """One pool for two places, convolutions without padding, three dense layers on flattened maps."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 5), nn.Conv2d(4, 8, 3)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1, self.fc2, self.fc3 = nn.Linear(8 * 2 * 2, 10), nn.Linear(10, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(torch.flatten(x, 1))))))


class Bottleneck(nn.Module):
    def __init__(self, width, inner, out, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv3, self.bn3 = nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        changes = stride != 1 or width != out
        self.downsample = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out)) if changes else None

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(y)))))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


def bottlenecks():
    """A stem of stride 2 with an overlapping max pool, then bottlenecks."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 7, 2, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        Bottleneck(8, 8, 16, 1),
        Bottleneck(16, 8, 16, 2),
        nn.AdaptiveAvgPool2d((1, 1)),
        nn.Flatten(1),
        nn.Linear(16, 3),
    )


class Excitation(nn.Module):
    """Squeeze and excitation, by dense layers or by 1x1 convolutions."""

    def __init__(self, width, convolutions):
        super().__init__()
        self.convolutions = convolutions
        make = (lambda a, b: nn.Conv2d(a, b, 1)) if convolutions else nn.Linear
        self.fc1, self.fc2 = make(width, width // 2), make(width // 2, width)

    def forward(self, x):
        if self.convolutions:
            return x * torch.sigmoid(self.fc2(F.relu(self.fc1(F.adaptive_avg_pool2d(x, 1)))))
        batch, channels = x.shape[:2]
        scale = torch.sigmoid(self.fc2(F.relu(self.fc1(x.mean((2, 3))))))
        return x * scale.view(batch, channels, 1, 1)


def excited():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.SiLU(),
        Excitation(8, convolutions=False),
        nn.Conv2d(8, 8, 3, 2, 1),
        nn.SiLU(),
        Excitation(8, convolutions=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


class Dense(nn.Module):
    """Concatenation of 8, 4 and 4 channels, a transition with average pooling, normalisation before convolutions."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm1, self.conv1 = nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, padding=1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(12), nn.Conv2d(12, 4, 3, padding=1, bias=False)
        self.norm3, self.conv3 = nn.BatchNorm2d(16), nn.Conv2d(16, 8, 1, bias=False)
        self.pool, self.head = nn.AvgPool2d(2), nn.Linear(8, 3)

    def forward(self, x):
        x = self.stem(x)
        x = torch.cat([x, self.conv1(F.relu(self.norm1(x)))], 1)
        x = torch.cat([x, self.conv2(F.relu(self.norm2(x)))], 1)
        return self.head(F.relu(self.pool(self.conv3(F.relu(self.norm3(x))))).mean((-2, -1)))


def separable():
    """Depthwise and pointwise convolutions with strides and dilation, ReLU6."""
    parts = [nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6()]
    for width, out, stride, dilation in ((8, 16, 1, 2), (16, 16, 2, 1)):
        parts += [nn.Conv2d(width, width, 3, stride, dilation, dilation, width, bias=False), nn.BatchNorm2d(width), nn.ReLU6()]
        parts += [nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU6()]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 3))


def grouped():
    """Grouped convolutions and group normalisation, circular padding, a max pool of 3x3."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, padding_mode="circular"),
        nn.GroupNorm(2, 16),
        nn.ELU(),
        nn.Conv2d(16, 16, 3, 2, 1, groups=2, padding_mode="circular"),
        nn.GroupNorm(1, 16),
        nn.ELU(),
        nn.MaxPool2d(3, 2, 1),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Linear(8, 3),
    )


def all_convolutional():
    """The last convolution has one map for each class."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(8, 3, 3, padding=1),
        nn.Softplus(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def odd():
    """Maps of 15, 8 and 4: strides on odd maps need no choice."""
    parts = [nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(8 * 4 * 4, 3))


class Standardised(nn.Conv2d):
    """Weights of mean 0 and variance 1 for each output, times a gain."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.gain = nn.Parameter(torch.ones(self.out_channels, 1, 1, 1))

    def forward(self, x):
        deviation, mean = torch.std_mean(self.weight, (1, 2, 3), keepdim=True)
        return self._conv_forward(x, self.gain * (self.weight - mean) / deviation / 6, self.bias)


class SamePadding(nn.Conv2d):
    """Pads by itself, as much as the size of the map needs: on even maps more at the right and bottom."""

    def forward(self, x):
        total = [
            max((-(-n // s) - 1) * s + k - n, 0) for n, s, k in zip(x.shape[2:], self.stride, self.kernel_size, strict=True)
        ]
        return super().forward(F.pad(x, [side for t in reversed(total) for side in (t // 2, t - t // 2)]))


class ActiveNorm(nn.BatchNorm2d):
    """Batch normalisation with dropout and an activation inside."""

    def __init__(self, width):
        super().__init__(width)
        self.drop, self.act = nn.Dropout(0.1), nn.SiLU(inplace=True)

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


class GroupedNorm(nn.GroupNorm):
    def forward(self, x):
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


class Cast(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


def subclasses():
    """Layers of one's own that compute what torch's do: standardised weights, own padding, activations inside, casts."""
    return nn.Sequential(
        Standardised(3, 8, 3, padding=1),
        ActiveNorm(8),
        SamePadding(8, 8, 3, 2),
        GroupedNorm(2, 8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        Cast(8, 3),
    )


LIFTABLE = {
    "tutorial": (Tutorial, (3, 16, 16)),
    "resnet": (ResNet, (1, 8, 8)),
    "bottlenecks": (bottlenecks, (3, 16, 16)),
    "excited": (excited, (3, 8, 8)),
    "dense": (Dense, (3, 8, 8)),
    "separable": (separable, (3, 16, 16)),
    "grouped": (grouped, (3, 16, 16)),
    "all convolutional": (all_convolutional, (3, 8, 8)),
    "odd": (odd, (3, 15, 15)),
    "subclasses": (subclasses, (3, 9, 9)),  # odd: on even maps its own padding differs by side
}


def built(name, dtype=torch.float64):
    """A network whose scales, shifts and running statistics are not those of the start, and images for it."""
    torch.manual_seed(0)
    make, shape = LIFTABLE[name]
    model = shaken(make().to(dtype))
    return model.eval(), torch.randn(4, *shape, dtype=dtype)


def shaken(model):
    """Scales, shifts, biases and running statistics that differ."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and tensor.dim() == 1:
            nn.init.uniform_(tensor, 0.5, 1.5) if name.endswith(("weight", "var")) else nn.init.normal_(tensor, std=0.3)
    return model


def noisy(model):
    """With other weights, biases and statistics: equivariance must not rest on those of the start."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data = parameter + 0.1 * torch.randn_like(parameter)
    for name, buffer in model.named_buffers():
        if name.endswith("running_var"):
            nn.init.uniform_(buffer, 0.5, 1.5)
        elif name.endswith("running_mean"):
            nn.init.normal_(buffer, std=0.3)
    return model
