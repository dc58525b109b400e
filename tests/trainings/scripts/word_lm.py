"""pytorch/examples word_language_model: an LSTM, hidden state carried on, a clip, and SGD by hand; saved whole."""

import torch
from digest import report
from torch import nn


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid):
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, 2, dropout=0.2)
        self.decoder = nn.Linear(nhid, ntoken)

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        return nn.functional.log_softmax(self.decoder(self.drop(output)).view(-1, 20), dim=1), hidden


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


torch.manual_seed(1111)
model, criterion, lr = RNNModel(20, 8, 12), nn.NLLLoss(), 5.0
data = torch.randint(0, 20, (61, 4))
model.train()
hidden = (torch.zeros(2, 4, 12), torch.zeros(2, 4, 12))
for epoch in range(2):
    for i in range(0, 60, 5):
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data[i : i + 5], hidden)
        loss = criterion(output, data[i + 1 : i + 6].view(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
    print("epoch", epoch, "loss", loss.item())
    with open("model.pt", "wb") as f:
        torch.save(model, f)
with open("model.pt", "rb") as f:
    model = torch.load(f, weights_only=False)
    model.rnn.flatten_parameters()
report(24, model)
