"""Progress bars on stderr, shown only if that is a terminal."""
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.progress import Progress, ProgressColumn


def progress_bar(*columns: str | ProgressColumn) -> Progress:
    console = Console(stderr=True)
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)


def tracked(items: Iterable, title: str) -> Iterator:
    """Iterate over `items` with a progress bar."""
    with progress_bar(*Progress.get_default_columns()) as bar:
        yield from bar.track(items, description=title)
