"""Makes the long description for package indexes: README.md without pictures and links to files of the repository."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


class CustomMetadataHook(MetadataHookInterface):
    """Sets the field `readme`. A relative link or picture would be broken on an index."""

    def update(self, metadata: dict[str, object]) -> None:
        """Replace each relative link by its text."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": index_readme(text)}


def index_readme(text: str) -> str:
    """Remove relative pictures with their captions, and replace relative links by their texts."""
    text = re.sub(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n\n(?:\*[^\n]+\*\n\n)?", "", text, flags=re.MULTILINE)
    return re.sub(r"\[([^\]]+)\]\((?!https?:|#)[^)]*\)", r"\1", text)
