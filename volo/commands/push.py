"""Upload a folder that `volo export --to-hf` wrote to the Hugging Face Hub."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from tlt.errors import UserError

_NEEDED = ("config.json", "model.safetensors")


def run(args: Namespace) -> int:
    """Upload, or list what would be uploaded.

    Raises:
        UserError: The folder is not of that kind, or the Hub refuses it.
    """
    folder = Path(args.folder)
    missing = [name for name in _NEEDED if not (folder / name).is_file()]
    if missing:
        raise UserError(f"--from {folder} has no {missing[0]}: write the folder with volo export --to-hf {folder}")
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        print(f"{file.stat().st_size / 1e6:9.1f} MB  {file.relative_to(folder)}")
    if args.dry_run:
        print(f"--dry-run: nothing was sent to {args.repository}")
        return 0
    from huggingface_hub import HfApi  # of timm's own dependencies

    try:
        api = HfApi()
        api.create_repo(args.repository, private=args.private or None, exist_ok=True)
        done = api.upload_folder(
            repo_id=args.repository, folder_path=folder, revision=args.revision or None, commit_message=args.message
        )
    except Exception as error:  # huggingface_hub's, httpx's and requests' share no narrower class
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"{args.repository} was not uploaded: {reason} (log in with `hf auth login` or HF_TOKEN)"
        ) from error
    print(f"uploaded: {done.commit_url}")
    return 0
