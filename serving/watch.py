"""The stream of cache events and the plan document (docs/serving.md). No HTTP or torch."""
from common.gpt_config import GPTConfig
from engine.pages.view import RowView
from engine.weights.quantize import n_parameters
from kv.plan import KVPlan, plan_kv
from serving.api import ApiError, GenerationRequest, Service
from serving.replies import ChatReply, Reply


class CacheEvent(dict):
    """A document to send as a server-sent event named 'cache'."""


class WatchedReply(Reply):
    """A reply with cache events in its stream. ApiError: 400 unless a stream of one choice is asked
    for."""
    watched = True

    def __init__(self, request: GenerationRequest, *args):
        if not request.stream or len(request.choices) > 1:
            raise ApiError(400, f'{len(request.choices)} choices, stream={request.stream}: this '
                                'route streams one choice', 'n' if request.stream else 'stream')
        super().__init__(request, *args)
        [(self._prompt, _)] = request.choices
        self._text_of_next = self.tokenizer.stream()
        self._new_texts = [self._text_of_next(token) for token in self._prompt]
        self._num_texts, self._pages = 0, None  # sent

    def take(self, choice, event) -> list[dict]:
        if event.token >= 0:
            self._new_texts.append(self._text_of_next(event.token))
        return super().take(choice, event)

    def cache_event(self, view: RowView, received: float) -> CacheEvent:
        """The document of a view, after the events of its step. received: `perf_counter` time of
        the request's head."""
        first_token = view.first_token and round(view.first_token - received, 6)
        document = CacheEvent(
            time=round(view.taken - received, 6), first_token=first_token, row=view.row,
            length=view.length, prompt=len(self._prompt), cached=view.cached,
            texts=self._new_texts, texts_from=self._num_texts, nbytes=view.nbytes,
            running=view.running, waiting=view.waiting, free_pages=view.free_pages,
            held_nbytes=view.held_nbytes, prefix_nbytes=view.prefix_nbytes, done=view.done)
        if view.pages != self._pages:
            document |= {'pages': [[page, users] for page, users, _ in view.pages],
                         'prefix_pages': [pinned for *_, pinned in view.pages]}
        self._num_texts += len(self._new_texts)
        self._new_texts, self._pages = [], view.pages
        return document


class WatchedChatReply(WatchedReply, ChatReply):
    pass


def gemma_shaped(config: GPTConfig) -> KVPlan:
    """The cache of Gemma 4 in the shape of this model: a K/V head for about three query heads, five
    local layers to a global one, K = V in global layers, nothing shared."""
    shape = {name: getattr(config, name) for name in
             ('block_size', 'n_layer', 'n_head', 'n_embd', 'head_dim')}
    heads = next(n for n in range(max(1, config.n_head // 3), 0, -1) if config.n_head % n == 0)
    return plan_kv(GPTConfig(
        **shape, n_kv_head=heads, layer_pattern='LLLLLG'[-config.n_layer:], kv_tied='global',
        window_size=max(config.windows) or config.block_size // 4 or 1))


def plan_document(engine, service: Service, services: list[Service]) -> dict:
    """The model's slots and the sizes of its cache, as in docs/serving.md, and the names of all
    models of the server."""
    cache, config = engine.cache, engine.model.config
    plan, longest, dtype = cache.plan, cache.max_seq_len, cache.kv_dtype
    slots = [{'slot': slot.index, 'kind': slot.kind, 'window': slot.window,
              'capacity': slot.capacity(longest), 'owner': slot.owner, 'layers': slot.layers,
              'tied': slot.tied, 'latent': slot.latent,
              'position_nbytes': slot.position_nbytes(dtype),
              'state_nbytes': slot.state_nbytes(dtype)}
             for slot in plan.slots]
    gemma = [[slot.window, slot.position_nbytes(dtype)] for slot in gemma_shaped(config).slots]
    return {'model': service.model, 'models': [each.model for each in services],
            'dataset': service.dataset,
            'parameters': n_parameters(config), 'gemma_slots': gemma,
            'max_positions': service.max_positions, 'max_seq_len': longest,
            'block_size': config.block_size, 'kv_dtype': dtype,
            'page_size': cache.table.page_size, 'pages': cache.table.n_pages,
            'rows': cache.batch_size,
            'vanilla_position_nbytes': plan.vanilla().nbytes(1, 1, dtype),
            'vanilla_position_nbytes_bf16': plan.vanilla().nbytes(1, 1, 'bfloat16'),
            'slots': slots}
