"""Wide residual networks as DP-SGD trains them  [Zagoruyko 2016; De 2022]."""

from __future__ import annotations

from torch import Tensor, nn

from tacit.models.normalisation import Norm, group_norm

# The stem's 16 channels are 16 groups, as published.
SIXTEEN_GROUPS = group_norm(16, least=1)


class _Block(nn.Module):
    """f(x) + s(x): f is relu, norm, 3×3 convolution, twice; s the identity or the like with 1×1."""

    def __init__(self, skip: nn.Module, *body: nn.Module) -> None:
        super().__init__()
        self.skip = skip
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.skip(x)


def wide_resnet(
    depth: int = 16,
    width: int = 4,
    num_classes: int = 10,
    channels: int = 3,
    norm: Norm | None = SIXTEEN_GROUPS,
    conv: type[nn.Conv2d] = nn.Conv2d,
) -> nn.Sequential:
    """WRN-16-4: three stages of (depth − 4)/6 blocks with 16w, 32w and 64w filters.

    The activation comes before the norm, as in [De 2022]. `conv=WeightStandardisedConv2d` is
    what they train; the ordinary convolution has a faster rule in the book-keeping engine.
    """
    if depth < 10 or (depth - 4) % 6:
        raise ValueError(f"depth is {depth}; a wide_resnet has 6·n + 4 layers: 10, 16, 22, 28, …")

    def activated(before: int, *then: nn.Module) -> list[nn.Module]:
        return [nn.ReLU(), *([] if norm is None else [norm(before)]), *then]

    layers: list[nn.Module] = [conv(channels, 16, 3, padding=1)]
    before = 16
    for stage in range(3):
        filters = 16 * width * 2**stage
        for block in range((depth - 4) // 6):
            first = block == 0
            stride = 2 if first and stage > 0 else 1
            skip = activated(before, conv(before, filters, 1, stride)) if first else []
            body = activated(before, conv(before, filters, 3, stride, padding=1))
            body += activated(filters, conv(filters, filters, 3, padding=1))
            layers.append(_Block(nn.Sequential(*skip), *body))
            before = filters
    layers += activated(before, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(before, num_classes))
