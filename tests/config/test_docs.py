"""README and docs: links lead somewhere, commands name programs and flags that exist, code compiles."""

import re
import shlex
from argparse import _SubParsersAction
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from benchmarks import program as benchmark
from tests.conftest import module_of
from tlt.errors import UserError
from tlt.tools.cli import parser as tlt_parser
from volo.cli import COMMANDS
from volo.config import fields
from volo.config.fields import Flag
from volo.config.flags_timm import ROWS, TIMM_FLAGS
from volo.config.train import TRAIN

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")] + sorted((ROOT / "docs").glob("*.md"))
SCRIPTS = {"validate.py": "validate", "generate_label.py": "label", "distributed_generate_label.sh": "label"}
SCRIPTS |= dict.fromkeys(("train.py", "distributed_train.sh", "pretrain.sbatch", "finetune.sbatch"), "train")
MAKE = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def names_of(flags: Iterable[Flag]) -> set[str]:
    """The flags as they may be given."""
    flags = list(flags)
    names = {name for row in flags for name in row.names if name.startswith("-")}
    return names | {f"--no-{row.label[2:]}" for row in flags if row.switch} | {"--help", "--version"}


@cache
def flags_of(program: str) -> set[str]:
    """The flags of a `volo` command, of "tlt NAME" or of "benchmark NAME"."""
    kind, _, name = program.partition(" ")
    if kind == "tlt":
        commands = next(each for each in tlt_parser()._actions if isinstance(each, _SubParsersAction)).choices
        return {flag for action in commands[name]._actions for flag in action.option_strings}
    program_row = TRAIN if kind == "launch" else COMMANDS[kind].program if kind in COMMANDS else None
    kind = program_row.settings if program_row else benchmark.program_of(name).settings
    return names_of(fields.flags_of(kind).values())


def rows() -> Iterator[Flag]:
    """Of all programs."""
    for kind in (
        *(command.program.settings for command in COMMANDS.values()),
        *(benchmark.program_of(name).settings for name in benchmark.COMMANDS),
    ):
        yield from fields.flags_of(kind).values()


def test_page_of_flags_names_every_flag_there_is_and_is_not():
    page = (ROOT / "docs" / "flags.md").read_text()
    known = names_of(rows()) | {"--help", "--no-X"}
    quoted = re.findall(r"`((?:\w+\.py )?--[a-z][^`]*)`", page)
    named = {flag for text in quoted for flag in re.findall(r"(?<![\w-])--[a-z][\w-]+", text)}
    assert len(named) > 40 and not named - known
    refused = {row.label for row in rows() if row.refused} - {"--num-gpu"}  # which is told with its number
    told = page[page.index("Refused, because") :].partition("\n\n")[0]
    assert refused and not {label for label in refused if f"`{label}`" not in told and f"`{label} " not in told}


def test_the_site_has_a_heading_for_every_flag_of_every_program():
    page = "\n\n".join(module_of(ROOT / ".ci" / "mkdocs_hooks.py").all_flags())
    headings = re.findall(r"^#### `(.*)` <small>(.*)</small> \{#(.*)\}\n\n\S", page, re.MULTILINE)
    pairs = ((program, name) for text, program, _ in headings for name in re.findall(r"--?[\w-]+", text))
    named = {f"{program.split()[-1]} {name}" for program, name in pairs}
    programs = [*COMMANDS, *(f"tlt {each}" for each in ("pack", "unpack", "check", "show")), "benchmark step"]
    asked = {f"{each.split()[-1]} {name}" for each in programs if each != "launch" for name in flags_of(each)}
    left_out = {each for each in asked - named if not re.search(r" (-h|--help|--version|--no-.*)$", each)}
    assert len(asked) > 300 and not left_out
    assert len({anchor for *_, anchor in headings}) == len(headings)


def test_the_site_has_every_page_as_markdown_and_llms_txt(tmp_path):
    build, load = pytest.importorskip("mkdocs.commands.build"), pytest.importorskip("mkdocs.config").load_config
    settings, files = load(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), plugins=[]), []
    settings.plugins.events["env"].append(lambda env, **given: files.append(given["files"]))
    build.build(settings)
    pages = [page.with_suffix(".md").name for page in tmp_path.glob("*.html") if page.name != "404.html"]
    index = (tmp_path / "llms.txt").read_text()
    assert re.match(r"# volo-tlt\n\n> .+\n(\n## .+\n\n(- .+\n)+)+\Z", index)
    listed = re.findall(r"^- \[[^\]]+\]\(([^)]+)\): [A-Z].+\.$", index, re.MULTILINE)
    assert sorted(listed) == sorted(pages) and len(pages) > 25
    for name in [*pages, "llms-full.txt"]:
        text = re.sub(r"^```.*?^```", "", (tmp_path / name).read_text(), flags=re.MULTILINE | re.DOTALL)
        targets = re.findall(r"\]\((?!https?://)([^)#]+)", text)
        assert text and "<!--" not in text and not [each for each in targets if not (tmp_path / each).is_file()], name
    assert "\n#### `--model NAME`" in (tmp_path / "all_flags.md").read_text()
    # A visitor's system decides until they do.
    schemes = re.findall(r'data-md-color-media="(.+?)"', (tmp_path / "index.html").read_text())
    assert schemes == [f"(prefers-color-scheme{which})" for which in ("", ": light", ": dark")]
    settings.site_url = "https://example.org/docs/"
    settings.plugins.on_env(object(), config=settings, files=files[0])
    assert (tmp_path / "llms.txt").read_text() == index.replace("](", "](https://example.org/docs/")


