"""OpenAI's request documents, read: which prompts, how sampled, how answered. No HTTP and no torch here."""
import difflib
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from config.errors import UserError
from engine.dialogue import Dialogue, Template
from engine.params import SamplingParams, has_surrogate, sample_seed, shown
from serving.errors import ApiError

MAX_CHOICES = 128   # of one request, as with OpenAI
MAX_LOGPROBS = 20
MAX_STOPS = 16

# field -> of SamplingParams
SAMPLING = {'max_tokens': 'max_new_tokens', 'max_completion_tokens': 'max_new_tokens', 'temperature': 'temperature',
            'top_p': 'top_p', 'top_k': 'top_k', 'min_p': 'min_p', 'repetition_penalty': 'repetition_penalty', 'seed': 'seed',
            'stop': 'stop'}
COMMON = {*SAMPLING, 'model', 'n', 'stream', 'stream_options'}
IGNORED = {'user', 'metadata', 'service_tier', 'safety_identifier', 'prompt_cache_key',
           'prompt_cache_retention'}  # they change no text
# fields of OpenAI's that are not offered -> what they may be, as it means the same as to leave them out
NEUTRAL = {'frequency_penalty': (0,), 'presence_penalty': (0,), 'logit_bias': ({},), 'store': (False,)}
NEUTRAL_COMPLETION = NEUTRAL | {'echo': (False,), 'suffix': ('',), 'best_of': (1,)}
NEUTRAL_CHAT = NEUTRAL | {'tools': ([],), 'tool_choice': ('none', 'auto'), 'response_format': ({'type': 'text'},),
                          'modalities': (['text'],), 'parallel_tool_calls': (True, False)}


@dataclass(frozen=True)
class Service:
    """What requests are read for.

    max_positions: most tokens of a prompt and what is generated, less the last. max_new_tokens: where a request does not say.
    max_choices: most that the server ever takes at once. user, reply_as: names of a conversation's two sides.
    strict: refuse messages that `Dialogue.say` would fold.
    """
    model: str
    tokenizer: object
    max_positions: int
    max_new_tokens: int
    max_choices: int
    template: Template
    user: str
    reply_as: str
    strict: bool = False


