"""OpenAI's answer documents, whole and in pieces. No HTTP and no torch here."""
import functools
import secrets
import time

from engine.engine import Event
from engine.params import Completion
from serving.api import Ask

LEAST = -9999.0  # JSON has no -inf


class Reply:
    """The answer to one request as its events come.

    Args:
        ask: what was asked.
        model, tokenizer: named in documents; for log-probabilities, which name tokens by their texts.
    """
    prefix, whole, piece = 'cmpl', 'text_completion', 'text_completion'  # of the id, and what documents are called

    def __init__(self, ask: Ask, model: str, tokenizer):
        self.ask, self.tokenizer = ask, tokenizer
        self.head = {'id': f'{self.prefix}-{secrets.token_hex(12)}', 'created': int(time.time()), 'model': model}
        self.completions: list[Completion | None] = [None] * len(ask.params)
        self.text_of = functools.cache(lambda token: tokenizer.decode([token]))
        self.bytes_of = functools.cache(tokenizer.token_bytes)
        self._texts = [_Texts(tokenizer.stream(), self.text_of) for _ in ask.params]  # of choices that are told in pieces

    @property
    def complete(self) -> bool:
        return None not in self.completions

    def take(self, choice: int, event: Event) -> list[dict]:
        """An event of a choice; the documents that say it."""
        if event.completion:
            self.completions[choice] = event.completion
        if not self.ask.stream:
            return []
        return [self._document(self.piece, [piece], usage=None) for piece in self.pieces(choice, event)]

    def pieces(self, choice, event) -> list[dict]:
        """What is new, as entries of 'choices'."""
        reason, logprobs = event.completion and event.completion.finish_reason, None
        if event.logprob is not None:
            logprobs = self._texts[choice].logprobs([event.logprob])
        if not (event.text or reason or logprobs):
            return []
        return [{'index': choice, 'text': event.text, 'logprobs': logprobs, 'finish_reason': reason}]

    def last(self) -> list[dict]:
        """After all events."""
        return [self._document(self.piece, [], usage=self.usage())] if self.ask.include_usage else []

    def document(self) -> dict:
        """All of it at once."""
        return self._document(self.whole, [self.choice(c, completion) for c, completion in enumerate(self.completions)],
                              usage=self.usage())

    def choice(self, c: int, completion: Completion) -> dict:
        logprobs = completion.logprobs and _Texts(self.tokenizer.stream(), self.text_of).logprobs(completion.logprobs)
        return {'index': c, 'text': completion.text, 'logprobs': logprobs, 'finish_reason': completion.finish_reason}

    def usage(self) -> dict:
        """Tokens; each prompt once, and of what the store had, that of its first choice."""
        prompt, new = sum(map(len, self.ask.prompts)), sum(len(completion.tokens) for completion in self.completions)
        cached = sum(completion.n_cached for completion in self.completions[::self.ask.n])
        return {'prompt_tokens': prompt, 'completion_tokens': new, 'total_tokens': prompt + new,
                'prompt_tokens_details': {'cached_tokens': cached}}

    def _document(self, kind, choices, usage):
        document = self.head | {'object': kind, 'choices': choices}
        if usage or self.ask.include_usage:
            document['usage'] = usage
        return document


class ChatReply(Reply):
    """The same for conversations."""
    prefix, whole, piece = 'chatcmpl', 'chat.completion', 'chat.completion.chunk'

    def __init__(self, *args):
        super().__init__(*args)
        self._begun = set()

    def pieces(self, choice, event) -> list[dict]:
        deltas, logprobs = [], event.logprob and self._logprobs([event.logprob])
        if choice not in self._begun:
            self._begun.add(choice)
            deltas.append(({'role': 'assistant', 'content': ''}, None, None))
        if event.text or logprobs:
            deltas.append(({'content': event.text}, logprobs, None))
        if event.completion:
            deltas.append(({}, None, event.completion.finish_reason))
        return [{'index': choice, 'delta': delta, 'logprobs': its, 'finish_reason': reason} for delta, its, reason in deltas]

    def choice(self, c, completion) -> dict:
        logprobs = None if completion.logprobs is None else self._logprobs(completion.logprobs)
        return {'index': c, 'message': {'role': 'assistant', 'content': completion.text}, 'logprobs': logprobs,
                'finish_reason': completion.finish_reason}

    def _logprobs(self, entries) -> dict:
        content = [self._token(entry.token, entry.logprob) | {'top_logprobs': [self._token(*pair) for pair in entry.top]}
                   for entry in entries]
        return {'content': content, 'refusal': None}

    def _token(self, token, logprob) -> dict:
        data = self.bytes_of(token)
        return {'token': self.text_of(token), 'logprob': max(logprob, LEAST), 'bytes': data and list(data)}


class _Texts:
    """Log-probabilities with the texts of tokens, and where in the answer each begins."""

    def __init__(self, stream, text_of):
        self.stream, self.text_of, self.offset = stream, text_of, 0

    def logprobs(self, entries) -> dict:
        offsets = []
        for entry in entries:
            offsets.append(self.offset)
            self.offset += len(self.stream(entry.token))
        return {'tokens': [self.text_of(entry.token) for entry in entries],
                'token_logprobs': [max(entry.logprob, LEAST) for entry in entries],
                'top_logprobs': [self._top(entry.top) for entry in entries], 'text_offset': offsets}

    def _top(self, top) -> dict | None:
        """Of several tokens with one text (bytes that are no character), the likeliest."""
        return {self.text_of(token): max(logprob, LEAST) for token, logprob in reversed(top)} or None
