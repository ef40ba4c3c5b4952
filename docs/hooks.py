"""What MkDocs does not do by itself: links of the pages to files of the repository outside of docs/.

In the repository ``[tuned.json](../benchmarks/results/h200/tuned.json)`` is a link to that file. The site gets a copy of
each file that a page names so, at the same place below its root, and the README and the changelog as pages.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)")
PAGES = {"README.md": "readme.md", "CHANGELOG.md": "changelog.md"}  # a README.md would be the front page


def on_files(files: Any, config: Any) -> Any:
    """Add what the pages link to."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=_from_root((ROOT / name).read_text(encoding="utf-8"))))
    texts = [file.content_string for file in files.documentation_pages()]
    named = {match for text in texts for match in OUTSIDE.findall(text)} - PAGES.keys()
    for name in sorted(named):
        if (ROOT / name).is_file():  # mkdocs says what is missing
            files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """``](../x`` is ``](x`` on the site, all of whose pages lie at its root."""
    return OUTSIDE.sub(lambda match: f"]({PAGES.get(match[1], match[1])}", markdown)


def _from_root(markdown: str) -> str:
    """A page of the repository's root, as if it lay in docs/."""
    links = re.sub(r"\]\((?!https?:|#|docs/|\.\./)", "](../", markdown)
    return links.replace("](docs/", "](")
