"""Check the English of docstrings, comments, error and log texts, test names and Markdown.

    python tools/words.py                       # compare the counts with tools/words.toml; exit 1 if any is higher
    python tools/words.py --list [PATH ...]     # print every finding below these paths
    python tools/words.py --update              # lower the counts in tools/words.toml to the present ones

Three kinds of findings are counted per package: banned words and phrases (`PHRASES`), docstrings that open with a
fragment (`openings`), and sentences that are too long or joined by a semicolon. Counts may fall and never rise.
The checks are heuristics over word lists. Extend the lists when a good sentence fails.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from openings import fault

ROOT = Path(__file__).parents[1]
RATCHET = ROOT / "tools" / "words.toml"
FOLDERS = ("src/longspan", "tests", "benchmarks", "deploy", "tools", "examples", "docs", "README.md")
KINDS = ("banned", "openings", "sentences")
MAX_WORDS = 25
"""Words in a sentence. Longer sentences are hard to read at one pass (style guide, rule 4)."""
_PEOPLE = r"(?<!engineers )(?<!users )(?<!people )(?<!readers )(?<!operators )(?<!someone )(?<!anyone )(?<!clients )"
_BEHIND = r"(?:that|who|which|whose|with|without|on|it|they|for|from|not|at|to|behind|beyond|under|and|are|is)"
PHRASES = {
    rf"\bthose(?: {_BEHIND}\b|[,.;:)]|$)": "name the things: blocks, requests, instances",
    r"\bones? (?:that|which|who|whose)\b": "name the thing",
    r"\bsome of which\b|\bthat which\b": "name the thing",
    r"\bwhat\b(?! if)(?![^.?!]*\?)": "name the thing, or use a noun: state, result, cause",
    rf"{_PEOPLE}\bwho\b(?![^.?!]*\?)|\bwhom\b|\bwhoever\b": "requests, ranks and blocks are not people",
    r"\b(?:nobody|somebody|everybody|everyone|no one)\b": "name the requests, ranks or instances",
    r"\bothers\b(?!')": "name them: requests, peers, instances",
    r"\bg[ai]ve[sn]? way\b|\bgiving way\b|\bmak(?:es?|ing) way\b": "is preempted",
    r"\bg[ai]ve[sn]? up\b|\bgiving up\b": "release, preempt, offload, abandon",
    r"\b(?:go|goes|went|gone|come|comes|came) out\b": "offload",
    r"\b(?:come|comes|came|coming) (?:in|back)\b": "load, resume",
    r"\bspill(?:s|ed|ing)?\b": "host-resident blocks; move to the host",
    r"\b(?:no |makes? |has |have |enough |more |the )?room\b": "free blocks, request slots, capacity",
    r"\bseats?\b": "request slots",
    r"\bpromis(?:e|es|ed|ing)\b": "reserved, guaranteed",
    r"\bbeside\b": "alongside, concurrently with, in addition to",
    r"\b(?:takes?|taking|in|their|its|have|has) turns?\b(?! of)": "alternate, in order",
    r"\bat the latest\b|\bby and by\b": "at most, gradually",
    r"\bfor want of\b|\bas long as it takes\b": "if there is no, no timeout",
    r"\bso (?:many|much|long|often) (?!that\b)": "give the number a name",
    r"\banew\b": "again",
    r"\b(?:tells?|told|says?) (?:whether|why|how|which|if)\b": "return whether; state",
    r"\bstands? for\b": "is used as, represents",
    r"\b(?:hindmost|thereof|therein|lest|whence|wherewith|thither|hither)\b": "plain words",
    r"\bmeant for\b|\bof its own accord\b|\bby themselves\b": "plain words",
}
"""Patterns to avoid, each with its replacement. See section 1 of the style guide."""
_BANNED = re.compile("|".join(f"(?:{pattern})" for pattern in PHRASES), re.IGNORECASE)
_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
_CALLS = {"debug", "info", "warning", "error", "exception", "critical", "warn", "echo", "print", "fail", "ValueError"}
_CALLS |= {"ParameterError", "ModelError", "WireError"}
_OPTION_WORDS = {"help", "group", "default"}


class Finding(NamedTuple):
    """A place in a file with a text that should change."""

    path: Path
    line: int
    kind: str
    why: str
    text: str


def findings(path: Path) -> Iterator[Finding]:
    """Yield the findings of a Python or Markdown file."""
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from _prose(path, _markdown(content))
        return
    tree = ast.parse(content)
    yield from _prose(path, _comments(content))
    strings = {id(node): (line, text) for node, line, text in _docstrings(tree)}
    yield from _prose(path, strings.values())
    messages = [message for node in ast.walk(tree) for message in _messages(node) if id(message) not in strings]
    yield from _prose(path, [(message.lineno, _text(message)) for message in messages], sentences=False)
    options = {id(text): text for node in ast.walk(tree) for text in _option_texts(node)}
    yield from _prose(path, [(text.lineno, _text(text)) for text in options.values()])
    names = [(n.lineno, n.name.replace("_", " ")) for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    yield from _prose(path, [(line, name) for line, name in names if name.startswith("test ")], sentences=False)
    if not path.is_relative_to(ROOT / "tests"):
        faults = ((line, why, text) for node in ast.walk(tree) for line, why, text in fault(node))
        yield from (Finding(path, line, "openings", why, text) for line, why, text in faults)


def _prose(path: Path, texts: Iterable[tuple[int, str]], *, sentences: bool = True) -> Iterator[Finding]:
    for line, text in texts:
        plain = re.sub(r"`+[^`]*`+", "X", text)
        for hit in _BANNED.finditer(plain):
            at = line + plain.count("\n", 0, hit.start())
            yield Finding(path, at, "banned", repr(hit[0].strip()), _around(plain, hit.start()))
        for sentence in _sentences(plain) if sentences else ():
            num_words = len(re.findall(r"\w[\w'/.-]*", sentence))
            if num_words > MAX_WORDS or "; " in sentence:
                why = f"{num_words} words" if num_words > MAX_WORDS else "a semicolon"
                at = line + plain.count("\n", 0, max(0, plain.find(sentence[:20])))
                yield Finding(path, at, "sentences", why, sentence)


def _around(text: str, at: int) -> str:
    return " ".join(text[max(0, at - 40) : at + 50].split())


def _sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text. List items, table cells and paragraphs end a sentence."""
    for paragraph in re.split(r"\n\s*\n|\n\s*(?=[-*#|]|\d+\. |\w+:(?:\s|$))|\|", text):
        joined = " ".join(paragraph.split())
        yield from re.split(r"(?<=[\w)'\"%][.!?:])\s+(?=[\"'(A-Z`*])", joined)


