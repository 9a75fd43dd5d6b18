"""How the code and the pages read, in numbers: `python -m benchmarks.style [FOLDER]`, a report and never a limit.

For each room of `harness/` and for all of it: characters in a line of code; comprehensions and conditional expressions
per 100 lines of code; comment lines as a share of lines of code and comments; the length of functions in lines. For
the README and docs/: words, without code, link targets and tables' rules, and the longest sentences.

A line of code is one with a token that is neither a comment nor part of a docstring. FOLDER: another tree to measure.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import statistics
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
LONGEST = 20


@dataclass
class Measured:
    """What was counted in some files; sums of several are made with `add`."""

    files: int = 0
    characters: list[int] = field(default_factory=list[int])
    """Of each line of code, without its indentation."""
    comments: int = 0
    comprehensions: int = 0
    conditionals: int = 0
    functions: list[int] = field(default_factory=list[int])
    """Lines of each function, its docstring left out."""

    def add(self, other: Measured) -> None:
        self.files += other.files
        self.characters += other.characters
        self.comments += other.comments
        self.comprehensions += other.comprehensions
        self.conditionals += other.conditionals
        self.functions += other.functions

    def row(self, name: str) -> str:
        lines = len(self.characters)
        functions = sorted(self.functions) or [0]
        tenth = functions[min(len(functions) - 1, int(0.9 * len(functions)))]
        return (
            f"{name:22} {self.files:5} {lines:7,} {statistics.mean(self.characters or [0]):6.1f} "
            f"{100 * self.comprehensions / max(lines, 1):8.1f} {100 * self.conditionals / max(lines, 1):8.1f} "
            f"{100 * self.comments / max(lines + self.comments, 1):8.1f} "
            f"{statistics.median(functions):8.0f} {tenth:5}"
        )


def docstring_lines(tree: ast.AST) -> set[int]:
    """Lines of texts that stand alone: docstrings of modules, classes, functions and attributes."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            found.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def measure(source: str) -> Measured:
    """One Python file."""
    tree = ast.parse(source)
    texts = docstring_lines(tree)
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    code -= texts
    lines = source.splitlines()
    measured = Measured(
        files=1, characters=[len(lines[number - 1].strip()) for number in sorted(code)]
    )
    measured.comments = len(comments - code)
    for node in ast.walk(tree):
        measured.comprehensions += isinstance(node, COMPREHENSIONS)
        measured.conditionals += isinstance(node, ast.IfExp)
        if isinstance(node, FUNCTIONS):
            span = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            measured.functions.append(sum(number not in texts for number in span))
    return measured


def rooms(package: Path) -> Iterator[tuple[str, Measured]]:
    """Every room of the package, and last all of it."""
    by_room: dict[str, Measured] = {}
    everything = Measured()
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).parts
        room = "/".join(parts[:-1]) or "(top)"
        measured = measure(path.read_text(encoding="utf-8"))
        by_room.setdefault(room, Measured()).add(measured)
        everything.add(measured)
    yield from sorted(by_room.items())
    yield "all of " + package.name, everything


def prose(markdown: str) -> str:
    """A page without code, tables' rules, pictures and the targets of links."""
    text = re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^\[[^]]+\]: \S+$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^[|:\- ]+$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^]]*)\](\([^)]*\)|\[[^]]*\])", r"\1", text)
    return re.sub(r"`[^`]*`", "code", text)


def sentences(markdown: str) -> list[str]:
    """Sentences of the paragraphs and list items of a page; cells of tables and headings are none."""
    found: list[str] = []
    for paragraph in re.split(
        r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=\|)|\n(?=#)", prose(markdown)
    ):
        if paragraph.lstrip().startswith(("|", "#")):
            continue
        joined = " ".join(paragraph.split())
        found += re.split(r"(?<=[.!?:])\s+(?=[A-Z*_(`0-9])", joined)
    return [each for each in found if each]


def pages(root: Path) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "folder", nargs="?", type=Path, default=ROOT, help="the tree to measure (default: this one)"
    )
    root = parser.parse_args(arguments).folder

    print(f"{'':22} {'files':>5} {'lines':>7} {'chars':>6} {'compreh.':>8} {'condit.':>8} {'comm. %':>8} "
          f"{'median':>8} {'p90':>5}")  # fmt: skip
    for name, measured in rooms(root / "harness"):
        print(measured.row(name))

    longest: list[tuple[int, str, str]] = []
    total = 0
    print("\nwords")
    for page in pages(root):
        text = page.read_text(encoding="utf-8")
        words = len(prose(text).split())
        name = str(page.relative_to(root))
        total += words
        print(f"{words:7,}  {name}")
        longest += [(len(sentence.split()), name, sentence) for sentence in sentences(text)]
    print(
        f"{total:7,}  in all; {sum(count > 40 for count, *_ in longest)} sentences of over 40 words"
    )

    print(f"\nthe {LONGEST} longest sentences")
    for count, name, sentence in sorted(longest, reverse=True)[:LONGEST]:
        print(f"{count:4} words, {name}: {sentence}")


if __name__ == "__main__":
    main()
