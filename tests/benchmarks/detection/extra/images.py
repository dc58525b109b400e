"""Trainings on images: group normalisation, a coordinate network, boxes to find, angular margins. N rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, NAdam, RAdam

from tests.benchmarks.detection.data import digits, draw_digits
from tests.benchmarks.detection.models import mlp
from tests.benchmarks.detection.schedules import stepped, warm_restarts
from tests.benchmarks.detection.training import Batch, Training, single


def _stage(before: int, after: int, stride: int) -> nn.Sequential:
    """A convolution, group normalisation, SiLU."""
    convolution = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
    return nn.Sequential(convolution, nn.GroupNorm(4, after), nn.SiLU())


def groupnorm_nesterov(seed: int) -> Training:
    """A CNN with group normalisation: SGD with Nesterov momentum, weight decay, smoothed labels, a stepped rate."""
    random = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        *(_stage(1, 16, 1), _stage(16, 16, 2), _stage(16, 32, 2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )

    def loss(batch: Batch) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)

    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    training = single(model, optimizer, loss, lambda step: draw_digits(random, 32))
    training.rate = stepped(350, 0.1)
    return training


class Sine(nn.Module):
    """A linear layer under a sine of high frequency, as in SIREN."""

    def __init__(self, before: int, after: int, first: bool = False) -> None:
        super().__init__()
        self.linear, self.frequency = nn.Linear(before, after), 12.0
        bound = 1 / before if first else (6 / before) ** 0.5 / self.frequency
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.frequency * self.linear(x))


def coordinate_network(seed: int) -> Training:
    """One image by its coordinates, all pixels at each step: the fit goes on getting better."""
    images, _ = digits()
    target = functional.interpolate(images[seed : seed + 1], size=24, mode="bilinear")[0, 0].flatten()
    line = torch.linspace(-1, 1, 24)
    places = torch.cartesian_prod(line, line)
    model = nn.Sequential(Sine(2, 48, first=True), Sine(48, 48), nn.Linear(48, 1))

    def loss(batch: Batch) -> Tensor:
        return functional.mse_loss(model(batch[0]).squeeze(1), batch[1])

    return single(model, Adam(model.parameters(), lr=5e-4), loss, lambda step: (places, target))


class Detector(nn.Module):
    """Is there something at each of 4 x 4 places, and where in it."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(_stage(1, 12, 2), _stage(12, 24, 2), _stage(24, 24, 2))
        self.objects, self.boxes = nn.Conv2d(24, 1, 1), nn.Conv2d(24, 4, 1)
        nn.init.constant_(self.objects.bias, -3.0)  # type: ignore[arg-type]  # as for a focal loss: nothing is there

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.trunk(x)
        return self.objects(features).squeeze(1), self.boxes(features)


def box_regression(seed: int) -> Training:
    """A digit somewhere in an empty picture, or none: focal loss on where it is, and its box."""
    random = torch.Generator().manual_seed(seed)
    model = Detector()

    def batch(step: int) -> Batch:
        found, _ = draw_digits(random, 12)
        canvas, objects = 0.3 * torch.randn(12, 1, 32, 32, generator=random), torch.zeros(12, 4, 4)
        boxes = torch.zeros(12, 4, 4, 4)
        for row, (y, x) in enumerate(torch.randint(24, (12, 2), generator=random).tolist()):
            if row % 3:
                canvas[row, :, y : y + 8, x : x + 8] += found[row]
                cell = (row, (y + 4) // 8, (x + 4) // 8)
                objects[cell] = 1.0
                place = ((y + 4) % 8 / 8, (x + 4) % 8 / 8, 1.0, 1.0)
                boxes[cell[0], :, cell[1], cell[2]] = torch.tensor(place)
        return canvas, objects, boxes

    def loss(batch: Batch) -> Tensor:
        canvas, objects, boxes = batch
        scores, places = model(canvas)
        wrong = functional.binary_cross_entropy_with_logits(scores, objects, reduction="none")
        focal = ((1 - torch.exp(-wrong)) ** 2 * wrong).sum() / objects.sum()
        apart = functional.smooth_l1_loss(places, boxes, reduction="none").sum(1)
        return focal + (apart * objects).sum() / objects.sum()

    return single(model, RAdam(model.parameters(), lr=3e-3), loss, batch)


def angular_margin(seed: int) -> Training:
    """ArcFace on digits: cosines times 30, a margin of angles, NAdam with warm restarts."""
    random = torch.Generator().manual_seed(seed)
    trunk = mlp(64, 64, 32, activation=nn.PReLU)
    centres = nn.Linear(32, 10, bias=False)
    model = nn.ModuleDict({"trunk": trunk, "centres": centres})

    def loss(batch: Batch) -> Tensor:
        images, classes = batch
        features = functional.normalize(trunk(images.flatten(1)))
        cosines = functional.linear(features, functional.normalize(centres.weight)).clamp(-1 + 1e-5, 1 - 1e-5)
        margin = 0.2 * functional.one_hot(classes, 10)
        return functional.cross_entropy(30 * torch.cos(cosines.acos() + margin), classes)

    optimizer = NAdam(model.parameters(), lr=2e-3)
    training = single(model, optimizer, loss, lambda step: draw_digits(random, 48))
    training.rate = warm_restarts(250)
    return training
