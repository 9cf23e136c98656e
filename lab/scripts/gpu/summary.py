"""The tables of the GPU check: at most 40 lines for the terminal, all results for OUT/README.md."""
import json
from pathlib import Path

LINES = 40
GOOD = ('ok', 'skipped')
ORDER = ('ok', 'skipped', 'wrong', 'failed', 'crashed', 'stopped', 'not run')


def read(path: Path) -> tuple[list[dict], list[dict]]:
    """Read (facts about the runs, newest last; the newest record of each cell) from a cells.jsonl.
    Truncated lines are skipped."""
    runs, newest = [], {}
    for line in path.read_text(encoding='utf-8').splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if 'facts' in record:
            runs.append(record['facts'])
            continue
        key = record['part'], record['cell']
        if key not in newest or record['status'] != 'not run':  # an earlier result stays
            newest.pop(key, None)
            newest[key] = record
    return runs, list(newest.values())


def time_of(seconds: float) -> str:
    if seconds < 1e-3:
        return f'{1e6 * seconds:,.1f} us'
    return f'{1e3 * seconds:,.2f} ms' if seconds < 1 else f'{seconds:,.1f} s'


def speed(record) -> str:
    """'73 us, limit 52 us: 71% (expected 40%); 264 MB read', or '' if the cell has no limit or was
    not timed."""
    measured, limit = record.get('measured_seconds'), record.get('limit')
    if not measured or not limit:
        return ''
    line = (f'{time_of(measured)}, limit {time_of(limit)}: {limit / measured:.0%} '
            f"(expected {record['share']:.0%}); {record['work']}")
    if 'best' in record:
        line += f"; best {record['best']}: {record['best_ms'] * 1000:,.0f} us"
    return line


def last_line(record) -> str:
    return record.get('why', '').strip().rpartition('\n')[2].strip()


def counts(records) -> str:
    found = [(status, sum(record['status'] == status for record in records)) for status in ORDER]
    return ', '.join(f'{n} {status}' for status, n in found if n)


def listed(facts: dict) -> str:
    return ', '.join(f'{name} {value}' for name, value in facts.items() if value)


def by_part(records) -> dict[str, list[dict]]:
    found = {}
    for record in records:
        found.setdefault(record['part'], []).append(record)
    return found


def short(runs, records) -> str:
    """The most important results, in at most LINES lines."""
    head = ['GPU check: ' + listed(runs[-1] if runs else {})]
    head += [f'{part}: {counts(mine)}' for part, mine in by_part(records).items()]
    rates = [f"copy {record['copy_bytes_per_second'] / 1e12:.2f} TB/s, "
             f"matmul {record['product_flops'] / 1e12:.0f} TFLOP/s"
             for record in records if 'copy_bytes_per_second' in record]
    bad = [f"{record['status'].upper()} {record['cell']}: {last_line(record)}"[:150]
           for record in records if record['status'] not in (*GOOD, 'not run')]
    timed = [f"{record['cell'].removeprefix('bench/')}: {line}" for record in records
             if (line := speed(record))]
    room = LINES - len(head) - len(rates) - 1
    n_bad = min(len(bad), max(8, room - len(timed)))
    shown = bad[:n_bad] + timed[:room - n_bad]
    left = len(bad) + len(timed) - len(shown)
    return '\n'.join([*head, *rates, *shown] + [f'({left} more lines in README.md)'] * bool(left))


def page(runs, records) -> str:
    """All results as Markdown."""
    lines = ['# On a GPU', '',
             'Made by `lab/scripts/gpu_check.sh`; `cells.jsonl` has every number. Limits are from '
             "an H100's data sheet (3.35 TB/s, 989 TFLOP/s in bfloat16); expected shares were "
             'written down before the first run.', '']
    lines += [f'- {listed(facts)}' for facts in runs[-5:]] + ['']
    for part, mine in by_part(records).items():
        lines += [f'## {part}', '', counts(mine), '']
        rows = [record for record in mine if part != 'tests' or record['status'] not in GOOD]
        if rows:
            lines += ['| cell | status | measured | error (allowed) |', '|---|---|---|---|']
        for record in rows:
            error = ''
            if 'allowed' in record:
                error = f"{float(record['error']):.1e} ({float(record['allowed']):.1e})"
            line = speed(record) or last_line(record)[:200].replace('|', '\\|')
            lines.append(f"| {record['cell']} | {record['status']} | {line} | {error} |")
        lines += [''] * bool(rows)
        for record in mine:
            if 'table' in record:
                lines += [f"### {record['cell']}", '', '```', record['table'].rstrip(), '```', '']
    return '\n'.join(lines)
