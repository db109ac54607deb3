"""The networks of the paper and a few more, written plainly; `make` knows them by name.

Initialisations. "xavier": normal with variance 2 / (fan in + fan out), as in the code published with the paper, for
LeNet and WideResNets alike. "he": normal with variance 2 / fan out for convolutions, as Zagoruyko & Komodakis have it
for theirs, and 1 / fan in for the last layer. Biases start at 0, normalisation layers at 1 and 0.
"""

import itertools
import re
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longhorizon.hypers import nearest


class MLP(nn.Module):
    """Fully connected layers with a nonlinearity between; images are flattened. Initialised as torch does.

    Args:
        inputs: values in one example.
        hidden: widths of the hidden layers.
        classes: outputs.
        activation: the nonlinearity.
    """

    def __init__(
        self, inputs: int, hidden: tuple[int, ...], classes: int, activation: Callable[[Tensor], Tensor] = torch.relu
    ):
        super().__init__()
        widths = (inputs, *hidden, classes)
        if min(widths) < 1:
            raise ValueError(
                f"MLP(inputs={inputs}, hidden={hidden}, classes={classes}): expected widths of at least 1."
            )
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        y: Tensor = self.layers[-1](x)
        return y


class LeNet(nn.Module):
    """LeNet-5 with ReLU and max-pooling: convolutions of 6 and 16 channels, 5 × 5 and unpadded, then 120, 84, classes.

    Images of 28 pixels are not padded to 32, as in the code published with the paper: 44,426 parameters for MNIST,
    62,006 for SVHN.

    Args:
        classes: outputs.
        channels: of the images.
        size: height and width of the images, at least 16.
        init: "xavier" (the published code) or "he".
    """

    def __init__(self, classes: int = 10, channels: int = 1, size: int = 28, init: str = "xavier"):
        super().__init__()
        if size < 16:
            raise ValueError(f"LeNet(size={size}): nothing is left of images below 16 pixels; use an MLP.")
        side = ((size - 4) // 2 - 4) // 2
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * side * side, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)
        initialise(self, init)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = F.max_pool2d(torch.relu(self.conv2(x)), 2)
        x = torch.relu(self.fc1(x.flatten(1)))
        x = torch.relu(self.fc2(x))
        y: Tensor = self.fc3(x)
        return y


