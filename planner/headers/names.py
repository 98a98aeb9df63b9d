"""Names of models on the hub: ids (org/name), ids with a revision, and addresses of a model's web pages.

`org/name@revision` is the notation of huggingface_hub 1.x (utils/_hf_uris.py), which also defines the accepted
addresses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, urlsplit

from tonnage.planner.errors import ModelNotFound
from tonnage.planner.headers.hub import endpoint, modelscope

_HOSTS = ("huggingface.co", "hf.co")
_REPO = r"[A-Za-z0-9][\w.-]*/[\w.-]+"
_REVISION = r"\w[\w./+-]*"
# A tag after a colon names a GGUF file, as llama.cpp's -hf does: unsloth/Qwen3-8B-GGUF:Q4_K_M.
_ID = re.compile(rf"({_REPO})(?:@({_REVISION}))?(?::([\w.-]+))?", re.ASCII)
_DEFAULT_GGUF = "Q4_K_M"  # llama.cpp's default tag (common/download.cpp)
_REFS = re.compile(r"(refs/(?:convert/[\w.-]+|pr/\d+))(?:/(.*))?", re.ASCII)  # a revision that contains slashes
_ROUTES = ("tree", "blob", "raw", "resolve", "blame")
_TABS = ("summary", "files")  # last parts of the addresses of a model's tabs on ModelScope
_OTHER_KINDS = ("datasets", "spaces", "buckets", "kernels")
_HINT = 'name it "org/name" or "org/name@revision"'


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the hub: `repo` is org/name, `revision` a branch, a tag or a commit.

    Attributes:
        gguf: the GGUF file to load, as a path in the repository or a file type such as Q4_K_M; empty for other
            formats.
    """

    repo: str
    revision: str = "main"
    gguf: str = ""

    def __str__(self) -> str:
        name = self.repo if self.revision == "main" else f"{self.repo}@{self.revision}"
        return f"{name}:{self.gguf}" if self.gguf else name


def names_gguf(name: str) -> bool:
    """Return whether a model's name refers to a GGUF file, by its ending, its tag or the repository's name."""
    if name.lower().endswith(".gguf"):
        return True
    found = _ID.fullmatch(name)
    return found is not None and (found[3] is not None or _is_gguf_repo(found[1]))


def _is_gguf_repo(repo: str) -> bool:
    return repo.lower().endswith("-gguf")


def revision_of(model: HubModel) -> str:
    """Return the name of the model's revision (branch, tag or commit) on the configured hub.

    The main branch is called master on ModelScope.
    """
    return "master" if modelscope() and model.revision == "main" else model.revision


def hub_model(name: str) -> HubModel | None:
    """Return the hub model that `name` (an id or a web address) names, or None if it is neither.

    Raises:
        ModelNotFound: the address belongs to another host or is not a model's.
    """
    if name.startswith(("https://", "http://", *(f"{host}/" for host in _HOSTS))):
        return _of_address(name if "://" in name else f"https://{name}")
    found = _ID.fullmatch(name.removeprefix("hf://").removeprefix("models/") if "://" in name else name)
    return None if found is None else _model(found[1], found[2] or "main", found[3] or "")


def _of_address(address: str) -> HubModel:
    parts, ours = _split(address, "model"), _split(endpoint(), "HF_ENDPOINT")
    path, host = parts.path, (parts.hostname or "").removeprefix("www.")
    if host == (ours.hostname or "").removeprefix("www."):
        path = path.removeprefix(ours.path)
    elif host not in _HOSTS:
        hint = "set HF_ENDPOINT to use a mirror or a private hub"
        if host.startswith("modelscope."):
            hint = "set VLLM_USE_MODELSCOPE=True to plan models of ModelScope"
        raise ModelNotFound(f"{host} is not the hub, which is {ours.hostname}", field="model", hint=hint)
    words = [unquote(word) for word in path.split("/") if word]
    repo = "/".join(words[:2])
    if re.fullmatch(_REPO, repo, re.ASCII) is None or words[0] in _OTHER_KINDS:
        other = f", but one of its {words[0]}" if words and words[0] in _OTHER_KINDS else ""
        raise ModelNotFound(f"the address names no model of the hub{other}", field="model", hint=_HINT)
    if len(words) == 2 or (modelscope() and words[2:] in ([tab] for tab in _TABS)):
        return _model(repo, "main")
    if words[2] not in _ROUTES or len(words) == 3:
        raise ModelNotFound(
            f"the address names a page of {repo} that shows none of its files", field="model", hint=_HINT
        )
    refs = _REFS.fullmatch("/".join(words[3:]))
    revision, file = (refs[1], refs[2] or "") if refs else (words[3], "/".join(words[4:]))
    if file.lower().endswith(".gguf"):
        return _model(repo, revision, file)
    if file not in ("", "config.json"):
        raise ModelNotFound(
            f"the address names the file {file} of {repo}, not the model", field="model", hint=_HINT
        )
    return _model(repo, revision)


def _split(address: str, field: str) -> SplitResult:
    try:
        return urlsplit(address)
    except ValueError as error:  # urlsplit rejects unpaired brackets and invalid IPv6 addresses
        raise ModelNotFound(f"{address[:120]!r} is no address: {error}", field=field) from None


def _model(repo: str, revision: str, gguf: str = "") -> HubModel:
    if re.fullmatch(_REVISION, revision, re.ASCII) is None or ".." in revision:
        raise ModelNotFound(f"{revision[:120]!r} is no branch, tag or commit", field="model", hint=_HINT)
    return HubModel(repo, revision, gguf or (_DEFAULT_GGUF if _is_gguf_repo(repo) else ""))
