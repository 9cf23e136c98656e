"""What the server counts, for Prometheus."""
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counters of one server, in a registry of their own. May be told things from any thread."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self):
        self.registry = registry = CollectorRegistry()

        def make(kind, name, meaning, labels=(), **kinds):
            return kind(f'nanokv_{name}', meaning, labels, registry=registry, **kinds)
        self.requests = make(Counter, 'requests', 'Requests over HTTP; status 499: the client left', ('route', 'status'))
        self.tokens = make(Counter, 'tokens_generated', 'Tokens drawn')
        self.prompt_tokens = make(Counter, 'prompt_tokens', 'Prompt tokens of choices that ended and had a token')
        self.cached_tokens = make(Counter, 'prompt_tokens_cached', 'Of those: taken from the prefix store')
        self.failed_steps = make(Counter, 'failed_steps', 'Steps of the engine that failed and were done again')
        self.ttft = make(Histogram, 'ttft_seconds', 'From submission to the first token of a choice', buckets=SECONDS)
        self.seconds = make(Histogram, 'request_seconds', 'From submission to the end of a choice', buckets=SECONDS)
        self.running = make(Gauge, 'running_requests', 'Choices that have a row in the engine')
        self.waiting = make(Gauge, 'waiting_requests', 'Choices that wait for one')
        self.kv_held = make(Gauge, 'kv_held_bytes', 'KV memory that rows hold: their pages, and all rings')
        self.prefix_bytes = make(Gauge, 'prefix_store_bytes', 'What the prefix store keeps on the host and in the pool',
                                 ('where',))
        self.hit_rate = make(Gauge, 'prefix_hit_rate', 'Share of prompt tokens that the prefix store had')

    def ended(self, completion, seconds: float) -> None:
        """A choice has ended, in whatever way."""
        if completion.ttft_s is not None:  # else its prompt was not read to the end
            self.prompt_tokens.inc(len(completion.prompt_tokens))
            self.cached_tokens.inc(completion.n_cached)
        if completion.finish_reason in ('stop', 'length'):
            self.seconds.observe(seconds)

    def publish(self, engine, n_open: int) -> None:
        """How the engine stands now; on its own thread. n_open: choices that have not ended."""
        running = len(engine.scheduler.running)
        self.running.set(running)
        self.waiting.set(max(0, n_open - running))
        self.kv_held.set(engine.cache.held_nbytes)
        store = engine.prefix
        if store:
            self.prefix_bytes.labels('host').set(store.nbytes)
            self.prefix_bytes.labels('pool').set(len(store.table.pinned) * store.copier.page_nbytes)
            self.hit_rate.set(store.stats.hit_rate)

    def text(self) -> bytes:
        """All of it, in Prometheus' format."""
        return generate_latest(self.registry)
