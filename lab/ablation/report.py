"""Write the report of a summary: results.json, report.md, pictures, and the main table as
table.csv. Print its tables on the terminal."""

from kv.console import output
from lab.ablation import tables
from lab.ablation.pictures import TITLES, not_drawn, write_all
from lab.files import write_json, write_whole

CURVES = 'evaluations', 'gap', 'loss_by_position'


def write_report(summary: dict, folder, also_as: str = '') -> None:
    """Write all files. also_as: 'svg' or 'pdf' to save the pictures in that format too.

    Raises UserError if matplotlib is missing or a file cannot be written.
    """
    write_json(folder / 'results.json', without_curves(summary))
    write_whole(folder / 'report.md', markdown(summary, write_all(summary, folder, also_as)))
    write_whole(folder / 'table.csv', tables.as_csv(summary))


def without_curves(summary: dict) -> dict:
    """The summary without what is only drawn. The runs have it."""
    rows = [{key: value for key, value in row.items() if key not in CURVES}
            for row in summary['rows']]
    return {key: value for key, value in summary.items() if key != 'lookup_rows'} | {'rows': rows}


def markdown(summary: dict, pictures: list[str]) -> str:
    """Return report.md. pictures: names of the pictures in its folder."""
    parts = [f'# {tables.title(summary)}', ' '.join(tables.in_short(summary)),
             ' '.join(tables.caveats(summary))]
    warnings = tables.shortcomings(summary) + not_drawn(summary)
    if warnings:
        parts.append('\n'.join(f'- {line}' for line in warnings))
    for name in pictures:
        parts += [f'![{TITLES[name]}]({name}.png)', f'{TITLES[name]}.']
    for table in tables.grids(summary):
        parts += [f'{table.title}.', table.markdown()]
    parts += [*tables.notes(summary), '## Rows']
    rows = [f"- **{row['name']}**: {tables.changed(row)}  \n  `{row['command']}`"
            for row in summary['rows']]
    return '\n\n'.join([*filter(None, parts), '\n'.join(rows)]) + '\n'


def show(summary: dict) -> None:
    """Print the same tables on the terminal."""
    console = output()
    plain = dict(highlight=False, markup=False, soft_wrap=True)
    for line in (tables.facts_line(summary), *tables.in_short(summary), *tables.caveats(summary)):
        console.print(line, **plain)
    for line in tables.shortcomings(summary) + not_drawn(summary):
        console.print(line, style='red', **plain)
    for table in tables.grids(summary):
        table.print(console)
