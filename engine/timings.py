"""How long a batch took to its first token and per further one."""
import statistics

from rich.console import Console

from config.sizes import nice_bytes


class Timings:
    """One entry per batch of samples: seconds to the first token (TTFT) and per further step
    (TPOT)."""

    def __init__(self):
        self.first, self.further, self.tokens, self.seconds = [], [], 0, 0.0

    def record(self, start: float, stamps: list[float], tokens: int) -> None:
        """A batch that began at `start` and had a token for each row at each of `stamps`, on one
        clock, in seconds.

        tokens: those that belong to a sample; a row that has ended and is waiting for the others
        makes none.
        """
        self.first.append(stamps[0] - start)
        if len(stamps) > 1:
            self.further.append((stamps[-1] - stamps[0]) / (len(stamps) - 1))
        self.tokens += tokens
        self.seconds += stamps[-1] - start

    def summary(self) -> dict:
        """Medians over the batches; tokens_per_second over everything, prefill included."""
        return {'ttft_ms': statistics.median(self.first) * 1e3,
                'tpot_ms': statistics.median(self.further) * 1e3 if self.further else None,
                'tokens_per_second': self.tokens / self.seconds, 'tokens': self.tokens}


def show_timings(report: dict) -> None:
    """Print a report that has a `summary`, prompt_tokens, prefill_flops, batch, device, threads and
    weights."""
    n = report['prompt_tokens']
    tpot = f"{report['tpot_ms']:.2f} ms" if report['tpot_ms'] is not None else '-'
    Console().print(
        f"TTFT {report['ttft_ms']:.1f} ms ({n} prompt token{'s' * (n != 1)}, "
        f"{report['prefill_flops'] / 1e6:,.1f} MFLOPs), TPOT {tpot}, "
        f"{report['tokens_per_second']:,.1f} tokens/s\n"
        f"at batch {report['batch']} on {report['device']}, "
        f"{report['threads']} threads, weights {report['weights']}: "
        f"{nice_bytes(report['weight_bytes'])}", highlight=False)
