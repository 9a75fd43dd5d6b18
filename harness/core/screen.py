"""What a terminal shows of text that somebody else may have written: none of it is obeyed. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from harness.core.errors import shown


class Screen(Console):
    """rich's console; text goes through `shown`, whatever it was part of, and rich's own colours and moves do not."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """As rich does it."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(shown(segment.text), segment.style)


def say(text: object, file: TextIO | None = None) -> None:
    """Print a line, or several; `shown`."""
    print(shown(str(text)), file=file, flush=True)