class WideBlock(nn.Module):
    """BatchNorm, ReLU, convolution, twice, beside a shortcut.

    Where the shape changes, the shortcut is a 1 × 1 convolution of the activated input.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float):
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.dropout = dropout
        same = inputs == outputs and stride == 1
        self.shortcut = None if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = torch.relu(self.norm1(x))
        y = torch.relu(self.norm2(self.conv1(active)))
        if self.dropout:
            y = F.dropout(y, self.dropout, self.training)
        beside = x if self.shortcut is None else self.shortcut(active)
        z: Tensor = beside + self.conv2(y)
        return z


class WideResNet(nn.Module):
    """WRN-depth-width for small images. Zagoruyko & Komodakis, "Wide Residual Networks", BMVC 2016.

    WRN-16-1 has 175,066 parameters for CIFAR-10.

    Args:
        depth: 6 n + 4, with n blocks in each of three groups.
        width: multiplies the 16, 32 and 64 channels of the groups.
        classes: outputs.
        channels: of the images, which may have any size from 4 pixels on.
        dropout: between the convolutions of a block.
        init: "he" (the architecture's own) or "xavier" (the code published with the paper).
    """

    def __init__(
        self,
        depth: int = 16,
        width: int = 1,
        classes: int = 10,
        channels: int = 3,
        dropout: float = 0.0,
        init: str = "he",
    ):
        super().__init__()
        blocks, rest = divmod(depth - 4, 6)
        if blocks < 1 or rest or width < 1:
            raise ValueError(
                f"WideResNet(depth={depth}, width={width}): expected a depth of 6 n + 4 (10, 16, 22, 28, …) and a "
                "width of at least 1."
            )
        self.conv = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        inputs, groups = 16, []
        for outputs, stride in ((16 * width, 1), (32 * width, 2), (64 * width, 2)):
            first = WideBlock(inputs, outputs, stride, dropout)
            groups.append(nn.Sequential(first, *(WideBlock(outputs, outputs, 1, dropout) for _ in range(blocks - 1))))
            inputs = outputs
        self.groups = nn.Sequential(*groups)
        self.norm = nn.BatchNorm2d(inputs)
        self.fc = nn.Linear(inputs, classes)
        initialise(self, init)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.groups(self.conv(x))))
        y: Tensor = self.fc(x.mean((2, 3)))
        return y


class ResidualBlock(nn.Module):
    """Convolution, BatchNorm, ReLU, convolution, BatchNorm, beside a shortcut, then ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        same = inputs == outputs and stride == 1
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 for small images: it begins with one 3 × 3 convolution and no pooling.

    He et al., "Deep Residual Learning for Image Recognition", CVPR 2016. 11,173,962 parameters for CIFAR-10.

    Args:
        classes: outputs.
        channels: of the images, which may have any size from 8 pixels on.
        width: channels of the first of four groups; 64 is the usual one.
        init: "he" (the architecture's own) or "xavier".
    """

    def __init__(self, classes: int = 10, channels: int = 3, width: int = 64, init: str = "he"):
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        inputs, groups = width, []
        for outputs, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
            groups += [ResidualBlock(inputs, outputs, stride), ResidualBlock(outputs, outputs, 1)]
            inputs = outputs
        self.groups = nn.Sequential(*groups)
        self.fc = nn.Linear(inputs, classes)
        initialise(self, init)

    def forward(self, x: Tensor) -> Tensor:
        x = self.groups(torch.relu(self.norm(self.conv(x))))
        y: Tensor = self.fc(x.mean((2, 3)))
        return y


class GPTBlock(nn.Module):
    """Causal self-attention and a two-layer network, each after a LayerNorm and beside a shortcut."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.project1 = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.project2 = nn.Linear(4 * width, width)
        self.heads, self.dropout = heads, dropout

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._drop(self.project1(self._attention(self.norm1(x))))
        return x + self._drop(self.project2(F.gelu(self.expand(self.norm2(x)))))

    def _attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.attend(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return y.transpose(1, 2).reshape(batch, length, width)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class GPT(nn.Module):
    """A small causal transformer for text, with learned positions: token numbers in, logits of the next token out.

    Initialised as GPT-2: normal with standard deviation 0.02, divided by √(2 · layers) where a block writes into the
    shortcut; biases 0.

    Args:
        vocabulary: how many tokens there are.
        context: the longest text, in tokens.
        layers: blocks.
        width: of the shortcut; `heads` must divide it.
        heads: of the attention.
        dropout: after each part of a block, and in the attention.
        tied: let the output layer share the weights of the token embedding.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        dropout: float = 0.0,
        tied: bool = True,
    ):
        super().__init__()
        if min(layers, width, heads) < 1:
            raise ValueError(f"GPT(layers={layers}, width={width}, heads={heads}): expected at least 1 of each.")
        if width % heads:
            raise ValueError(f"GPT(width={width}, heads={heads}): the width must be a multiple of the heads.")
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(GPTBlock(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.out = None if tied else nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                writes = "project" in name
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if writes else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        length, context = tokens.shape[1], self.positions.num_embeddings
        if length > context:
            raise ValueError(f"a text of {length} tokens is longer than the model's context={context}.")
        x = self.tokens(tokens) + self.positions.weight[:length]
        x = self.norm(self.blocks(x))
        return F.linear(x, self.tokens.weight if self.out is None else self.out.weight)


def initialise(model: nn.Module, init: str) -> None:
    """Draw the weights of convolutions and linear layers anew, in place; see the top of this file.

    Raises:
        ValueError: if `init` is neither "he" nor "xavier".
    """
    if init not in ("he", "xavier"):
        raise ValueError(f"init={init!r}: expected 'he' or 'xavier'.")
    for part in model.modules():
        if not isinstance(part, nn.Conv2d | nn.Linear):
            continue
        if init == "xavier":
            nn.init.xavier_normal_(part.weight)
        elif isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
        else:
            nn.init.kaiming_normal_(part.weight, nonlinearity="linear")
        if part.bias is not None:
            nn.init.zeros_(part.bias)


class Shape(NamedTuple):
    """What a network must fit."""

    classes: int
    channels: int
    size: int


def _lenet(numbers: list[int], shape: Shape, init: str | None) -> nn.Module:
    return LeNet(*shape, init=init or "xavier")


def _wide(numbers: list[int], shape: Shape, init: str | None) -> nn.Module:
    depth, width = numbers
    return WideResNet(depth, width, shape.classes, shape.channels, init=init or "he")


def _resnet18(numbers: list[int], shape: Shape, init: str | None) -> nn.Module:
    return ResNet18(shape.classes, shape.channels, init=init or "he")


def _mlp(numbers: list[int], shape: Shape, init: str | None) -> nn.Module:
    model = MLP(shape.channels * shape.size**2, tuple(numbers), shape.classes)
    if init is not None:
        initialise(model, init)
    return model


def _gpt(numbers: list[int], shape: Shape, init: str | None) -> nn.Module:
    if init is not None:
        raise ValueError(f"init={init!r}: a GPT has only its own initialisation; leave it out.")
    layers, width = numbers
    return GPT(shape.classes, shape.size, layers, width, heads=max(1, width // 32))


_KNOWN: dict[str, tuple[str, Callable[[list[int], Shape, str | None], nn.Module]]] = {
    "lenet": (r"lenet", _lenet),
    "wrn-DEPTH-WIDTH": (r"wrn-(\d+)-(\d+)", _wide),
    "resnet-18": (r"resnet-?18", _resnet18),
    "mlp-WIDTH-…": (r"mlp(?:-\d+)+", _mlp),
    "gpt-LAYERS-WIDTH": (r"gpt-(\d+)-(\d+)", _gpt),
}

NAMES = tuple(_KNOWN)


def make(name: str, *, classes: int = 10, channels: int = 3, size: int = 32, init: str | None = None) -> nn.Module:
    """A network by its name: lenet, wrn-16-1, resnet-18, mlp-64-64 or gpt-4-128.

    Args:
        name: the numbers are depth and width of a WideResNet, hidden widths of an MLP, layers and width of a GPT
            (whose heads are 32 wide).
        classes: outputs; the vocabulary of a GPT.
        channels: of the images.
        size: height and width of the images; the context of a GPT, in tokens.
        init: "he" or "xavier"; without it the network's own.

    Raises:
        ValueError: if the name is unknown or a number does not fit.

    >>> sum(p.numel() for p in make("wrn-16-1").parameters())
    175066
    """
    for pattern, build in _KNOWN.values():
        if re.fullmatch(pattern, name.lower()):
            return build([int(n) for n in re.findall(r"-(\d+)", name)], Shape(classes, channels, size), init)
    family = name.lower().partition("-")[0]
    forms = [
        form for form in NAMES if form.partition("-")[0] == family and form != form.lower()
    ]  # the numbers are missing
    hint = f" Its form is {forms[0]!r}." if forms else nearest(name.lower(), NAMES)
    raise ValueError(f"unknown model {name!r}.{hint} For instance wrn-16-1 or mlp-64-64.")
