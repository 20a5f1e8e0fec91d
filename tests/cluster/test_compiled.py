"""Where compiled programs lie: in one folder, from which nothing is executed that others may have written."""

import os
from pathlib import Path

import pytest

from tlt.errors import UserError
from volo.cluster.compiled import keep_compiled


def _cached(monkeypatch: pytest.MonkeyPatch, folder: Path, **given: str) -> dict[str, str]:
    """Return the variables that torch and Triton read, after a start whose environment has those of `given`."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    for name in names:
        monkeypatch.setenv(name, "")  # so that what is set here is gone after the test
        monkeypatch.delenv(name)
    for name, value in ({"VOLO_COMPILED": str(folder)} | given).items():
        monkeypatch.setenv(name, value)
    assert not keep_compiled()
    return {name: os.environ[name] for name in names if name in os.environ}


def test_compiled_programs_are_kept_in_one_folder_of_the_user(monkeypatch, tmp_path):
    first = _cached(monkeypatch, tmp_path / "cache")
    (folder,) = (tmp_path / "cache").iterdir()
    assert {Path(path).parent for path in first.values()} == {folder} and folder.stat().st_mode & 0o777 == 0o700
    assert len({*first.values()}) == 2 and _cached(monkeypatch, tmp_path / "cache") == first  # the next start's
    torchs = _cached(monkeypatch, tmp_path / "cache", TORCHINDUCTOR_CACHE_DIR="/mine")
    assert torchs == first | {"TORCHINDUCTOR_CACHE_DIR": "/mine"}
    both = {"TORCHINDUCTOR_CACHE_DIR": "/mine", "TRITON_CACHE_DIR": "/ours"}
    assert _cached(monkeypatch, tmp_path / "none", **both) == both and not (tmp_path / "none").exists()
    home = _cached(monkeypatch, tmp_path, VOLO_COMPILED="", XDG_CACHE_HOME=str(tmp_path / "home"))
    assert all(path.startswith(f"{tmp_path}/home/volo/compiled-") for path in home.values())


@pytest.mark.parametrize("spoil", ["mode", "link", "owner", "file"])
def test_programs_that_others_may_write_are_not_executed(monkeypatch, tmp_path, spoil):
    _cached(monkeypatch, tmp_path)
    (folder,) = tmp_path.iterdir()
    if spoil == "mode":
        folder.chmod(0o770)
    elif spoil == "owner":
        other = os.stat_result((0o40700, 1, 1, 1, os.getuid() + 1, *[0] * 5))
        monkeypatch.setattr(Path, "lstat", lambda path: other)
    else:
        folder.rmdir()
        folder.symlink_to("/") if spoil == "link" else folder.touch(mode=0o700)
    with pytest.raises(UserError, match=f"^{folder} holds programs .* not yours alone: remove it, or name another"):
        _cached(monkeypatch, tmp_path)


def test_a_folder_that_cannot_be_made_is_a_line(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(AssertionError, match="no compiled programs are kept in .*VOLO_COMPILED"):
        _cached(monkeypatch, tmp_path / "file")
