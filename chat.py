r"""Talk with a trained model in the terminal. K and V of earlier turns are kept and reused.

    python chat.py                        # with the newest run in this folder
    python chat.py out-mqa-local          # a dialogue of Shakespeare's: you are ROMEO
    python chat.py --user=MACBETH --reply_as=BANQUO --temperature=0.6
    python chat.py --turn='{name}:\n{text}\n\n'       # for tiny Shakespeare
    python chat.py --help

At the prompt, text is your turn, and a line that begins with / a command:

    /retry         another reply to your last turn
    /edit TEXT     TEXT in place of your last turn, and a new reply
    /undo          forget your last turn and its reply
    /history       all turns
    /stats         tokens computed and reused, bytes in use
    /help          this list
    /quit          leave (so does Ctrl-D)

Ctrl-C ends a reply. The conversation is saved after every turn, and continued next time.
"""
import io
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import configurator
from common.errors import UserError
from common.settings import Running, Sampling, Talking, key
from common.sizes import nice_bytes, parse_bytes
from common.terminal import visible
from engine.text.dialogue import Dialogue, Template, longest_context, speakers
from engine.engine import Engine
from engine.requests.params import SamplingParams, encodable, sample_seed
from interop.choose import paged
from interop.load import load, with_newest_run


@dataclass(frozen=True)
class Settings(Talking, Sampling, Running):
    history: str = key('', "file of the conversation; '' = chat.json in out_dir")
    max_new_tokens: int = key(300, 'longest reply, in tokens; at most half of max_seq_len')
    max_seq_len: int = key(0, 'tokens to keep, without the oldest turns; 0 = block_size, or up to '
                           '32 times that (at most 8,192) with RoPE and local layers')
    kv_budget: str = key('', "most KV memory, as '64KB': an elastic model (train.py --plans) runs "
                         "at its best plan within that (other forms: sample.py); '' = no limit")
    prefix_budget: str = key('256MB', 'host memory for the K/V of earlier turns')


def conversation_length(s, config) -> int:
    return s.max_seq_len or longest_context(config)


