"""pytorch/examples siamese_network: one encoder run twice a step, BCE on what they make together."""

import torch
from digest import report
from torch import nn


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten())
        self.fc = nn.Sequential(nn.Linear(72, 16), nn.ReLU(inplace=True), nn.Linear(16, 1))
        self.encoder.apply(self.init_weights)

    def init_weights(self, m):
        if isinstance(m, nn.Conv2d):
            nn.init.xavier_uniform_(m.weight)
            m.bias.data.fill_(0.01)

    def forward(self, a, b):
        return torch.sigmoid(self.fc(torch.cat((self.encoder(a), self.encoder(b)), 1)))


torch.manual_seed(0)
model = Siamese()
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
for batch in range(10):
    a, b = torch.rand(6, 1, 8, 8), torch.rand(6, 1, 8, 8)
    optimizer.zero_grad()
    loss = nn.BCELoss()(model(a, b).squeeze(), (torch.arange(6) % 2).float())
    loss.backward()
    optimizer.step()
    print(batch, loss.item())
report(10, model)
