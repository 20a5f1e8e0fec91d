"""The blocks of the pages that a newcomer reads run in the order of the pages, on the sample, as they are printed."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

from tests.commands.conftest import ROOT
from tlt.tools import cli as tlt_cli

# In this order: README sends its readers to index.md first.
PAGES = ("index", "../README", "training", "predict", "looking", "python_api", "deploy")
# So that it takes seconds: nothing else is changed.
SMALLER = {
    "--images 600": "--images 60",
    r"--epochs \d+": "--epochs 1 -j 0 --warmup-epochs 0",
    r"epochs=\d+": "epochs=1, workers=0, warmup_epochs=0",
    "volo_d0": "volo_test",
    r"--experiment (first|annotator)": r"--experiment \1 --epochs 1 -j 0 --warmup-epochs 0",
    r"range\(100\)": "range(1)",
    r"batch_size=32": "batch_size=32, workers=0",
    r"torch\.compile\((.*)\)": r"\1",
    r"volo\.onnx": "volo.pt2",  # another page exports to ONNX
}


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """Language and text of each block that can run: those in another language, and with `<!-- not run: WHY -->`
    before them, can't."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    for reason, language, code in re.findall(r"^(<!-- not run: [^\n]+ -->\n)?^```(\w*)\n(.*?)^```", text, re.M | re.S):
        if not reason and language in ("bash", "python"):
            yield language, code


def commands(code: str) -> Iterator[list[str]]:
    for line in re.sub(r"\\\n *", "", code).splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def test_blocks_of_first_pages_run_in_order(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = []
    for page in PAGES:
        names: dict[str, Any] = {}  # a page's Python blocks go on from each other
        for language, code in blocks(page):
            for pattern, smaller in SMALLER.items():
                code = re.sub(pattern, smaller, code)
            if language == "python":
                exec(compile(code, f"{page}.md", "exec"), names)
                ran.append("python")
                continue
            for program, name, *words in commands(code):
                assert program in ("volo", "tlt"), f"{page}.md: {program} can't be run here: say why not"
                ended = call(name, shlex.join(words)) if program == "volo" else None
                code_of = ended.code if ended else tlt_cli.main([name, *words])
                assert code_of == 0, (ran, page, name, words, ended)
                ran.append(f"{program} {name}")
    programs = "sample train report validate predict attention label export"
    assert {f"volo {name}" for name in programs.split()} | {"tlt check", "tlt show", "python"} <= set(ran)
