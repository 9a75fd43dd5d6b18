"""Shows text that somebody else may have written on a terminal, which obeys none of it. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from harness.core.errors import shown


class Screen(Console):
    """rich's console with all text made safe by `shown`; rich's own colours and cursor moves pass."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """As rich's own `render`, with text made safe."""
        for segment in super().render(renderable, options):
            if segment.control:  # a colour or a cursor move of rich's own
                yield segment
            else:
                yield Segment(shown(segment.text), segment.style)


def say(text: object, file: TextIO | None = None) -> None:
    """Print a line, or several, made safe by `shown`."""
    print(shown(str(text)), file=file, flush=True)
