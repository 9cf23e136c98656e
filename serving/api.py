"""Parse OpenAI's request documents, and its errors. No HTTP or torch."""
import contextlib
import secrets
import time
from dataclasses import dataclass, field

from common.errors import UserError
from common.sizes import parse_bytes
from engine.text.dialogue import Dialogue, Template
from engine.requests.params import (
    MAX_LOGPROBS, SamplingParams, check_prompt, check_tokens, present, sample_seed, shown, unknown,
    whole)

MAX_CHOICES = 128  # per request, as in OpenAI's API
MAX_MESSAGES = 2_048  # of a conversation; also parts of a message
MAX_SIZE = 20  # characters of a size in a model's name: converting long numbers takes long
MAX_ENTRIES = 250_000  # log-probabilities of a request, about 300 bytes each

# field -> field of SamplingParams, which checks its range; of two for one, the last counts
SAMPLING = {name: name for name in ('temperature', 'top_p', 'top_k', 'min_p', 'repetition_penalty',
                                    'seed', 'stop', 'ignore_eos')}
SAMPLING |= {'max_tokens': 'max_new_tokens', 'max_completion_tokens': 'max_new_tokens',
             'stop_token_ids': 'stop_tokens'}

# other fields -> allowed values; None: checked where it is used
COMMON = {'model': None, 'n': range(1, MAX_CHOICES + 1), 'stream': bool, 'stream_options': None,
          'return_token_ids': bool}
COMPLETION = COMMON | {'prompt': None, 'logprobs': range(MAX_LOGPROBS + 1)}
CHAT = COMMON | {'messages': None, 'logprobs': bool, 'top_logprobs': range(MAX_LOGPROBS + 1)}

# fields that do not affect the text
IGNORED = ('user metadata service_tier safety_identifier prompt_cache_key prompt_cache_options '
           'prompt_cache_retention request_id session_id').split()
# values that change nothing -> unsupported fields of OpenAI and vLLM; always also what is absent
HARMLESS = {name: values for values, names in [
    ((), 'logit_bias suffix tools functions audio moderation prediction web_search_options '
         'documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs '
         'structured_outputs structural_tag guided_json guided_regex guided_choice guided_grammar '
         'guided_decoding_backend guided_whitespace_pattern prompt_logprobs logprob_token_ids '
         'allowed_token_ids bad_words prompt_embeds truncate_prompt_tokens cache_salt vllm_xargs '
         'kv_transfer_params ec_transfer_params repetition_detection logits_processors'),
    ((False,), 'store echo include_stop_str_in_output use_beam_search early_stopping watermarking '
               'continue_final_message return_tokens_as_token_ids return_prompt_text'),
    ((False, True), 'add_special_tokens spaces_between_special_tokens parallel_tool_calls '
                    'include_reasoning return_token_offsets return_mm_kwargs'),
    ((0,), 'frequency_penalty presence_penalty min_tokens priority routed_experts_prompt_start'),
    ((1,), 'best_of length_penalty stream_interval'), ((-1,), 'thinking_token_budget'),
    ((True,), 'skip_special_tokens add_generation_prompt'), (('none',), 'reasoning_effort'),
    (('none', 'auto'), 'tool_choice function_call'), (('left', 'right'), 'truncation_side'),
    (('medium',), 'verbosity'), ((['text'],), 'modalities'),
    (({'type': 'text'},), 'response_format')] for name in names.split()}

TYPES = {401: 'authentication_error', 429: 'rate_limit_error', 500: 'server_error',
         503: 'service_unavailable', 504: 'timeout_error'}