class Chat:
    """A conversation, the engine that generates its replies, and the times to their first token."""

    def __init__(self, s, model, tokenizer):
        self.s, self.path = s, Path(s.history or Path(s.out_dir) / 'chat.json')
        self.dialogue = Dialogue(tokenizer, Template(s.turn))
        # the alphabet may lack some characters: fail now, not after the first turn
        for name in (s.user, s.reply_as):
            tokenizer.encode(self.dialogue.template.head(name) + self.dialogue.template.end)
        max_seq_len = conversation_length(s, model.config)
        self.longest = min(s.max_new_tokens, max_seq_len // 2)  # of a reply
        self.params = SamplingParams(self.longest, s.temperature, s.top_k, s.top_p, seed=s.seed,
                                     stop=(self.dialogue.template.end,))
        budget = parse_bytes(s.prefix_budget, 'prefix_budget')
        self.engine = Engine(model, 1, max_seq_len, s.kv_dtype, tokenizer=tokenizer,
                             captured=s.captured, prefix_budget=budget)
        self.replies, self.ttft = 0, []

    def reply(self) -> None:
        """Stream the model's turn, up to Ctrl-C if that comes first."""
        dialogue, s = self.dialogue, self.s
        room = self.engine.cache.max_seq_len - self.longest
        if dialogue.turns and len(dialogue.turns[-1].ids) > room // 2:
            raise UserError(f'your turn is longer than half of the {room:,} tokens of conversation '
                            f'that the model is given (its reply has {self.longest:,} more)')
        dialogue.untrim(room)  # e.g. if max_seq_len is larger than last time
        if len(dialogue.prompt(s.reply_as)) > room:
            # down to half, since a prompt with a new beginning has to be recomputed
            n = dialogue.trim(room // 2)
            print(f'(the conversation is longer than the {room:,} tokens that the model is given, '
                  f'with {self.longest:,} reserved for its reply: it sees turns {n + 1} to '
                  f'{len(dialogue.turns)} from here on; /history and the file have all)')
        params = replace(self.params, seed=sample_seed(s.seed, self.replies))
        self.replies += 1
        print(visible(dialogue.template.head(s.reply_as)), end='', flush=True)
        completion = self._stream(self.engine.submit(dialogue.prompt(s.reply_as), params))
        print()
        if completion.error:
            raise UserError(completion.error)
        if completion.ttft_s is not None:
            self.ttft.append(completion.ttft_s)
        dialogue.reply(s.reply_as, completion.text, completion.tokens)
        dialogue.save(self.path)

    def _stream(self, index):
        """Print the completion of request `index` while it is generated. Ctrl-C ends it."""
        completion = None
        while completion is None and self.engine.n_unfinished:
            try:
                events = self.engine.step()
                ended = (event.completion for event in events if event.completion)
                completion = next(ended, None)
                for event in events:
                    print(visible(event.text), end='', flush=True)
            except KeyboardInterrupt:
                self.engine.cancel(index)  # unless it has just ended by itself
        if completion is None:
            raise UserError('interrupted')
        return completion

    def say(self, text: str) -> None:
        """Add the user's turn and the reply."""
        self.dialogue.say(self.s.user, text)
        try:
            self.reply()
        except UserError:
            if self.dialogue.turns and self.dialogue.turns[-1].name == self.s.user:
                self.dialogue.turns.pop()
            raise

    def undo(self) -> str:
        """Remove the user's last turn and what follows. Returns its text, '' if there is none."""
        for i, turn in reversed(list(enumerate(self.dialogue.turns))):
            if turn.name == self.s.user:
                self.dialogue.cut(i)
                return turn.text
        return ''

    def command(self, line: str) -> bool:
        """Run a command. Returns whether to continue."""
        name, _, rest = line[1:].partition(' ')
        rest = rest.strip()
        if name in ('retry', 'edit'):
            before, trimmed = list(self.dialogue.turns), self.dialogue.trimmed
            text = self.undo()
            if not text:
                raise UserError(f'/{name}: you have said nothing yet')
            try:
                self.say(rest if name == 'edit' and rest else text)
            except UserError:
                self.dialogue.turns[:], self.dialogue.trimmed = before, trimmed
                raise
        elif name == 'undo':
            self.undo()
            self.dialogue.save(self.path)
            print(f'({len(self.dialogue.turns)} turns)')
        elif name == 'history':
            self.show(self.dialogue.turns)
        elif name == 'stats':
            print(self.stats())
        elif name == 'help':
            print(__doc__[__doc__.index('At the prompt'):].rstrip())
        elif name == 'quit':
            return False
        else:
            raise UserError(f'/{name}: no such command; /help lists them')
        return True

    def show(self, turns) -> None:
        """Print turns as formatted by the template."""
        template = self.dialogue.template
        text = ''.join(template.head(turn.name) + turn.text + template.end for turn in turns)
        print(visible(text), end='')

    def stats(self) -> str:
        """How much the prefix cache has saved so far."""
        store, stats = self.engine.prefix, self.engine.prefix.stats
        if not stats.requests:
            return 'no reply yet'
        held = store.nbytes + len(store.table.pinned) * store.copier.page_nbytes
        plan, tokens = self.engine.model.plan, len(store.blocks) * store.size
        vanilla = plan.vanilla().nbytes(1, 1, 'bfloat16')
        replies = '1 reply' if stats.requests == 1 else f'{stats.requests} replies'
        ttft = 'no reply came so far'
        if self.ttft:
            ttft = f'last {self.ttft[-1] * 1e3:.1f} ms, mean {fmean(self.ttft) * 1e3:.1f} ms'
        return (f'{replies}: {stats.found:,} of {stats.looked_up:,} prompt tokens reused '
                f'({stats.hit_rate:.1%})\ntime to the first token: {ttft}\n'
                f'held between turns: {nice_bytes(held)} for {tokens:,} tokens (vanilla GPT-2 in '
                f'bfloat16: {nice_bytes(vanilla * tokens)})')


def talk(chat) -> None:
    """Read lines until the end of input. Bytes that are not UTF-8 become U+FFFD."""
    if isinstance(sys.stdin, io.TextIOWrapper):  # it may be replaced by any object
        sys.stdin.reconfigure(errors='replace')
    while True:
        try:
            prompt = chat.dialogue.template.head(chat.s.user) if sys.stdin.isatty() else ''
            line = input(prompt).lstrip('\ufeff').strip()  # a file may begin with a BOM
        except KeyboardInterrupt:
            print('\n(/quit or Ctrl-D leaves)')
            continue
        except EOFError:
            return
        try:
            if line.startswith('/'):
                if not chat.command(line):
                    return
            elif line:
                chat.say(line)
        except UserError as e:
            print(visible(f'({e})'))


def main(argv=None):
    s = with_newest_run(configurator.parse(Settings, argv, usage=__doc__))
    model, tokenizer, dataset = load(
        s, lambda config, _: (1, conversation_length(s, config)), paged)
    user, reply_as = speakers(s, dataset)
    # bytes that are not UTF-8 can come from the command line
    s = replace(s, user=encodable(user), reply_as=encodable(reply_as), turn=encodable(s.turn))
    chat = Chat(s, model, tokenizer)
    if chat.path.is_file():
        chat.dialogue.load(chat.path)
        print(f'(going on with {len(chat.dialogue.turns)} turns from {chat.path}; the last ones:)')
        chat.show(chat.dialogue.turns[-2:])
    print(f'(up to {chat.engine.cache.max_seq_len:,} tokens of the conversation are given to the '
          'model; /help lists what you can do)')
    talk(chat)


if __name__ == '__main__':
    configurator.run_program(main)