@dataclass(frozen=True)
class Ask:
    """A request that was read. prompts: token ids of each; params: of each choice; choice c answers prompt c // n."""
    prompts: list[list[int]]
    params: list[SamplingParams]
    n: int
    stream: bool = False
    include_usage: bool = False

    @property
    def choices(self) -> list[tuple[list[int], SamplingParams]]:
        return [(self.prompts[c // self.n], params) for c, params in enumerate(self.params)]


def completion(document: dict, service: Service) -> Ask:
    """A document for /v1/completions.

    Raises:
        ApiError: 400, a field that is unknown, wrong or not offered, or a prompt that is too long; 404, another model.
    """
    given = _fields(document, COMMON | {'prompt', 'logprobs'}, NEUTRAL_COMPLETION, service)
    logprobs = _integer(given, 'logprobs', -1, 0, MAX_LOGPROBS)
    return _ask(given, service, _prompts(given.get('prompt'), service), {'logprobs': logprobs})


def chat(document: dict, service: Service) -> Ask:
    """The same for /v1/chat/completions: turns by the template, then the head of the reply, which ends where a turn does."""
    given = _fields(document, COMMON | {'messages', 'logprobs', 'top_logprobs'}, NEUTRAL_CHAT, service)
    wanted, top = _boolean(given.get('logprobs', False), 'logprobs'), _integer(given, 'top_logprobs', 0, 0, MAX_LOGPROBS)
    if top and not wanted:
        raise ApiError(400, f'top_logprobs={top} is for logprobs=true alone', 'top_logprobs')
    return _ask(given, service, [_conversation(given.get('messages'), service)], {'logprobs': top if wanted else -1},
                ends=(service.template.end,))


def _fields(document, known, neutral, service) -> dict:
    """What was given and matters; null means not given."""
    if not isinstance(document, dict):
        raise ApiError(400, f'the body is {_kind(document)}: it must be a JSON object')
    for name, value in document.items():
        if name in neutral and value is not None and value not in neutral[name]:
            allowed = ' or '.join(map(repr, neutral[name]))
            raise ApiError(400, f'{name}={shown(value)} is not offered here: leave it out, or give {allowed}', name,
                           'unsupported_value')
        if name not in known and name not in neutral and name not in IGNORED:
            near = difflib.get_close_matches(name[:60], known, n=1)
            hint = f', did you mean {near[0]!r}?' if near else ''
            raise ApiError(400, f'unknown field {shown(name)}{hint} (known are {", ".join(sorted(known))})',
                           name[:60], 'unknown_field')
    given = {name: value for name, value in document.items() if name in known and value is not None}
    model = given.pop('model', service.model)
    if model != service.model:
        raise ApiError(404, f'there is no model {shown(model)}: this server has {service.model!r}', 'model', 'model_not_found')
    return given


def _ask(given, service, prompts, extra, ends=()) -> Ask:
    n = _integer(given, 'n', 1, 1, MAX_CHOICES)
    most = min(MAX_CHOICES, service.max_choices)
    if n * len(prompts) > most:
        raise ApiError(400, f'{len(prompts)} prompts with n={n} are {n * len(prompts)} choices: at most {most} at once', 'n')
    stream = _boolean(given.get('stream', False), 'stream')
    options = given.get('stream_options', {})
    if not isinstance(options, dict) or options.keys() - {'include_usage', 'include_obfuscation'}:
        raise ApiError(400, f'stream_options={shown(options)}: must be an object with include_usage', 'stream_options')
    if options and not stream:
        raise ApiError(400, 'stream_options is for stream=true alone', 'stream_options')
    params = _params(given, extra, ends)
    asked = [replace(params, max_new_tokens=_room(given, service, len(prompt), params)) for prompt in prompts]
    return Ask(prompts, [replace(p, seed=sample_seed(p.seed, k)) for p in asked for k in range(n)], n, stream,
               _boolean(options.get('include_usage') or False, 'stream_options'))


def _params(given, extra, ends) -> SamplingParams:
    if 'max_tokens' in given and 'max_completion_tokens' in given:
        raise ApiError(400, 'max_tokens and max_completion_tokens are the same: give one of them', 'max_tokens')
    values, name_of = {'seed': secrets.randbits(63)} | extra, {}
    for name in SAMPLING.keys() & given.keys():
        values[SAMPLING[name]] = given[name]
        name_of[SAMPLING[name]] = name
    try:
        params = SamplingParams(**values)
    except UserError as e:  # "max_new_tokens=0: must be at least 1", in our words
        ours, rest = re.fullmatch(r'(?s)(\w+)(=.*)', str(e)).groups()
        raise ApiError(400, name_of.get(ours, ours) + rest, name_of.get(ours, ours)) from e
    if len(params.stop) > MAX_STOPS:
        raise ApiError(400, f'stop has {len(params.stop)} texts: at most {MAX_STOPS}', 'stop')
    return replace(params, stop=params.stop + ends)


def _room(given, service, n_prompt, params) -> int:
    """max_new_tokens: what was asked for, or as much of the default as there is room for."""
    room = service.max_positions - n_prompt + 1  # the last token drawn is never fed
    asked = next((name for name in ('max_tokens', 'max_completion_tokens') if name in given), '')
    if asked and params.max_new_tokens > room:
        raise ApiError(400, f'{n_prompt:,} prompt tokens and {asked}={params.max_new_tokens:,} are more than this server holds '
                            f'for a request: {service.max_positions:,} positions', asked, 'context_length_exceeded')
    return params.max_new_tokens if asked else min(service.max_new_tokens, room)


def _prompts(value, service) -> list[list[int]]:
    """One text, several, the ids of one, or of several."""
    if value is None:
        raise ApiError(400, 'prompt is missing', 'prompt')
    prompts = value if isinstance(value, list) and value and all(isinstance(x, (str, list)) for x in value) else [value]
    if len(prompts) > MAX_CHOICES:
        raise ApiError(400, f'{len(prompts)} prompts: at most {MAX_CHOICES} at once', 'prompt')
    return [_ids(prompt, service) for prompt in prompts]


def _ids(prompt, service):
    if isinstance(prompt, str):
        _bounded(len(prompt), service, 'prompt')
        prompt = _encode(lambda: service.tokenizer.encode(_text(prompt, 'prompt')), 'prompt')
    if not isinstance(prompt, list) or not all(type(i) is int for i in prompt):
        raise ApiError(400, f'prompt={shown(prompt)}: must be a text, a list of token ids, or a list of such', 'prompt')
    if not prompt:
        raise ApiError(400, 'the prompt has no tokens: give at least one', 'prompt')
    if len(prompt) > service.max_positions:  # before anything is done with so many
        raise ApiError(400, f'the prompt has {len(prompt):,} tokens: at most {service.max_positions:,}', 'prompt',
                       'context_length_exceeded')
    return prompt


def _bounded(n, service, where):
    """n characters may be as few tokens as a request may have. To encode more would be for nothing, and take long."""
    most = service.max_positions * service.tokenizer.longest
    if n > most:
        raise ApiError(400, f'{where} has {n:,} characters: {service.max_positions:,} tokens are at most {most:,}', where,
                       'context_length_exceeded')


def _conversation(messages, service) -> list[int]:
    """Ids of the turns up to where the reply begins. Each turn is encoded for itself, so that what was computed for it serves
    again."""
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, f'messages={shown(messages)}: must be a list of at least one message', 'messages')
    dialogue, start, n = Dialogue(service.tokenizer, service.template, strict=service.strict), [], 0
    for i, message in enumerate(messages):
        where = f'messages[{i}]'
        role, text, name = _message(message, where, service)
        if role == 'assistant' and not text:  # a reply that ended where it began is no turn
            continue
        if role in ('system', 'developer'):
            if dialogue.turns:
                raise ApiError(400, f'{where}: a {role} message can only come before all others', where)
            text += service.template.end * (not text.endswith(service.template.end))
            start += _encode(lambda text=text: service.tokenizer.encode(text, special=False), where)
            n = len(start)
        else:
            _encode(lambda name=name, text=text: dialogue.say(name, text), where)
            n += len(dialogue.turns[-1].ids)
        if n > service.max_positions:  # before the others are looked at
            raise _too_long(n, service)
    ids = start + dialogue.prompt(service.reply_as)
    if len(ids) > service.max_positions:
        raise _too_long(len(ids), service)
    return ids


def _too_long(n, service):
    return ApiError(400, f'the conversation has {n:,} tokens: at most {service.max_positions:,}; leave out its oldest turns',
                    'messages', 'context_length_exceeded')


def _message(message, where, service) -> tuple[str, str, str]:
    """(role, text, name) of one of a conversation; what is null in it is as if left out."""
    if not isinstance(message, dict) or {key for key, x in message.items() if x is not None} - {'role', 'content', 'name'}:
        raise ApiError(400, f'{where}={shown(message)}: must be an object with role and content (and name)', where)
    role, text, end = message.get('role'), _content(message.get('content'), where), service.template.end
    if role not in ('system', 'developer', 'user', 'assistant'):
        raise ApiError(400, f'{where}: role={shown(role)}: allowed are system, developer, user, assistant', where)
    _bounded(len(text), service, where)
    name = message.get('name')
    if name is None:
        name = service.reply_as if role == 'assistant' else service.user
    elif not isinstance(name, str) or not name.isprintable() or end in service.template.head(name):
        raise ApiError(400, f'{where}: name={shown(name)} cannot be the name of a turn', where)
    if role == 'assistant':  # a reply that was cut off within the end of its turn
        cut = next((n for n in range(len(end) - 1, 0, -1) if text.endswith(end[:n])), 0)
        text = text[:len(text) - cut]
    return role, text, name


def _content(content, where) -> str:
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get('type') == 'text' and isinstance(part.get('text'), str)
                   for part in content):
            raise ApiError(400, f'{where}: content may have parts of type text alone', where)
        content = ''.join(part['text'] for part in content)
    return _text(content, where)


def _text(value, where) -> str:
    if not isinstance(value, str) or has_surrogate(value):
        raise ApiError(400, f'{where}: {shown(value)} is not a text', where)
    return value


def _encode(make: Callable, where):
    try:
        return make()
    except ValueError as e:  # a UserError, or what the tokenizer cannot take
        raise ApiError(400, str(e), where) from e


def _integer(given, name, default, low, high) -> int:
    value = given.get(name, default)
    if name in given and (type(value) is not int or not low <= value <= high):
        raise ApiError(400, f'{name}={shown(value)}: must be an integer from {low} to {high}', name)
    return value


def _boolean(value, name) -> bool:
    if not isinstance(value, bool):
        raise ApiError(400, f'{name}={shown(value)}: must be true or false', name)
    return value


def _kind(value) -> str:
    return {list: 'a list', str: 'a text', bool: 'a boolean', type(None): 'null'}.get(type(value), 'a number')