class ApiError(Exception):
    """An error response. param: the invalid field, or None. code: for programs, or None."""

    def __init__(self, status: int, message: str, param: str | None = None,
                 code: str | None = None, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers or {}

    @property
    def kind(self) -> str:
        return TYPES.get(self.status, 'invalid_request_error')

    def document(self) -> dict:
        return {'error': {'message': str(self), 'type': self.kind, 'param': self.param,
                          'code': self.code}}


@dataclass(frozen=True)
class Service:
    """The settings used to answer requests."""
    model: str
    tokenizer: object
    vocab_size: int       # the model's
    max_positions: int    # limit on a prompt and its completion without its last token
    max_new_tokens: int   # the default
    max_choices: int      # limit for all requests together
    template: Template
    user: str             # name of the user in the template
    reply_as: str         # name of the assistant
    max_body: int         # bytes of a request
    timeout: float        # seconds from its head to the end of the response
    strict: bool = False  # reject messages that `Dialogue.say` would fold
    created: int = field(default_factory=lambda: int(time.time()))  # time of the model
    dataset: str = ''     # name of what it was trained on; '' = unknown
    engine: int = 0       # index of the worker's engine
    # of an elastic model's plan: bytes of the cache of a text of block_size tokens, and the
    # validation loss
    nbytes: int = 0
    loss: float = 0.0


@dataclass(frozen=True)
class GenerationRequest:
    """A parsed request. choices: (prompt, params) of each, n for every prompt."""
    choices: list[tuple[list[int], SamplingParams]]
    n: int
    stream: bool = False
    include_usage: bool = False
    token_ids: bool = False  # in the reply
    engine: int = 0          # index of the worker's


def model_of(document):
    """The model that a document names; None if it names none."""
    return present(document).get('model') if isinstance(document, dict) else None


def service_for(name, services: list[Service]) -> Service:
    """The service of a model's name. Of an elastic model that may be NAME:BYTES, as in
    'out-elastic:64KB': unless a service has that very name, the plan of least loss within these
    bytes. The first service if there is no name. ApiError: 404."""
    first = services[0]
    if name is None:
        return first
    for service in services:
        if service.model == name:
            return service
    head, _, size = name.rpartition(':') if isinstance(name, str) else ('', '', '')
    if head == first.model and len(services) > 1 and len(size) <= MAX_SIZE:
        with contextlib.suppress(UserError):
            budget = parse_bytes(size)
            if fitting := [service for service in services if service.nbytes <= budget]:
                return min(fitting, key=lambda service: service.loss)
    names = ', '.join(repr(service.model) for service in services)
    raise ApiError(404, f'there is no model {shown(name)}: this server has {names}', 'model',
                   'model_not_found')


def parse_completion(document: dict, service: Service) -> GenerationRequest:
    """Parse a document for /v1/completions. ApiError: 400 if a field is unknown, invalid or
    unsupported, or a prompt is too long."""
    fields = _fields(document, COMPLETION, service)
    prompts = _prompts(fields.get('prompt'), service)
    return _request(fields, service, prompts, fields.get('logprobs', -1))


def parse_chat(document: dict, service: Service) -> GenerationRequest:
    """Parse a document for /v1/chat/completions. The prompt is the conversation in the template, up
    to the text of the reply, which ends with the turn. ApiError: as for `parse_completion`."""
    fields = _fields(document, CHAT, service)
    top = fields.get('top_logprobs', 0)
    if top and not fields.get('logprobs'):
        raise _invalid(f'top_logprobs={top} requires logprobs=true', 'top_logprobs')
    logprobs = top if fields.get('logprobs') else -1
    prompt = _conversation(fields.get('messages'), service)
    stops = () if fields.get('ignore_eos') else (service.template.end,)
    return _request(fields, service, [prompt], logprobs, stops)


def _invalid(message, param=None, code=None) -> ApiError:
    return ApiError(400, message, param, code)


def _fields(document, table, service) -> dict:
    """Return the checked fields of a document that are `present`."""
    if not isinstance(document, dict):
        raise _invalid(f'the body is {shown(document)}: must be a JSON object')
    known, fields = SAMPLING | table, {}
    for name, value in present(document).items():
        if name in known:
            fields[name] = _checked(name, value, table.get(name))
        elif name not in HARMLESS and name not in IGNORED:
            raise _invalid(unknown('field', name, sorted(known)), name[:60], 'unknown_field')
        elif value not in HARMLESS.get(name, [value]):
            allowed = ' or '.join(['leave it out', *map('give {!r}'.format, HARMLESS[name])])
            raise _invalid(f'{name}={shown(value)} is not supported: {allowed}', name,
                           'unsupported_value')
    return fields


def _checked(name, value, allowed):
    if allowed is bool and not isinstance(value, bool):
        raise _invalid(f'{name}={shown(value)}: must be true or false', name)
    if not isinstance(allowed, range):
        return value
    if whole(value) not in allowed:
        raise _invalid(f'{name}={shown(value)}: must be an integer from {allowed[0]} to '
                       f'{allowed[-1]}', name)
    return whole(value)


def _request(fields, service, prompts, logprobs, stops=()) -> GenerationRequest:
    n, stream = fields.get('n', 1), fields.get('stream', False)
    num_choices, most = n * len(prompts), min(MAX_CHOICES, service.max_choices)
    if num_choices > most:
        raise _invalid(f'{len(prompts)} prompts with n={n} are {num_choices} choices: '
                       f'at most {most} at once', 'n' if n > 1 else 'prompt')
    include_usage = _include_usage(fields.get('stream_options', {}), stream)
    params, choices = _params(fields, service, logprobs, stops), []
    for prompt in prompts:
        with _error_for('messages' if 'messages' in fields else 'prompt'):
            check_prompt(prompt, service.vocab_size)
        room = service.max_positions - len(prompt) + 1  # the last token takes no position
        longest = min(params.max_new_tokens, room)
        choices += [(prompt, params.variant(max_new_tokens=longest,
                                            seed=sample_seed(params.seed, k))) for k in range(n)]
    entries = sum(p.max_new_tokens for _, p in choices) * (params.logprobs + 1)
    if entries > MAX_ENTRIES:
        raise _invalid(f'{len(choices)} choices of up to {params.max_new_tokens:,} tokens with '
                       f'{params.logprobs} log-probabilities and their own are {entries:,}: at '
                       f'most {MAX_ENTRIES:,} in a request', 'logprobs')
    return GenerationRequest(choices, n, stream, include_usage,
                             fields.get('return_token_ids', False), service.engine)


def _include_usage(options, stream) -> bool:
    flags = present(options) if isinstance(options, dict) else {'': options}
    # include_obfuscation, which OpenAI's client may send, changes nothing here
    if (not all(isinstance(flag, bool) for flag in flags.values())
            or flags.keys() - {'include_usage', 'include_obfuscation'}):
        raise _invalid(f'stream_options={shown(options)}: must be an object with include_usage',
                       'stream_options')
    if flags and not stream:
        raise _invalid('stream_options requires stream=true', 'stream_options')
    return flags.get('include_usage', False)


def _params(fields, service, logprobs, stops) -> SamplingParams:
    given = [name for name in SAMPLING if name in fields]
    values = {SAMPLING[name]: fields[name] for name in given}
    try:
        defaults = SamplingParams(service.max_new_tokens, seed=secrets.randbits(63),
                                  logprobs=logprobs)
        params = SamplingParams.from_dict(values, defaults)
    except UserError as e:  # such as "max_new_tokens=0: must be at least 1"
        field, _, rest = str(e).partition('=')
        name = next(name for name in reversed(given) if SAMPLING[name] == field)
        raise _invalid(f'{name}={rest}', name) from e
    with _error_for('stop_token_ids'):
        check_tokens('stop token', params.stop_tokens, service.vocab_size)
    return params.variant(stop=params.stop + stops)


def _prompts(value, service) -> list[list[int]]:
    """Parse a text, a list of texts, a list of token ids, or a list of such lists."""
    is_batch = isinstance(value, list) and all(isinstance(x, (str, list)) for x in value)
    prompts = value if is_batch else [value]
    if len(prompts) > MAX_CHOICES:
        raise _invalid(f'{len(prompts)} prompts: at most {MAX_CHOICES} at once', 'prompt')
    return [_prompt(prompt, service) for prompt in prompts]


def _prompt(prompt, service) -> list[int]:
    if isinstance(prompt, str):
        with _error_for('prompt'):
            prompt = service.tokenizer.encode(_text(prompt, 'prompt', service))
    is_list = isinstance(prompt, list)
    if is_list:
        _check_positions('the prompt', len(prompt), service, 'prompt')
    ids = [whole(i) for i in prompt] if is_list else [None]
    if None in ids:
        what = 'prompt is missing or empty' if prompt is None else f'prompt={shown(prompt)}'
        raise _invalid(f'{what}: it must be a text, a list of token ids, or a list of '
                       'texts or of such lists', 'prompt')
    return ids


def _check_positions(what, num_tokens, service, param, advice=''):
    if num_tokens > service.max_positions:
        raise _invalid(f'{what} has {num_tokens:,} tokens: at most {service.max_positions:,}'
                       f'{advice}', param, 'context_length_exceeded')


def _check_length(items, param):
    if len(items) > MAX_MESSAGES:
        raise _invalid(f'{param} has {len(items):,} items: at most {MAX_MESSAGES:,}', param)


def _text(value, param, service) -> str:
    """Reject what is not a text, and a text that is too long in any encoding, since encoding it
    would take long."""
    if not isinstance(value, str):
        raise _invalid(f'{param}: {shown(value)} is not a text', param)
    most = service.max_positions * service.tokenizer.longest
    if len(value) > most:
        raise _invalid(f'{param} has {len(value):,} characters: {service.max_positions:,} tokens '
                       f'are at most {most:,}', param, 'context_length_exceeded')
    return value


def _conversation(messages, service) -> list[int]:
    """Token ids up to the text of the reply. Each turn is encoded separately, so that later
    requests find it in the prefix cache."""
    if not isinstance(messages, list) or not messages:
        raise _invalid(f'messages={shown(messages)}: must be a list of at least one message',
                       'messages')
    _check_length(messages, 'messages')
    dialogue = Dialogue(service.tokenizer, service.template, strict=service.strict)
    num_tokens, advice = 0, '; leave out its oldest turns'
    for i, message in enumerate(messages):
        param = f'messages[{i}]'
        role, name, text = _message(message, param, service)
        if role != 'user' and not text.strip():  # an empty reply is not a turn
            continue
        with _error_for(param):
            if role in ('system', 'developer'):
                dialogue.narrate(text)
            else:
                dialogue.say(name, text)
        num_tokens += len(dialogue.turns[-1].ids)
        # before the rest is encoded
        _check_positions('the conversation', num_tokens, service, 'messages', advice)
    with _error_for('messages'):
        ids = dialogue.prompt(service.reply_as)
    _check_positions('the conversation', len(ids), service, 'messages', advice)
    return ids


def _message(message, param, service) -> tuple[str, str, str]:
    """(role, name, text)"""
    given = present(message) if isinstance(message, dict) else {}
    is_text = given.pop('type', 'text') == 'text'  # lm-evaluation-harness says so
    if not is_text or not given or given.keys() - {'role', 'content', 'name'}:
        raise _invalid(f'{param}={shown(message)}: must be an object with role and content '
                       '(and name)', param)
    role, end = given.get('role'), service.template.end
    text = _content(given.get('content', ''), param, service)
    if role not in ('system', 'developer', 'user', 'assistant'):
        raise _invalid(f'{param}: role={shown(role)}: allowed are system, developer, user, '
                       'assistant', param)
    name = service.reply_as if role == 'assistant' else service.user
    name = _text(given.get('name', name), param, service)
    if 'name' in given and (not name.isprintable() or end in service.template.head(name)):
        raise _invalid(f'{param}: name={shown(name)} cannot be the name of a turn', param)
    if role == 'assistant':  # the reply may have been cut off inside its end-of-turn text
        cut = next((n for n in range(len(end) - 1, 0, -1) if text.endswith(end[:n])), 0)
        text = text[:len(text) - cut]
    return role, name, text


def _content(content, param, service) -> str:
    """The text of a message: a text, or a list of parts of type text."""
    parts = content if isinstance(content, list) else [{'type': 'text', 'text': content}]
    _check_length(parts, param)
    if not all(isinstance(part, dict) and part.get('type') == 'text' for part in parts):
        raise _invalid(f'{param}: content may only have parts of type text', param)
    texts = [_text(present(part).get('text', ''), param, service) for part in parts]
    return _text(''.join(texts), param, service)


@contextlib.contextmanager
def _error_for(param):
    """Turn errors of the tokenizer and of the dialogue into ApiError."""
    try:
        yield
    except ValueError as e:
        raise _invalid(str(e), param) from e
