"""Names of models on the hub: ids, ids with a revision, and addresses of web pages.

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
_ID = re.compile(rf"({_REPO})(?:@({_REVISION}))?", re.ASCII)
_REFS = re.compile(r"(refs/(?:convert/[\w.-]+|pr/\d+))(?:/(.*))?", re.ASCII)  # a revision that contains slashes
_ROUTES = ("tree", "blob", "raw", "resolve", "blame")
_TABS = ("summary", "files")  # names of the tabs on a model's ModelScope page
_OTHER_KINDS = ("datasets", "spaces", "buckets", "kernels")
_HINT = 'name it "org/name" or "org/name@revision"'


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the hub: `repo` is org/name, `revision` a branch, a tag or a commit."""

    repo: str
    revision: str = "main"

    def __str__(self) -> str:
        return self.repo if self.revision == "main" else f"{self.repo}@{self.revision}"


def revision_of(model: HubModel) -> str:
    """Return the revision's name on the hub in use; ModelScope's main branch is called master."""
    return "master" if modelscope() and model.revision == "main" else model.revision


def hub_model(name: str) -> HubModel | None:
    """Return the model that an id or address names, or None if the text is neither.

    Raises:
        ModelNotFound: the address belongs to another host or is not a model's.
    """
    if name.startswith(("https://", "http://", *(f"{host}/" for host in _HOSTS))):
        return _of_address(name if "://" in name else f"https://{name}")
    found = _ID.fullmatch(name.removeprefix("hf://").removeprefix("models/") if "://" in name else name)
    return None if found is None else _model(found[1], found[2] or "main")


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
        what = f"one of its {words[0]}" if words and words[0] in _OTHER_KINDS else "no model"
        raise ModelNotFound(f"that page of the hub is {what}", field="model", hint=_HINT)
    if len(words) == 2 or (modelscope() and words[2:] in ([tab] for tab in _TABS)):
        return HubModel(repo)
    if words[2] not in _ROUTES or len(words) == 3:
        raise ModelNotFound(f"that page of {repo} shows none of its files", field="model", hint=_HINT)
    refs = _REFS.fullmatch("/".join(words[3:]))
    revision, file = (refs[1], refs[2] or "") if refs else (words[3], "/".join(words[4:]))
    if file not in ("", "config.json"):
        raise ModelNotFound(f"that page of {repo} shows a part of it, {file}", field="model", hint=_HINT)
    return _model(repo, revision)


def _split(address: str, field: str) -> SplitResult:
    try:
        return urlsplit(address)
    except ValueError as error:  # an unpaired bracket, or an invalid IPv6 address in brackets
        raise ModelNotFound(f"{address[:120]!r} is no address: {error}", field=field) from None


def _model(repo: str, revision: str) -> HubModel:
    if re.fullmatch(_REVISION, revision, re.ASCII) is None or ".." in revision:
        raise ModelNotFound(f"{revision[:120]!r} is no branch, tag or commit", field="model", hint=_HINT)
    return HubModel(repo, revision)
