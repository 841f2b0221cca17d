"""Text that every machine with Python has: docstrings of the standard library, by family of modules, and its topics.

A docstring is asked which family its module belongs to. Three quarters of a family's modules are known; the others are
a shift that training has not seen, and so is leaving out words. Paragraphs of `pydoc_data.topics` (the language
reference) are out of distribution; every second one of them belongs to the text for pretraining instead.
"""

import importlib
import inspect
import random
import re
import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from torch import Tensor

FAMILIES = {
    "numbers": "math cmath decimal fractions random statistics numbers",
    "text": "re difflib textwrap unicodedata locale codecs json csv configparser argparse xml.sax.saxutils "
    "xml.dom.minidom xml.etree.ElementTree",
    "files": "os shutil pathlib tempfile zipfile tarfile gzip bz2 lzma io fileinput stat pickle sqlite3",
    "network": "socket ssl http.client http.server http.cookiejar urllib.request urllib.parse ftplib smtplib imaplib "
    "poplib email.message email.utils socketserver xmlrpc.client mailbox",
    "concurrency": "threading multiprocessing multiprocessing.pool multiprocessing.managers concurrent.futures "
    "subprocess asyncio queue signal contextvars",
    "introspection": "inspect ast typing traceback pdb bdb symtable unittest doctest pydoc logging sys tracemalloc",
}
WORDS = re.compile(r"[a-z]+|\d|[^\w\s]")
PADDING, UNKNOWN, ASK = 0, 1, 2
ANSWERS = tuple(range(3, 3 + len(FAMILIES)))
FIRST_WORD = ANSWERS[-1] + 1
TEST = 250  # rows of a test set
LENGTH = 24  # tokens of a row, the question included


@dataclass(frozen=True)
class Text:
    """Everything as tokens."""

    vocabulary: int
    unlabelled: Tensor  # one long line of tokens, for pretraining
    train: tuple[dict[str, Tensor], Tensor]
    test: tuple[dict[str, Tensor], Tensor]
    other_modules: tuple[dict[str, Tensor], Tensor]
    dropped: dict[float, tuple[dict[str, Tensor], Tensor]]  # test rows with a share of their words left out
    outside: dict[str, Tensor]


def texts(module: str) -> list[str]:
    """The docstrings of a module's public functions, classes and methods, of eight words or more."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is deprecated
        found = importlib.import_module(module)
        public = [value for name, value in sorted(vars(found).items()) if not name.startswith("_")]
        own = [value for value in public if _package(getattr(value, "__module__", module)) == _package(module)]
        methods = [m for value in own if inspect.isclass(value) for n, m in sorted(vars(value).items()) if n[0] != "_"]
        documented = [inspect.getdoc(value) for value in own + methods if callable(value) and _is_pythons(value)]
    return list(dict.fromkeys(text for text in documented if text and len(text.split()) >= 8))


def _is_pythons(value: object) -> bool:
    """Not what another package puts into a class of the standard library when it is imported."""
    return (getattr(value, "__module__", None) or "builtins").split(".")[0] in sys.stdlib_module_names


def _package(module: object) -> str:
    """The first part of a module's name, the same for one in C."""
    return str(module).split(".")[0].strip("_")


def words_of(text: str) -> list[str]:
    """Lower case words, digits and signs."""
    return WORDS.findall(text.lower())


def read(rows: int, seed: int) -> Text:
    """Everything, with `rows` labelled docstrings to train on; the seed decides which, the vocabulary is fixed."""
    by_family = [{module: texts(module) for module in names.split()} for names in FAMILIES.values()]
    paragraphs = [part for topic in sorted(topics) for part in topics[topic].split("\n\n") if len(part.split()) >= 12]
    known: list[tuple[str, int]] = []
    other: list[tuple[str, int]] = []
    for label, modules in enumerate(by_family):
        names = sorted(modules, key=lambda name: (len(name) * 7919) % 101)  # some order that is not the alphabet's
        for position, name in enumerate(names):
            (other if position % 4 == 3 else known).extend((text, label) for text in modules[name])
    rng = random.Random(seed)
    rng.shuffle(known)
    train, test, rest = known[:rows], known[rows : rows + TEST], known[rows + TEST :]
    unlabelled = [words_of(text) for text in [*paragraphs[::2], *(text for text, _ in [*train, *rest])]]
    counts = Counter(word for words in unlabelled for word in words)
    index = {word: FIRST_WORD + place for place, (word, _) in enumerate(sorted(counts.most_common(2000)))}

    def tokens(texts: list[str], share: float = 0.0) -> dict[str, Tensor]:
        """Rows of tokens that end with the question, padded on the right."""
        drop = random.Random(1)
        ids = [[index.get(word, UNKNOWN) for word in words_of(text) if drop.random() >= share] for text in texts]
        ids = [[*row[: LENGTH - 1], ASK] for row in ids]
        padded = torch.tensor([row + [PADDING] * (LENGTH - len(row)) for row in ids])
        return {"input_ids": padded, "attention_mask": (padded != PADDING).long()}

    def labelled(pairs: list[tuple[str, int]], share: float = 0.0) -> tuple[dict[str, Tensor], Tensor]:
        return tokens([text for text, _ in pairs], share), torch.tensor([label for _, label in pairs])

    line = [index.get(word, UNKNOWN) for words in unlabelled for word in [*words, "."]]
    outside = tokens(rng.sample(paragraphs[1::2], 150))
    dropped = {share: labelled(test, share) for share in (0.3, 0.6)}
    others = labelled(rng.sample(other, min(TEST, len(other))))
    return Text(2000 + FIRST_WORD, torch.tensor(line), labelled(train), labelled(test), others, dropped, outside)
