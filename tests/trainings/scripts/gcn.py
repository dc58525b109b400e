"""A graph convolution over a sparse adjacency, with sparse node embeddings: SparseAdam and Adam side by side."""

import torch
import torch.nn.functional as F
from digest import report
from torch import nn

torch.manual_seed(42)
n = 24
edges = torch.randint(0, n, (2, 60))
adj = torch.sparse_coo_tensor(edges, torch.ones(60), (n, n)).coalesce()


class GraphConv(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(i, o))
        self.bias = nn.Parameter(torch.zeros(o))
        nn.init.xavier_normal_(self.kernel, gain=1.414)

    def forward(self, x):
        return torch.sparse.mm(adj, x @ self.kernel) + self.bias


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.nodes = nn.Embedding(n, 8, sparse=True)
        self.gc1, self.gc2 = GraphConv(8, 8), GraphConv(8, 3)

    def forward(self, ids):
        x = F.dropout(F.relu(self.gc1(self.nodes(ids))), 0.5, self.training)
        return F.log_softmax(self.gc2(x), dim=1)


model = GCN()
sparse = torch.optim.SparseAdam(model.nodes.parameters(), lr=0.01)
dense = torch.optim.Adam([*model.gc1.parameters(), *model.gc2.parameters()], lr=0.01, weight_decay=5e-4)
ids, labels = torch.arange(n), torch.randint(0, 3, (n,))
for epoch in range(10):
    model.train()
    sparse.zero_grad()
    dense.zero_grad()
    loss = F.nll_loss(model(ids)[:12], labels[:12])
    loss.backward()
    sparse.step()
    dense.step()
    model.eval()
    with torch.no_grad():
        print(epoch, loss.item(), F.nll_loss(model(ids)[12:], labels[12:]).item())
report(20, model)
