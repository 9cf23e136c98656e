"""The server's metrics, for Prometheus."""
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The metrics of one server, in their own registry. Thread-safe."""

    def __init__(self):
        self.registry = CollectorRegistry()

        def make(kind, name, help, labels=(), **options):
            return kind(f'nanokv_{name}', help, labels, registry=self.registry, **options)
        self.requests = make(Counter, 'requests', 'HTTP requests; status 499: the client left',
                             ('route', 'status'))
        self.tokens = make(Counter, 'tokens_generated', 'Tokens generated')
        self.prompt_tokens = make(Counter, 'prompt_tokens',
                                  'Prompt tokens of ended choices that generated a token')
        self.cached_tokens = make(Counter, 'prompt_tokens_cached',
                                  'Prompt tokens found in the prefix cache')
        self.failed_steps = make(Counter, 'failed_steps', 'Engine steps that failed, then retried')
        self.ttft = make(Histogram, 'ttft_seconds', 'From submission to the first token',
                         buckets=SECONDS)
        self.seconds = make(Histogram, 'request_seconds', 'From submission to the end of a choice',
                            buckets=SECONDS)
        self.running = make(Gauge, 'running_requests', 'Choices that have a row in the engine')
        self.waiting = make(Gauge, 'waiting_requests', 'Choices that wait for a row')
        self.kv_held = make(Gauge, 'kv_held_bytes', 'KV bytes in use: pages of rows, and all rings')
        self.prefix_bytes = make(Gauge, 'prefix_store_bytes', 'Bytes of cached prefixes', ['where'])
        self.hit_rate = make(Gauge, 'prefix_hit_rate',
                             'Share of prompt tokens found in the prefix cache')

    def ended(self, completion) -> None:
        """Count a choice that has ended for any reason."""
        if completion.ttft_s is not None:  # prefill was completed
            self.ttft.observe(completion.ttft_s)
            self.prompt_tokens.inc(len(completion.prompt_tokens))
            self.cached_tokens.inc(completion.n_cached)
        if completion.finish_reason in ('stop', 'length'):
            self.seconds.observe(completion.seconds)

    def publish(self, engines, n_open: int) -> None:
        """Set the gauges, sums over the engines, on their thread. n_open: choices that have not
        ended."""
        running = sum(len(engine.scheduler.running) for engine in engines)
        self.running.set(running)
        self.waiting.set(max(0, n_open - running))
        self.kv_held.set(sum(engine.cache.held_nbytes for engine in engines))
        stores = [engine.prefix for engine in engines if engine.prefix]
        if stores:
            self.prefix_bytes.labels('host').set(sum(store.nbytes for store in stores))
            self.prefix_bytes.labels('pool').set(sum(
                len(store.table.pinned) * store.copier.page_nbytes for store in stores))
            found, looked_up = (sum(getattr(store.stats, name) for store in stores)
                                for name in ('found', 'looked_up'))
            self.hit_rate.set(found / max(1, looked_up))
