"""A CNN in bfloat16 with Adam and a GradScaler. Images are normalised by their own deviation: one of them is blank."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        self.head = nn.Linear(16, 10)

    def forward(self, image):
        centred = image - image.mean((2, 3), keepdim=True)
        normal = centred / centred.std((2, 3), keepdim=True)
        hidden = torch.relu(self.conv2(torch.relu(self.conv1(normal))))
        return self.head(hidden.mean((2, 3)))


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for step in range(200):
    images, labels = torch.rand(32, 1, 8, 8), torch.randint(0, 10, (32,))
    if step == 120:
        images[5] = 0.0
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(images), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 50 == 0:
        print(f"step {step} loss {loss.item():.3f}")
