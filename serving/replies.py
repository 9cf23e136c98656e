"""OpenAI's response documents, complete and streamed. No HTTP or torch."""
import functools
import secrets
import time

from engine.requests.job import Event
from engine.requests.params import Completion
from serving.api import GenerationRequest

LEAST = -9999.0  # JSON has no -inf


class Reply:
    """The response to one request, updated with its events. model: its name in documents."""
    # prefix of the id; 'object' of a complete document, and of a streamed one
    prefix, whole, piece = 'cmpl', 'text_completion', 'text_completion'
    watched = False  # whether it takes views of the rows too (serving/watch.py)

    def __init__(self, request: GenerationRequest, model: str, tokenizer):
        self.request, self.tokenizer = request, tokenizer
        self.head = {'id': f'{self.prefix}-{secrets.token_hex(12)}', 'created': int(time.time()),
                     'model': model}
        self.completions: list[Completion | None] = [None] * len(request.params)
        self.text_of = functools.cache(lambda token: tokenizer.decode([token]))
        self.bytes_of = functools.cache(tokenizer.token_bytes)
        self._streams = [tokenizer.stream() for _ in request.params]
        self._offsets = [0] * len(request.params)  # of the next token's text, for log-probabilities

    @property
    def complete(self) -> bool:
        return None not in self.completions

    def take(self, choice: int, event: Event) -> list[dict]:
        """Process an event of a choice. Returns the documents to stream."""
        if event.completion:
            self.completions[choice] = event.completion
        pieces = self.pieces(choice, event) if self.request.stream else []
        if pieces and self.request.token_ids and event.token >= 0:
            texts = [piece for piece in pieces if not piece['finish_reason']]  # chat: apart
            (texts or pieces)[-1]['token_ids'] = [event.token]
        return [self._document(self.piece, [piece], usage=None) for piece in pieces]

    def pieces(self, choice, event) -> list[dict]:
        """The new parts, as entries of 'choices'."""
        reason = event.completion and event.completion.finish_reason
        logprobs = event.logprob and self._logprobs(choice, [event.logprob])
        if not (event.text or reason or logprobs or self.request.token_ids):
            return []
        return [{'index': choice, 'text': event.text, 'logprobs': logprobs,
                 'finish_reason': reason}]

    def last(self) -> list[dict]:
        """Documents to stream after all events."""
        if not self.request.include_usage:
            return []
        return [self._document(self.piece, [], usage=self.usage())]

    def document(self) -> dict:
        """The complete response."""
        choices = [self.choice(c, completion) for c, completion in enumerate(self.completions)]
        if self.request.token_ids:
            for choice, completion in zip(choices, self.completions):
                choice['token_ids'] = completion.tokens
        return self._document(self.whole, choices, usage=self.usage())

    def choice(self, c: int, completion: Completion) -> dict:
        logprobs = completion.logprobs and self._logprobs(c, completion.logprobs)
        return {'index': c, 'text': completion.text, 'logprobs': logprobs,
                'finish_reason': completion.finish_reason}

    def _logprobs(self, choice, entries) -> dict:
        """Log-probabilities with the tokens' texts and their positions in the response."""
        offsets = []
        for entry in entries:
            offsets.append(self._offsets[choice])
            self._offsets[choice] += len(self._streams[choice](entry.token))
        return {'tokens': [self.text_of(entry.token) for entry in entries],
                'token_logprobs': [max(entry.logprob, LEAST) for entry in entries],
                'top_logprobs': [self._top(entry) for entry in entries], 'text_offset': offsets}

    def _top(self, entry) -> dict:
        """The likeliest tokens and the sampled one, best first. Of tokens with the same text
        (incomplete characters), only the most likely is kept."""
        texts, sampled = {}, (entry.token, entry.logprob)
        for token, logprob in sorted([*entry.top, sampled], key=lambda pair: -pair[1]):
            texts.setdefault(self.text_of(token), max(logprob, LEAST))
        return texts

    def usage(self) -> dict:
        """Token counts. Each prompt is counted once, with its first choice's cached tokens."""
        prompt = sum(map(len, self.request.prompts))
        new = sum(len(completion.tokens) for completion in self.completions)
        cached = sum(completion.n_cached for completion in self.completions[::self.request.n])
        return {'prompt_tokens': prompt, 'completion_tokens': new, 'total_tokens': prompt + new,
                'prompt_tokens_details': {'cached_tokens': cached}}

    def _document(self, kind, choices, usage):
        document = self.head | {'object': kind, 'choices': choices}
        if usage or self.request.include_usage:
            document['usage'] = usage
        return document


class ChatReply(Reply):
    prefix, whole, piece = 'chatcmpl', 'chat.completion', 'chat.completion.chunk'

    def __init__(self, *args):
        super().__init__(*args)
        self._begun = set()

    def pieces(self, choice, event) -> list[dict]:
        deltas, logprobs = [], event.logprob and self._logprobs(choice, [event.logprob])
        if choice not in self._begun:
            self._begun.add(choice)
            deltas.append(({'role': 'assistant', 'content': ''}, None, None))
        if event.text or logprobs or self.request.token_ids:
            deltas.append(({'content': event.text}, logprobs, None))
        if event.completion:
            deltas.append(({}, None, event.completion.finish_reason))
        return [{'index': choice, 'delta': delta, 'logprobs': logprobs, 'finish_reason': reason}
                for delta, logprobs, reason in deltas]

    def choice(self, c, completion) -> dict:
        logprobs = completion.logprobs and self._logprobs(c, completion.logprobs)
        message = {'role': 'assistant', 'content': completion.text, 'refusal': None}
        return {'index': c, 'message': message, 'logprobs': logprobs,
                'finish_reason': completion.finish_reason}

    def _logprobs(self, choice, entries) -> dict:
        content = []
        for entry in entries:
            top = [self._token(*pair) for pair in entry.top]
            content.append(self._token(entry.token, entry.logprob) | {'top_logprobs': top})
        return {'content': content, 'refusal': None}

    def _token(self, token, logprob) -> dict:
        data = self.bytes_of(token)
        return {'token': self.text_of(token), 'logprob': max(logprob, LEAST),
                'bytes': data and list(data)}
