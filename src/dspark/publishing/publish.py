"""The upload of a checked draft folder to the Hugging Face hub: a repository, and one commit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from dspark.errors import DsparkError
from dspark.publishing.checks import Upload


def check_repo(repo: str) -> None:
    """Raise DsparkError unless `repo` is OWNER/NAME as the hub allows it."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise DsparkError("repo", repo, str(error)) from None
    if repo.count("/") != 1:
        raise DsparkError("repo", repo, "must be OWNER/NAME")


class Publisher:
    """Sends folders through `api`, which brings the endpoint and the token."""

    def __init__(self, api: HfApi) -> None:
        self.api = api

    def push(self, folder: Path, files: Sequence[Upload], repo: str, private: bool) -> str:
        """Make the repository if it is not there, and commit exactly `files` to it; returns the commit's address.

        private: of a new repository. Raises DsparkError when the hub refuses or cannot be reached.
        """
        try:
            self.api.create_repo(repo, private=private, exist_ok=True)
            names = [one.name for one in files]
            done = self.api.upload_folder(
                repo_id=repo, folder_path=folder, allow_patterns=names, commit_message="The draft and its card"
            )
        except Exception as error:  # the client lets many kinds through, its HTTP library's own among them
            raise DsparkError("push", repo, f"failed: {_first_line(error)}") from None
        return str(done.commit_url)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
