"""From logits to the next token: greedy, temperature, top-k, top-p."""
import numpy as np
import torch
from torch.nn import functional as F


class Sampler:
    """Draws the next token of each row.

    Args:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: only the k likeliest (ties with the k-th included, as in nanoGPT); 0 = all.
        top_p: only the likeliest that together have this probability (Holtzman et al. 2019); 1 = all.
        generators: one torch.Generator per row, so that a row's draws do not depend on what else is in the batch;
            None = all rows from the global generator, as nanoGPT's `generate` does.
    """

    def __init__(self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, generators=None):
        self.temperature, self.top_k, self.top_p, self.generators = temperature, top_k, top_p, generators

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """(B, V) logits -> (B, 1) token ids."""
        if self.temperature == 0:
            return logits.argmax(-1, keepdim=True)
        probs = F.softmax(self._restricted(logits / self.temperature), dim=-1)
        if self.generators is None:
            return torch.multinomial(probs, num_samples=1)
        return torch.cat([torch.multinomial(row[None], num_samples=1, generator=g)
                          for row, g in zip(probs, self.generators, strict=True)])

    def _restricted(self, logits):
        if self.top_k:
            kth = torch.topk(logits, min(self.top_k, logits.size(-1))).values[:, -1:]
            logits = logits.masked_fill(logits < kth, -torch.inf)
        if self.top_p < 1.0:
            ordered, order = logits.sort(dim=-1, descending=True)
            probs = ordered.softmax(-1)
            beyond = probs.cumsum(-1) - probs >= self.top_p  # what comes before it has that probability already
            logits = logits.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
        return logits


def sample_generators(seed: int, first: int, count: int, device: torch.device) -> list[torch.Generator]:
    """Generators of samples first .. first + count - 1, each seeded from (seed, k) alone.

    Sample 0 draws what nanoGPT would: its sample.py seeds the global generator, builds the model from it, then draws.
    So call this right after `torch.manual_seed(seed)` and building the model.
    """
    generators = []
    for k in range(first, first + count):
        generator = torch.Generator(device)
        if k == 0 and device.type == 'cpu':
            generator.set_state(torch.get_rng_state())
        else:
            mixed = np.random.SeedSequence((seed % 2 ** 64, k)).generate_state(2).view(np.uint64)[0]
            generator.manual_seed(seed if k == 0 else int(mixed >> 1))
        generators.append(generator)
    return generators
