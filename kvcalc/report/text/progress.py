"""A progress bar on stderr."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(unit: str, total: int | None = None) -> Iterator[Callable[..., None] | None]:
    """Show a bar if stderr is a terminal, and yield the function that moves it; else yield None.

    The function takes `advance`, `completed` and `description`, as `rich.progress` does.
    """
    import sys

    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(f"{{task.completed:,}} {unit}"),
        TimeRemainingColumn() if total else TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)

        def move(**changes: object) -> None:
            progress.update(task, **changes)  # type: ignore[arg-type]

        yield move
