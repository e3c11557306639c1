"""Fetches a model from the Hugging Face hub, and says what to do when that fails."""

import sys
from collections.abc import Collection
from pathlib import Path

from server.errors import ModelError

# Weights in other formats, and copies in subfolders, are often many times the size of what is needed.
_WANTED = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")
_UNWANTED = ("*/*", "consolidated*")


def fetch_from_hub(repo_id: str, revision: str | None, *, with_code: bool = False, also: Collection[str] = ()) -> Path:
    """Download what is missing of a repository into the hub's own cache; honours HF_TOKEN, HF_HOME, HF_ENDPOINT.

    Args:
        with_code: fetch the repository's Python files too. also: patterns of further files.

    Returns: the snapshot's folder.
    Raises: ModelError naming cause and remedy.
    """
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    wanted = [*_WANTED, *(["*.py"] if with_code else []), *also]
    at = f" at revision {revision!r}" if revision else ""
    try:
        return Path(
            snapshot_download(repo_id, revision=revision, allow_patterns=wanted, ignore_patterns=list(_UNWANTED))
        )
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{repo_id} is gated: accept its licence on https://huggingface.co/{repo_id} and set HF_TOKEN to a token "
            "of that account"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{repo_id} has no revision {revision!r}: name an existing branch, tag or commit") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"there is no model {repo_id} on the hub, or it is private: check the name, or set HF_TOKEN to a token "
            "that may read it"
        ) from error
    except errors.HFValidationError as error:
        raise ModelError(
            f"{repo_id!r} is neither a folder or file here nor a hub id such as owner/name: {error}"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise ModelError(
            f"{repo_id}{at} is no folder here, is not in the hub's cache, and the hub cannot be reached: "
            "check network, proxy and HF_HUB_OFFLINE, or serve a folder that is already here"
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        remedy = "check HF_TOKEN" if status in (401, 403) else "try again later"
        raise ModelError(f"the hub refused {repo_id}{at} with HTTP status {status}: {remedy}") from error
    except Exception as error:  # the transport's own: its library differs between versions of huggingface_hub
        raise ModelError(f"cannot fetch {repo_id}{at}: {error}; check network, proxy and free disk space") from error
