"""Write the report of a summary: results.json, report.md and pictures; print its tables."""
from common.files import write_json, write_whole
from kv.console import output
from lab.ablation import tables
from lab.ablation.pictures import TITLES, write_all
from lab.ablation.stats import enough
from lab.ablation.summary import COMPARED

NOTE = ('Written by ablate.py from the files in this folder. A row is one change from the row '
        'above it, a side row (from ...) from the row that it names. KV bytes assume bfloat16 '
        'where a row does not set its storage (its loss is computed through a cache in the '
        'dtype of the model), and are compared with vanilla GPT-2 in bfloat16; the caches were '
        "allocated, and their sizes equal the plan's arithmetic.")


def write_report(summary: dict, folder) -> None:
    """Write all files. Raises UserError if matplotlib is missing or a file cannot be written."""
    write_json(folder / 'results.json', summary)
    write_whole(folder / 'report.md', markdown(summary, write_all(summary, folder)))


def markdown(summary: dict, pictures: list[str]) -> str:
    """Return report.md. pictures: names of the pictures in its folder."""
    parts = [f"# {summary['name']}: what each saving costs and buys",
             ' '.join(caveats(summary))]
    if missing := shortcomings(summary):
        parts.append(f'- {missing}')
    for name in pictures:
        parts += [f'![{TITLES[name]}]({name}.png)', f'{TITLES[name]}.']
    for table in tables.grids(summary):
        parts += [f'{table.title}.', table.markdown()]
    parts += [facts_line(summary), NOTE, '## Rows']
    rows = []
    for row in summary['rows']:
        changes = ', '.join(f'{name}={value!r}' for name, value in row['changes'].items())
        rows.append(f"- **{row['name']}**: {changes or 'as the base config'}  \n  "
                    f"`{row['command']}`")
    return '\n\n'.join([*filter(None, parts), '\n'.join(rows)]) + '\n'


def show(summary: dict) -> None:
    """Print the same tables on the terminal."""
    console = output()
    plain = dict(highlight=False, markup=False, soft_wrap=True)
    for line in (facts_line(summary), *caveats(summary)):
        console.print(line, **plain)
    if missing := shortcomings(summary):
        console.print(missing, style='red', **plain)
    for table in tables.grids(summary):
        table.print(console)


def caveats(summary: dict) -> list[str]:
    """Return sentences on what the losses of this ladder do not show."""
    lines = []
    known = {(row['name'], row[key]['mean']): row[key] for row in summary['rows']
             for key in COMPARED if enough(row.get(key))}
    if len(known) > 1:
        lines.append(f'{len(known)} intervals are shown, each by itself: about one in twenty '
                     'excludes zero where there is no difference. Differences marked * are '
                     'significant at 5% for all rows together that have three seeds and are '
                     'compared with the same kind of row (Holm 1979).')
    if known:
        lines.append('Intervals cover the variation between seeds, not the validation text.')
    return lines


def shortcomings(summary: dict) -> str:
    """The runs that have not been trained yet, or failed, in one line; '' if there are none."""
    waiting = [f"{row['name']} (seeds {', '.join(map(str, row['seeds_missing']))})"
               for row in summary['rows'] if row['seeds_missing']]
    return f"not trained yet: {'; '.join(waiting)}" if waiting else ''


def facts_line(summary: dict) -> str:
    """Data, size of the runs, hardware and versions in one line."""
    facts = summary['facts']
    if not facts['dataset']:
        return 'Nothing was measured yet.'

    def each(name, form=''):
        return ' or '.join(format(x, form) for x in facts[name])
    line = (f"{each('dataset')}, {each('iterations', ',')} iterations of B={each('B')} x "
            f"T={each('T')} ({each('tokens', ',')} tokens), {each('dtype')}, {each('hardware')}, "
            f"torch {each('torch')}")
    if 'val_windows' in facts:
        line += (f"; validation on {each('val_windows', ',')} windows "
                 f"({each('val_tokens', ',')} tokens), through the cache")
    return line + '.'
