"""The tables of the GPU check: at most 40 lines for the terminal, all of it for OUT/README.md."""
import json
from pathlib import Path

LINES = 40
GOOD = ('ok', 'skipped')
ORDER = ('ok', 'skipped', 'wrong', 'failed', 'crashed', 'stopped', 'not run')


def read(path: Path) -> tuple[list[dict], list[dict]]:
    """(facts of the runs, newest last; the newest record of each cell) of a cells.jsonl. A line cut short is left out."""
    runs, newest = [], {}
    for line in path.read_text(encoding='utf-8').splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if 'facts' in record:
            runs.append(record['facts'])
        else:
            key = record['part'], record['cell']
            if key in newest and record['status'] == 'not run':  # which says nothing
                continue
            newest.pop(key, None)
            newest[key] = record
    return runs, list(newest.values())


def time_of(seconds: float) -> str:
    return f'{1e6 * seconds:,.1f} us' if seconds < 1e-3 else f'{1e3 * seconds:,.2f} ms' if seconds < 1 else f'{seconds:,.1f} s'


def speed(record) -> str:
    """'73 us, limit 52 us: 71% (expected 40%); 264 MB read': of a cell with a limit that was timed; '' of others."""
    measured, limit = record.get('measured_seconds'), record.get('limit')
    if not measured or not limit:
        return ''
    best = f"; best {record['best']}: {record['best_ms'] * 1000:,.0f} us" if 'best' in record else ''
    return (f"{time_of(measured)}, limit {time_of(limit)}: {limit / measured:.0%} (expected {record['share']:.0%}); "
            f"{record['work']}{best}")


def last_line(record) -> str:
    return ([line.strip() for line in record.get('why', '').splitlines() if line.strip()] or [''])[-1]


def counts(records) -> str:
    found = [(status, sum(record['status'] == status for record in records)) for status in ORDER]
    return ', '.join(f'{n} {status}' for status, n in found if n)


def short(runs, records) -> str:
    """What a person wants to know first, in at most LINES lines."""
    facts = runs[-1] if runs else {}
    head = ['GPU check: ' + ', '.join(f'{name} {value}' for name, value in facts.items() if value)]
    for part in dict.fromkeys(record['part'] for record in records):
        head.append(f'{part}: ' + counts([record for record in records if record['part'] == part]))
    rates = [f"copy {record['copy_bytes_per_second'] / 1e12:.2f} TB/s, matmul {record['product_flops'] / 1e12:.0f} TFLOP/s"
             for record in records if 'copy_bytes_per_second' in record]
    bad = [f"{record['status'].upper()} {record['cell']}: {last_line(record)}"[:150] for record in records
           if record['status'] not in (*GOOD, 'not run')]
    timed = [f"{record['cell'].removeprefix('bench/')}: {speed(record)}" for record in records if speed(record)]
    room = LINES - len(head) - len(rates) - 1
    n_bad = min(len(bad), max(8, room - len(timed)))
    lines = head + rates + bad[:n_bad] + timed[:room - n_bad]
    left = len(bad) + len(timed) - n_bad - len(timed[:room - n_bad])
    return '\n'.join(lines + [f'({left} more lines in README.md)'] * bool(left))


def page(runs, records) -> str:
    """Markdown of all results."""
    lines = ['# On a GPU', '', 'Made by `scripts/gpu_check.sh`; `cells.jsonl` has every number. Limits are those of an H100\'s '
             'data sheet (3.35 TB/s, 989 TFLOP/s in bfloat16); expected shares were written down before any run.', '']
    lines += ['- ' + ', '.join(f'{name} {value}' for name, value in facts.items() if value) for facts in runs[-5:]] + ['']
    for part in dict.fromkeys(record['part'] for record in records):
        mine = [record for record in records if record['part'] == part]
        lines += [f'## {part}', '', counts(mine), '']
        rows = [record for record in mine if part != 'tests' or record['status'] not in GOOD]
        if rows:
            lines += ['| cell | status | measured | error (allowed) |', '|---|---|---|---|']
        for record in rows:
            error = f"{record['error']:.1e} ({record['allowed']:.1e})" if 'allowed' in record else ''
            told = speed(record) or last_line(record)[:200].replace('|', '\\|')
            lines.append(f"| {record['cell']} | {record['status']} | {told} | {error} |")
        lines += [''] * bool(rows)
        for record in mine:
            if 'table' in record:
                lines += [f"### {record['cell']}", '', '```', record['table'].rstrip(), '```', '']
    return '\n'.join(lines)
