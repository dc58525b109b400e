"""pytorch/examples super_resolution: a sub-pixel network, orthogonal initialisation, a checkpoint each epoch."""

import torch
from digest import report
from torch import nn
from torch.nn import init


class Net(nn.Module):
    def __init__(self, upscale_factor):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(1, 8, (5, 5), (1, 1), (2, 2))
        self.conv2 = nn.Conv2d(8, upscale_factor**2, (3, 3), (1, 1), (1, 1))
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
        init.orthogonal_(self.conv1.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv2.weight)

    def forward(self, x):
        return self.pixel_shuffle(self.conv2(self.relu(self.conv1(x))))


torch.manual_seed(123)
model, criterion = Net(2), nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(1, 3):
    epoch_loss = 0
    for _ in range(5):
        target = torch.rand(2, 1, 8, 8)
        optimizer.zero_grad()
        loss = criterion(model(nn.functional.avg_pool2d(target, 2)), target)
        epoch_loss += loss.item()
        loss.backward()
        optimizer.step()
    print(f"===> Epoch {epoch} Complete: Avg. Loss: {epoch_loss / 5:.4f}")
    torch.save(model, f"model_epoch_{epoch}.pth")
model = torch.load("model_epoch_2.pth", weights_only=False)
report(10, model)
