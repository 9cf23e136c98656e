"""A GPT that is trained under several KV plans at once."""
import functools
import itertools

import torch
from torch import nn

from kv.weights import EMBEDDING, HEAD, shapes
from model import GPT
from training.checkpoint.convert import converted
from training.elastic.plans import Plan
from training.step.loss import distillation


class Elastic(nn.Module):
    """A base GPT and its smaller plans, whose weights are functions of the base's (`converted`).

    In training each plan computes the loss of its own part of the batch, of which the smallest
    plan has twice as much as the others; with more `passes` each sequence is trained under that
    many plans. In evaluation it is the base. (Slimmable networks nest widths in this way, and train
    the smallest in every step: Yu and Huang 2019.)

    plans: the base's first. losses: their validation losses when they were last evaluated, [] if
    they were not. models: theirs, whose weights are the base's own or made of them anew
    for each forward pass; they stay until the next one, since recomputation reads them again.
    teacher: a GPT with the base's vocabulary, which is changed in place (`as_teacher`), or None. In
    training the loss is then the divergence from its predictions. all_models: with it.
    """

    def __init__(self, base: GPT, plans: list[Plan], losses=(), teacher: GPT | None = None,
                 passes: int = 1):
        super().__init__()
        self.base, self.plans, self.losses, self.passes = base, plans, [*losses], passes
        with torch.device('meta'):
            others = [GPT(plan.config) for plan in plans[1:]]
        self.models = (base, *others)  # tuples: they are no submodules
        self.teachers = (as_teacher(teacher),) if teacher else ()
        self.names = [shapes(model.config, model.plan).keys() for model in self.models]
        for i in range(1, len(plans)):
            put(self.models[i], self.weights(i))

    def train(self, mode: bool = True):
        for model in self.models:
            model.train(mode)
        return super().train(mode)

    def weights(self, i: int) -> dict:
        """The weights of plan i, of which those that are the base's own are the same objects."""
        found = converted(dict(self.base.named_parameters()), self.base.plan, self.models[i].plan,
                          self.names[i])
        return found | {HEAD: found[EMBEDDING]}

    def under(self, i: int, idx, targets=None):
        """Logits and loss of plan i, as the base's `forward` returns them."""
        if i:
            put(self.models[i], {name: x for name, x in self.weights(i).items()
                                 if not isinstance(x, nn.Parameter)})
        return self.models[i](idx, targets)

    def forward(self, idx, targets):
        if not self.training:
            return self.base(idx, targets)
        loss, rows = 0, len(idx) * self.passes
        sizes = part_sizes(len(idx), len(self.plans), self.passes)
        parts = (each.repeat(self.passes, 1).split(sizes) for each in (idx, targets))
        for i, (x, y) in enumerate(zip(*parts)):
            if not torch.compiler.is_compiling():
                # recomputation casts all weights again, also those that another plan has cast
                torch.clear_autocast_cache()
            loss = loss + self.taught(i, x, y) * (len(x) / rows)
        return None, loss

    @property
    def all_models(self) -> tuple[GPT, ...]:
        return *self.models, *self.teachers

    def taught(self, i, idx, targets):
        """The loss of plan i in training."""
        if not self.teachers:
            return self.under(i, idx, targets)[1]
        [teacher], model = self.teachers, self.models[i]
        with torch.no_grad():
            learned = functools.partial(distillation, teacher=teacher(idx, targets)[1],
                                        teacher_weight=teacher.lm_head.weight)
        usual, model.loss_fn = model.loss_fn, learned
        try:
            return self.under(i, idx, targets)[1]
        finally:
            model.loss_fn = usual


def part_sizes(batch: int, n: int, passes: int = 1) -> list[int]:
    """The sequences of each of n plans, together `passes` times those of a batch. The last plan has
    about twice as many as another, and at most all of them."""
    rows = batch * passes
    last = min(batch, 2 * rows // (n + 1))
    bounds = [i * (rows - last) // max(1, n - 1) for i in range(n)]
    return [end - start for start, end in itertools.pairwise(bounds)] + [last]


def as_teacher(model: GPT) -> GPT:
    """Let a model, in place, give its last hidden states (N, C) as the loss."""
    model.loss_fn = _hidden_states
    return model.eval().requires_grad_(False)


def _hidden_states(x, weight, targets):
    return x


def put(model: nn.Module, weights: dict) -> None:
    """Let the modules use these tensors as their weights."""
    for name, x in weights.items():
        path, _, attribute = name.rpartition('.')
        module = model.get_submodule(path)
        module._parameters.pop(attribute, None)
        setattr(module, attribute, x)
