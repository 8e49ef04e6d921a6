"""What relax refuses, and that it says what to do."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import autosym
from architectures import LeNet, Reused, built, labels


def refused(message, model, x, **options):
    with pytest.raises(ValueError, match=message):
        autosym.relax(model, x, **options)


def test_a_reused_layer_is_refused_or_kept_frozen():
    model, x = Reused(), torch.randn(2, 1, 6, 6)
    refused("again .Conv2d. is used 2 times", model, x)
    relaxed = autosym.relax(model, x, keep=["again"])
    assert relaxed.relaxation.names("frozen") == ("again",)
    autosym.fit(relaxed, (torch.randn(8, 1, 6, 6), labels()), epochs=1)


def test_train_mode_says_how_to_proceed():
    model, x = built("resnet")
    refused(r"BatchNorm2d.*model\.eval\(\)", model.train(), x)
    model, x = built("vgg")
    refused(r"Dropout.*model\.eval\(\)", model.train(), x)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")  # made to be refused
def test_parametrised_tied_lazy_half_and_quantised_models():
    model, x = built("lenet")
    parametrizations.weight_norm(model.conv1)
    refused("conv1 .* is parametrised .*remove_parametrizations", model, x)
    model, x = built("lenet")
    parametrizations.spectral_norm(model.fc1)
    refused("fc1 .* is parametrised", model, x)
    model, x = built("lenet")
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(model.conv2)
    refused("conv2 .Conv2d. is parametrised", model, x)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    refused("1.weight and 0.weight are the same parameter", model, torch.randn(2, 4))
    refused("1 .LazyLinear. has no weights yet", nn.Sequential(nn.Flatten(), nn.LazyLinear(2)), torch.randn(2, 4))
    model, x = built("lenet")
    refused("conv1.weight is torch.bfloat16.*float", model.bfloat16(), x)
    model = nn.Sequential(nn.Linear(2, 2), torch.ao.nn.quantized.Linear(2, 2))
    refused("1 .Linear. is quantised", model, torch.randn(2, 2))


def test_one_sample_in_place_of_a_batch_says_how_to_make_one():
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(72, 3))
    refused(r"inputs are \(1, 6, 6\), but 0 .Conv2d.*expects \(B, 1, H, W\): this is one sample", model, torch.randn(1, 6, 6))
    refused(r"inputs are \(6, 6\).*use x\[None, None\] for one map", model, torch.randn(6, 6))
    refused("give inputs with 1 channels, or a model that takes 3", model, torch.randn(2, 3, 6, 6))
    refused("this is one sample", nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()), torch.randn(1, 6, 6))
    refused("this is one sample", nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(0)), torch.randn(1, 6, 6))
    message = r"does not take the example, \({}\): give a small batch \(B, ...\) of its inputs, or one sample as sample\[None\]"
    refused(message.format("2, 5"), nn.Linear(4, 3), torch.randn(2, 5))


def test_outputs_examples_and_models_that_do_not_suit():
    refused("must return .B, outputs.", nn.Conv2d(1, 2, 3), torch.randn(2, 1, 6, 6))
    refused("one tensor of floating point", LeNet(), torch.zeros(2, 1, 16, 16, dtype=torch.uint8))
    refused("example is empty", LeNet(), torch.zeros(0, 1, 16, 16))
    refused("one tensor of floating point", nn.Linear(4, 2), torch.zeros(4))
    refused("is example one sample instead of a batch", nn.Sequential(nn.Linear(4, 2), nn.Flatten(0)), torch.randn(3, 4))
    with pytest.raises(TypeError, match="the model is a int"):
        autosym.relax(3, torch.zeros(2, 3))
    with pytest.raises(TypeError, match="paths is None: name the free path"):
        autosym.relax(LeNet(), torch.zeros(2, 1, 16, 16), paths=None)
    refused("not finite", LeNet(), torch.full((2, 1, 16, 16), math.nan))
    refused("no parameters", nn.Flatten(), torch.randn(2, 3))
    refused("no layer is left to fit", nn.Sequential(nn.LayerNorm(4)), torch.randn(2, 4))
    model, x = built("lenet")
    refused("relax the plain model", autosym.relax(model, x), x)


def test_forward_that_reads_a_layer():
    class Reading(LeNet):
        def forward(self, x):
            return super().forward(x.to(self.conv1.weight.dtype))

    record = autosym.relax(Reading(), torch.randn(2, 1, 16, 16)).relaxation
    assert record.names("kept") == ("conv1", "fc2")
    assert record.layers[0].note == "forward() reads its weight, which a relaxed layer does not have"
    message = "conv1 .Conv2d. cannot be relaxed: forward.. reads its weight.*leave it out of paths"
    refused(message, Reading(), torch.randn(2, 1, 16, 16), paths={"conv1": "f-fc"})


def test_forward_that_depends_on_the_kind_of_a_layer():
    class Asking(LeNet):
        def forward(self, x):
            if not isinstance(self.conv1, nn.Conv2d):
                raise TypeError("what is this?")
            return super().forward(x)

    refused("cannot run .TypeError.*keep", Asking(), torch.randn(2, 1, 16, 16))
    assert autosym.relax(Asking(), torch.randn(2, 1, 16, 16), keep="conv1").relaxation.names("kept") == ("conv1", "fc2")


def test_forward_that_calls_a_layer_by_a_name_that_is_not_seen():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = nn.Conv2d(1, 4, 3), nn.Linear(4, 2)
            self.order = [self.conv]

        def forward(self, x):
            return self.out(self.order[0](x).mean((2, 3)))

    refused("conv was relaxed, but forward.. does not call it", Hidden(), torch.randn(2, 1, 6, 6))


def test_a_weight_that_is_used_outside_of_its_layer():
    class Twice(LeNet):
        def forward(self, x):
            return super().forward(x) + F.linear(torch.ones(len(x), 12), self.fc2.weight)

    refused("gradient of fc2.weight is not what", Twice(), torch.randn(2, 1, 16, 16))
