"""Checks that docstrings open with a sentence. `tools/words.py` prints and counts the findings.

A function's docstring must open with a verb, or have a verb before its first subordinate clause. Properties may open
with a noun phrase of two words or more, or with "whether" or "why"; modules and classes with a noun phrase of five.
Nothing else may open with a preposition or a question word, strings below an assignment included. This is a heuristic
over word lists: extend them when a good sentence fails.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FORBIDDEN = _words(
    """
    all as by for from how of see so than that those what where whether which who whose with
    """
)
SUBORDINATORS = _words(
    """
    that which who whom whose what where when while if unless until before after as than because
    """
)
# Any of these may be a main verb. Forms that are more often nouns (runs, blocks, moves) count only as the first word.
VERBS = _words(
    """
    is are was were be has have had does do did can cannot could may might must shall should will would agrees
    allows appears applies asks assumes arrives ascend becomes begins belongs brings calls carries comes consists
    contains covers decides depends describes differs ends equals exists expects falls fits follows fails gets
    gives goes grows happens holds ignores includes keeps knows leaves lets lies lives makes matters means meets
    mirrors needs occurs owns passes pays prices raises reads receives refers refuses remains replaces requires
    returns saves says sees seems sends serves shares shows sits skips speaks stands starts stays stops stores
    supports takes tells travels treats tries uses waits wants works writes wins agree apply ask begin belong come
    contain depend differ exist fit follow get give go grow hold keep know leave lie lose mean meet need own pass
    read receive remain require see send stand start stay stop take travel use wait want went came took gave left
    became made found sent kept ran lost let arrived compute hides lacks
    """
)
OPENERS = VERBS | _words(
    """
    abort account add adjust admit advance align allocate allow answer append arrange assemble assign attach attend
    attribute average await bind block bound break bring broadcast buffer build cache call cancel carry cast change
    check choose chunk clamp clear close collect combine compare compile complete compute connect construct
    continue convert copy count cover create cut deal decide declare decode decorate delay deliver derive describe
    detect determine detokenize dispatch drain draw drop emit empty encode end enforce enqueue ensure enter estimate
    evaluate evict exchange execute exit expect export expose extend fail fill filter find finish fix flatten flush
    forget format free gather generate group guard hand handle hide identify ignore implement import include inform
    initialize insert inspect install join kill launch lead leave lift limit link list listen load locate lock log
    look make map mark mask match measure merge model monitor move multiply name normalize note notify number
    observe offer open order pack parse part partition pause pay pick place plan play plot poll pop post predict
    preempt prepare prepend preserve price print process produce profile propose protect provide publish pull push
    put quantize queue raise rank rate reach recompute record recover reduce refer refuse register reject relate
    release relocate remember remove render reorder repeat replace replay reply report represent request reserve
    reset reshape resolve restart restore restrict resume retry return reuse reverse rotate round route run sample
    save say scale scatter schedule score search seed seek select separate serialize serve set settle shake shard
    share show shrink simulate skip solve sort speak split spread state step store stream submit sum supply swap
    switch synchronize tell test tie time track train transfer transform translate truncate try turn unload unpack
    unwind update validate verify view wake warm warn watch withdraw work wrap write yield interpolate iterate
    quote tokenize arrive download drive minimize pad query redirect
    """
)


def _why(node: ast.AST, text: str) -> str | None:
    """Return why a docstring's first sentence is a fragment, or None when it is a sentence."""
    summary = " ".join(text.partition("\n\n")[0].split())
    sentence = re.split(r"(?<=\w\.)\s", re.sub(r"`+[^`]*`+", "x", summary), maxsplit=1)[0]
    words = [word.lower() for word in re.findall(r"[\w'-]+", sentence)]
    if not words:
        return "is empty"
    is_property = _is_property(node)
    if words[0] in FORBIDDEN and not (is_property and words[0] in {"whether", "why"}):
        return f"opens with {words[0].capitalize()!r}"
    if is_property:
        return None if len(words) >= 2 else "says too little"
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None if words == ["x"] or len(words) >= 5 or _is_verb(words[0]) else "says too little"
    if len(words) < 3:
        return "says too little"
    end = next((index for index, word in enumerate(words) if index and word in SUBORDINATORS), len(words))
    has_verb = _is_verb(words[0]) or not VERBS.isdisjoint(words[1:end])
    return None if has_verb else "has no verb before a subordinate clause"


def fault(node: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield the line, fault and text of a node's docstring and of those below the assignments in its body."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text is not None and (why := _why(node, text)):
            yield node.body[0].lineno, why, text
    if isinstance(node, ast.Module | ast.ClassDef):
        for statement, below in pairwise(node.body):
            match statement, below:
                case ast.Assign() | ast.AnnAssign(), ast.Expr(value=ast.Constant(value=str() as text)):
                    if (first := text.split()[0].lower()) in FORBIDDEN:
                        yield below.lineno, f"opens with {first.capitalize()!r}", text


def _is_property(node: ast.AST) -> bool:
    """Return whether a function is a property, which is described by a noun phrase (PEP 257)."""
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return any(ast.unparse(decorator) in {"property", "cached_property"} for decorator in decorators)


def _is_verb(word: str) -> bool:
    forms = {word, word.removesuffix("s"), word.removesuffix("es"), re.sub("ies$", "y", word)}
    return not forms.isdisjoint(OPENERS)
