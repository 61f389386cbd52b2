"""Hooks of MkDocs: the site contains the scripts for its diagrams and its search, so that it needs no network.

`make site-tools` installs both into `scripts` of MkDocs's environment, by npm. Without npm, the theme loads the script
for diagrams from a network. A page without a network then shows their source text, and has no search as a local file.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path, PurePosixPath
from typing import Any

_INSTALLED = Path(sys.prefix, "scripts")
_IN_SITE = "assets/javascripts"
_DIAGRAMS = "mermaid.min.js"


def on_post_page(output: str, *, page: Any, config: Any) -> str:  # noqa: ANN401 - longspan's environment has no MkDocs
    """Return the page, with the script for diagrams if it has any. The script has 3.6 MB."""
    del config
    if 'class="mermaid"' not in output or not (_INSTALLED / _DIAGRAMS).exists():
        return output
    to_root = "../" * (len(PurePosixPath(page.file.dest_uri).parts) - 1)
    return output.replace("</body>", f'<script src="{to_root}{_IN_SITE}/{_DIAGRAMS}"></script></body>')


def on_post_build(*, config: Any) -> None:  # noqa: ANN401 - as above
    """Copy the scripts into the site."""
    for script in _INSTALLED.glob("*.js"):
        shutil.copyfile(script, Path(config["site_dir"], _IN_SITE, script.name))
