"""A registry in a dataset of the Hugging Face hub.

Read by ranges that go on where a connection was cut; written as one commit, tried again where it broke.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from freetoken.checkpoint.hub import (
    HubError,
    HuggingFaceRepo,
    OfflineError,
    describe,
    hf_endpoint,
    hf_token,
    is_offline,
    is_safe_name,
    network_errors,
    read_sibling,
)
from freetoken.errors import BadFileError, UsageError
from freetoken.share.bundle import SUFFIX
from freetoken.share.registry import OutdatedError

T = TypeVar("T")
TRIES = 5


class DatasetRepo(HuggingFaceRepo):
    """A dataset at one commit."""

    def make_url(self, name: str) -> str:
        """The `resolve` URL of a dataset's file."""
        base = super().make_url(name)
        return base.replace(f"{hf_endpoint()}/", f"{hf_endpoint()}/datasets/", 1)


class HubPlace:
    """A dataset repository; made by the first write where it is not there."""

    def __init__(self, repo: str, revision: str | None = None, *, is_private: bool = False) -> None:
        if is_offline():
            raise OfflineError(f"`hf:{repo}` cannot be asked: HF_HUB_OFFLINE is set", hint="unset HF_HUB_OFFLINE")
        self.repo, self.revision, self.is_private = repo, revision or "main", is_private
        self._opened: DatasetRepo | None = None

    def describe(self) -> str:
        """`hf:owner/name`."""
        return f"hf:{self.repo}"

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """The bytes of a file, or None where neither it nor the repository is there."""
        opened = self._open()
        file = opened.find_file(name) if opened is not None else None
        if opened is None or file is None:
            return None
        if file.bytes > max_bytes:
            raise BadFileError(f"{self.describe()}: {name} is larger than {max_bytes:,} bytes")
        return opened.read_file(name, max_bytes)

    def list_bundles(self) -> list[str]:
        """Bundles by name. Raises UsageError where there is no such repository."""
        opened = self._open()
        if opened is None:
            hint = "check the spelling; a private repository needs HF_TOKEN"
            raise UsageError(f"no dataset `{self.repo}` with revision `{self.revision}` on {hf_endpoint()}", hint=hint)
        return [one.name for one in opened.files if one.name.endswith(SUFFIX)]

    def write(self, files: Mapping[str, bytes], message: str) -> str:
        """One commit with all `files`; its address. It is all or nothing, so a broken connection is tried again."""
        from huggingface_hub import CommitOperationAdd, HfApi
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        api = HfApi(endpoint=hf_endpoint(), token=hf_token())
        kind = {"repo_type": "dataset"}
        self._ask(lambda: api.create_repo(self.repo, private=self.is_private or None, exist_ok=True, **kind))
        operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=data) for name, data in files.items()]
        # Over the very state that was read: the index of two pushes at a time would else lose one of them.
        parent = self._opened.commit if self._opened is not None else None
        try:
            made: Any = self._ask(
                lambda: api.create_commit(
                    self.repo, operations, commit_message=message, revision=self.revision, parent_commit=parent, **kind
                )
            )
        except (RepositoryNotFoundError, RevisionNotFoundError) as error:
            hint = "a token that may write (HF_TOKEN), and a branch that is there"
            raise UsageError(f"{self.describe()} has no branch `{self.revision}` to write to", hint=hint) from error
        self._opened = None
        return str(made.commit_url)

    def _open(self) -> DatasetRepo | None:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

        if self._opened is None:
            api = HfApi(endpoint=hf_endpoint(), token=hf_token())
            try:
                info: Any = self._ask(
                    lambda: api.dataset_info(self.repo, revision=self.revision, files_metadata=True, timeout=30)
                )
            except GatedRepoError as error:
                hint = f"ask for access at {hf_endpoint()}/datasets/{self.repo}, then set HF_TOKEN"
                raise UsageError(f"{self.describe()} is gated", hint=hint) from error
            except (RepositoryNotFoundError, RevisionNotFoundError):
                return None
            files = tuple(read_sibling(one) for one in info.siblings or () if is_safe_name(one.rfilename))
            self._opened = DatasetRepo(self.repo, self.revision, str(info.sha), files)
        return self._opened

    def _ask(self, call: Callable[[], T]) -> T:
        """What `call` gives; tried again while the connection breaks. Raises HubError in words."""
        from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

        for attempt in range(TRIES):
            try:
                return call()
            except (RepositoryNotFoundError, RevisionNotFoundError):
                raise
            except HfHubHTTPError as error:
                status = getattr(error.response, "status_code", None)
                if status in (401, 403):
                    hint = (
                        "HF_TOKEN, or `hub.token_file` in the machine-local file, must be a token that may write there"
                    )
                    raise UsageError(f"{self.describe()}: the hub answered {status}", hint=hint) from error
                if status in (409, 412):
                    hint = "somebody else pushed meanwhile; try again"
                    raise OutdatedError(f"{self.describe()}: {describe(error)}", hint=hint) from error
                if attempt + 1 == TRIES or (status is not None and status < 500 and status not in (408, 429)):
                    raise HubError(f"{self.describe()}: {describe(error)}") from error
            except network_errors() as error:
                if attempt + 1 == TRIES:
                    raise HubError(f"{hf_endpoint()} cannot be reached: {describe(error)}") from error
            time.sleep(0.1 * 2**attempt)
        raise AssertionError("the loop returns or raises")