def test_flags_of_timm_alone_are_on_the_page_and_refused(tmp_path):
    page, known = (ROOT / "docs" / "parity.md").read_text(), names_of(TRAIN.parser().flags.values())
    assert not TIMM_FLAGS.keys() & known, "what is here now is no longer told of as missing"
    for flags, reason in ROWS.items():
        names = ", ".join(f"`{name}`" for name in flags.split())
        assert f"\n| {names} | " + re.sub("--[a-z-]+", r"`\g<0>`", reason) + " |\n" in page
        assert set(re.findall("--[a-z-]+", reason)) <= known
    for name, reason in TIMM_FLAGS.items():
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(f"{name[2:].replace('-', '_')}: 1\n")
        for line in ([name, "1"], [f"{name}=1"], [name.replace("-", "_").replace("__", "--", 1)], ["-c", str(recipe)]):
            with pytest.raises(UserError, match=re.escape(f" (timm): {reason}")):
                TRAIN.parse(["/data", *line])


def blocks(language: str) -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for match in re.finditer(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            yield page.name, match[1]


def commands() -> Iterator[tuple[str, list[str]]]:
    """The commands in blocks of bash, and of no language where they begin as one; words up to a pipe or a comment."""
    for page, text in [*blocks("bash"), *blocks("")]:
        for line in text.replace("\\\n", " ").splitlines():
            line = line.strip().removeprefix("$ ")
            if not re.match(r"([A-Z_]+=|python |\./|volo |tlt |make |srun |torchrun )", line):
                continue
            words = shlex.split(re.split(r"\s[|>]", re.sub(r"\$\([^)]*\)", "X", line))[0], comments=True)
            yield page, words


def program_of(words: list[str]) -> tuple[str, list[str]] | None:
    """The program of a command, as `flags_of` names it, and what follows; None: no program of ours."""
    for position, word in enumerate(words):
        name, following = word.rpartition("/")[2], words[position + 1 :]
        if name in SCRIPTS:
            return SCRIPTS[name], following
        if name == "volo" and following[:1] == ["launch"] and following[2:3] and following[2] in COMMANDS:
            return following[2], following[3:]
        if name in ("volo", "tlt") and following:
            return f"tlt {following[0]}" if name == "tlt" else following[0], following[1:]
        if name == "benchmark.py" and following:
            return f"benchmark {following[0]}", following[1:]
    return None


def test_commands_name_programs_and_flags_that_exist():
    checked, wrong = 0, []
    for page, words in commands():
        if words[0] == "make":
            wrong += [f"{page}: {' '.join(words)}" for word in words[1:] if "=" not in word and word not in MAKE]
        if "-m" in words[:6] and words[0].startswith("python"):
            module = words[words.index("-m") + 1]
            wrong += [] if find_spec(module) else [f"{page}: no module {module}"]
        if (called := program_of(words)) is None:
            continue
        program, following = called
        known = flags_of(program) if program.split()[0] in (*COMMANDS, "tlt", "benchmark") else set[str]()
        given = {word.partition("=")[0] for word in following if re.match(r"--[a-z]|-[a-zA-Z]+$", word)}
        wrong += [f"{page}: {program} {flag}" for flag in given - known]
        checked += len(given)
    assert not wrong and checked > 100


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_fit_a_page_with_comments_above(page):
    blocks = re.compile(r"^( *)```(\w*)\n(.*?)^\1```|(?:^ {4,}\S[^\n]*\n)+", re.MULTILINE | re.DOTALL)
    for block in blocks.finditer(page.read_text()):
        for line in (block[3] or block[0]).splitlines():
            assert len(line) <= 80, line
            shape = block[2] == "python" and re.search(r"  # [([].*[)\]]$", line)
            assert shape or not re.search(r"\S\s+# ", line), f"{line}: on a line of its own above"


def test_python_and_yaml_blocks_are_whole():
    for page, text in blocks("python"):
        compile(text, page, "exec")
    for _, text in blocks("yaml"):
        yaml.safe_load(text)


def anchors(page: Path) -> set[str]:
    """As GitHub and mkdocs make them of headings."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_are_there(page):
    for text, target in re.findall(r"([^\[\]]*)\]\((?!https?://)([^)]+)\)", page.read_text()):
        assert not text.endswith(".md"), f"{text}: a page is called by its title"
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target
    for name in re.findall(r"`((?:volo|tlt|tests|benchmarks|slurm|docs|examples)/[\w./*-]+)`", page.read_text()):
        assert [*ROOT.glob(name)], name
