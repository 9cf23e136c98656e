"""OpenAI's response documents, complete and streamed. No HTTP or torch."""
import functools
import secrets
import time

from engine.requests.request import Event
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
        self.completions: list[Completion | None] = [None] * len(request.choices)
        self.text_of = functools.cache(lambda token: tokenizer.decode([token]))
        self.bytes_of = functools.cache(tokenizer.token_bytes)
        self._streams = [tokenizer.stream() for _ in request.choices]
        self._offsets = [0] * len(request.choices)  # of the next token's text, for `_logprobs`
        self._begun = set()  # choices of a chat that have streamed their role

    @property
    def complete(self) -> bool:
        return None not in self.completions

    def take(self, choice: int, event: Event) -> list[dict]:
        """Process an event of a choice. Returns the documents to stream."""
        if event.completion:
            self.completions[choice] = event.completion
        if not self.request.stream:
            return []
        tokens = [event.token] if event.token >= 0 else []
        pieces = self.pieces(choice, event, tokens, event.logprob and [event.logprob])
        return [self._document(self.piece, [piece], usage=None) for piece in pieces]

    def pieces(self, c: int, event: Event, *token) -> list[dict]:
        """The new parts, as entries of 'choices'. token: the event's, as `_entry` takes it."""
        if not (event.text or event.completion or event.logprob or self.request.token_ids):
            return []
        reason = event.completion and event.completion.finish_reason
        return [self._entry(c, {'text': event.text}, reason, *token)]

    def last(self) -> list[dict]:
        """Documents to stream after all events."""
        return [self._document(self.piece, [], self.usage())] if self.request.include_usage else []

    def document(self) -> dict:
        """The complete response."""
        choices = [self._entry(c, self.content(done.text), done.finish_reason, done.tokens,
                               done.logprobs) for c, done in enumerate(self.completions)]
        return self._document(self.whole, choices, usage=self.usage())

    def content(self, text: str) -> dict:
        """The text of a complete choice, in its entry."""
        return {'text': text}

    def _entry(self, c, content, reason=None, tokens=(), logprobs=None) -> dict:
        """An entry of 'choices'. content: its text."""
        entry = {'index': c, **content, 'finish_reason': reason,
                 'logprobs': logprobs and self._logprobs(c, logprobs)}
        return entry | {'token_ids': tokens} if tokens and self.request.token_ids else entry

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
        firsts = self.completions[::self.request.n]
        prompt = sum(len(completion.prompt_tokens) for completion in firsts)
        cached = sum(completion.n_cached for completion in firsts)
        new = sum(len(completion.tokens) for completion in self.completions)
        return {'prompt_tokens': prompt, 'completion_tokens': new, 'total_tokens': prompt + new,
                'prompt_tokens_details': {'cached_tokens': cached}}

    def _document(self, kind, choices, usage):
        document = self.head | {'object': kind, 'choices': choices}
        if usage or self.request.include_usage:
            document['usage'] = usage
        return document


class ChatReply(Reply):
    prefix, whole, piece = 'chatcmpl', 'chat.completion', 'chat.completion.chunk'

    def pieces(self, c, event, *token) -> list[dict]:
        pieces = []
        if c not in self._begun:
            self._begun.add(c)
            pieces.append(self._entry(c, {'delta': {'role': 'assistant', 'content': ''}}))
        if event.text or event.logprob or self.request.token_ids:
            pieces.append(self._entry(c, {'delta': {'content': event.text}}, None, *token))
        if event.completion:
            pieces.append(self._entry(c, {'delta': {}}, event.completion.finish_reason))
        return pieces

    def content(self, text) -> dict:
        return {'message': {'role': 'assistant', 'content': text, 'refusal': None}}

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