def _markdown(content: str) -> Iterator[tuple[int, str]]:
    """Yield a page without code blocks, link targets and generated parts, as one text."""
    blanked = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), content)
    unquoted = re.sub(r"`+[^`]*`+", lambda match: "X" + "\n" * match[0].count("\n"), blanked)
    yield 1, re.sub(r"\]\([^)]*\)|<[^>]*>|https?://\S+", "", unquoted)


def _comments(content: str) -> Iterator[tuple[int, str]]:
    """Yield comments. Neighbouring lines are one text."""
    begun, last, lines = 0, -2, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        if token.type != tokenize.COMMENT or re.match(r"# ?(noqa|type:|fmt:|pragma|!)", token.string):
            continue
        line, text = token.start[0], re.sub(r"#+ ?|-{5,}|noqa:.*", "", token.string)
        if line != last + 1 and lines:
            yield begun, "\n".join(lines)
            lines = []
        begun = line if not lines else begun
        lines.append(text)
        last = line
    if lines:
        yield begun, "\n".join(lines)


def _docstrings(tree: ast.AST) -> Iterator[tuple[ast.AST, int, str]]:
    """Yield string statements: docstrings, and descriptions below assignments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            text = re.sub(
                r"(?m)^ {4}\w+(, \w+)*: ", "    X: ", inspect.cleandoc(node.value.value)
            )  # names of arguments
            yield (
                node.value,
                node.lineno,
                re.sub(r"(?m)^ +(python|longspan|torchrun|make|pytest|scripts/) ?.*$", "", text),
            )


def _messages(node: ast.AST) -> Iterator[ast.Constant | ast.JoinedStr]:
    """Yield the texts of a raised error, a log call, an assertion, or a help text."""
    match node:
        case ast.Assign(targets=[ast.Name(id="problem" | "remedy" | "words")], value=value):
            yield from _literals([value])
        case ast.Raise(exc=ast.Call(args=args)):
            yield from _literals(args)
        case ast.Assert(msg=ast.expr() as message):
            yield from _literals([message])
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), args=args, keywords=keywords):
            if name in _CALLS:
                yield from _literals(args)
            texts = {"help", "description", "remedy", "message"}
            yield from _literals([keyword.value for keyword in keywords if keyword.arg in texts])


def _option_texts(node: ast.AST) -> Iterator[ast.Constant | ast.JoinedStr]:
    """Yield the help, the group and the default in words of an option, which annotates a field or a parameter."""
    match node:
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[_, *notes])):
            calls = [note for note in notes if isinstance(note, ast.Call)]
        case ast.Call(func=ast.Name(id="Option" | "Group" | "partial")):
            calls = [node]
        case _:
            calls = []
    for call in calls:
        yield from _literals([*call.args, *(word.value for word in call.keywords if word.arg in _OPTION_WORDS)])


def _literals(values: Iterable[ast.expr]) -> Iterator[ast.Constant | ast.JoinedStr]:
    for value in values:
        if isinstance(value, ast.JoinedStr) or (isinstance(value, ast.Constant) and isinstance(value.value, str)):
            yield value


def _text(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "`x`" for part in node.values)


def files(paths: Iterable[Path]) -> list[Path]:
    """Return the Python and Markdown files below some paths, without the word lists themselves."""
    listed = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*")))]
    own = {ROOT / "tools" / "words.py", ROOT / "tools" / "openings.py"}
    return [path for path in listed if path.suffix in {".py", ".md"} and path not in own]


def package(path: Path) -> str:
    """Return the key of a file in the ratchet: a package of `src`, `root`, or a folder of the repository."""
    parts = path.relative_to(ROOT).parts
    if parts[:2] == ("src", "longspan"):
        return parts[2] if len(parts) > 3 else "root"
    return "docs" if parts[0] == "README.md" else parts[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print every finding")
    parser.add_argument("--update", action="store_true", help="lower the counts in tools/words.toml")
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders; all by default")
    args = parser.parse_args()
    paths = files([path.resolve() for path in args.paths] or [ROOT / folder for folder in FOLDERS])
    counts = {(package(path), kind): 0 for path in paths for kind in KINDS}
    for path in paths:
        for finding in findings(path):
            counts[package(path), finding.kind] += 1
            if args.list:
                print(f"{path.relative_to(ROOT)}:{finding.line}: {finding.kind}: {finding.why}: {finding.text}")
    totals = Counter({kind: sum(n for (_, of), n in counts.items() if of == kind) for kind in KINDS})
    print("  ".join(f"{kind} {number}" for kind, number in totals.items()))
    if args.paths or args.list:
        return 0
    limits = tomllib.loads(RATCHET.read_text(encoding="utf-8")) if RATCHET.exists() else {}
    if args.update:
        lowered = {key: min(number, limits.get(key[0], {}).get(key[1], number)) for key, number in counts.items()}
        RATCHET.write_text(_toml(lowered), encoding="utf-8")
        return 0
    over = [
        f"{name}: {kind} {n}, limit {limits[name][kind]}"
        for (name, kind), n in counts.items()
        if n > limits[name][kind]
    ]
    print("\n".join(over))
    return int(bool(over))


def _toml(counts: dict[tuple[str, str], int]) -> str:
    lines = ["# Findings of tools/words.py per package. They may fall and never rise.", ""]
    names = sorted({name for name, _ in counts})
    lines += [f"{name} = {{ {', '.join(f'{kind} = {counts[name, kind]}' for kind in KINDS)} }}" for name in names]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
