"""A GPT that is trained under several KV plans at once."""
import torch
from torch import nn
from torch.func import functional_call

from common.errors import UserError
from kv.weights import shapes
from model import GPT
from training.checkpoint.convert import converted
from training.elastic.plans import Plan


class Elastic(nn.Module):
    """A base GPT and its smaller plans, whose weights are functions of the base's (`converted`).

    In training each plan computes the loss of its own part of the batch, all parts together once.
    In evaluation it is the base. Raises UserError for a batch of fewer sequences than plans.
    (Slimmable networks, Yu and Huang 2019, nest widths in this way.)

    plans: the base's first. Their models, `models`, have no weights of their own.
    """

    def __init__(self, base: GPT, plans: list[Plan]):
        super().__init__()
        self.base, self.plans = base, plans
        with torch.device('meta'):
            others = [GPT(plan.config) for plan in plans[1:]]
        self.models = (base, *others)  # a tuple: they are no submodules
        self.names = [shapes(model.config, model.plan).keys() for model in self.models]

    def train(self, mode: bool = True):
        for model in self.models:
            model.train(mode)
        return super().train(mode)

    def under(self, i: int, idx, targets=None):
        """Logits and loss of plan i, as the base's `forward` returns them."""
        if i == 0:
            return self.base(idx, targets)
        weights = converted(dict(self.base.named_parameters()), self.base.plan,
                            self.models[i].plan, self.names[i])
        return functional_call(self.models[i], weights, (idx, targets))

    def forward(self, idx, targets):
        if not self.training:
            return self.base(idx, targets)
        if len(idx) < len(self.plans):
            raise UserError(f'batch_size={len(idx)} is less than the {len(self.plans)} plans, '
                            'which take a part of each batch')
        loss = 0
        for i, (x, y) in enumerate(zip(idx.tensor_split(len(self.plans)),
                                       targets.tensor_split(len(self.plans)))):
            loss = loss + self.under(i, x, y)[1] * (len(x) / len(idx))
        return None, loss
