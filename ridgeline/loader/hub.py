"""Where is the model that the user named: a folder here, or files from the hub?"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ridgeline.architectures import read_spec
from ridgeline.architectures.catalogue import Entry, find_entry, suggestions
from ridgeline.architectures.spec import missing
from ridgeline.errors import ConfigError
from ridgeline.loader.folder import check_folder
from ridgeline.loader.gguf import is_gguf
from ridgeline.loader.hub_files import Blobs, HubFile, check_room
from ridgeline.loader.shards import INDEX_FILE, SINGLE_FILE, shard_names
from ridgeline.log import say

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]  # (stage, done, of how many); here bytes

HUB = "https://huggingface.co"
DEFAULT_REVISION = "main"
TIMEOUT_S = 10.0
MAX_RESUMED_BYTES = 50_000_000_000  # above that the hub serves no plain HTTP
COMMIT = re.compile(r"[0-9a-f]{40}")
HUB_ID = re.compile(r"(?P<name>\w[\w.-]*(/\w[\w.-]*)?)(@(?P<revision>\w[\w./-]*))?")

# All that is ever asked for besides the weights: no pickles, no code.
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model on this machine, a folder or a GGUF file. `revision` is the commit it was downloaded
    from, if it was."""

    path: Path
    name: str
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class Pulled:
    """A model in the cache. `left_out` are files of the hub that are never fetched (None: the hub
    was not asked), `num_fetched` and `num_resumed` bytes that came now and that had come before of
    a file that was incomplete."""

    model: ModelFolder
    files: Mapping[str, int]  # name: bytes
    left_out: Mapping[str, int] | None = None
    num_fetched: int = 0
    num_resumed: int = 0


class _Unreachable(Exception):
    """The hub did not answer, or not with an answer about this model."""


def resolve_model(
    model: str,
    *,
    offline: bool | None = None,
    progress: Progress | None = None,
    endpoint: str | None = None,
    cache_dir: Path | None = None,
) -> ModelFolder:
    """The folder of a model given as a folder, a GGUF file or a hub id `user/name[@revision]`.

    A folder or file of that name wins. Otherwise the revision is resolved to a commit and every
    file comes from that commit into the hub's usual cache; what is there is not fetched again,
    and without the hub (`offline`, HF_HUB_OFFLINE, or no answer) the cache is used alone.
    HF_ENDPOINT, HF_HOME and HF_HUB_CACHE are honoured. ConfigError says what cannot be had, and
    why.
    """
    if not model:
        raise ConfigError("no model was named; give a folder or a hub id user/name[@revision]")
    folder = Path(model).expanduser()
    if is_gguf(folder):
        return ModelFolder(folder, folder.resolve().stem)
    if os.path.lexists(folder):
        check_folder(folder)
        return ModelFolder(folder, folder.resolve().name)
    hub = _hub_of(model, endpoint, cache_dir)
    return _resolve(hub, offline=_is_offline(offline), progress=progress).model


def pull(model: str, progress: Progress | None = None) -> Pulled:
    """A hub id's model in the cache, as `resolve_model` gets it."""
    if Path(model).expanduser().exists():
        raise ConfigError(
            f"{model} is here already, as a folder or file, and commands take that; to pull a "
            "model of this name from the hub start elsewhere"
        )
    return _resolve(_hub_of(model, None, None), offline=_is_offline(None), progress=progress)


def check_name(model: str) -> None:
    """ConfigError for what can be seen to be no model without asking the hub."""
    if not os.path.lexists(Path(model).expanduser()):
        _hub_of(model, None, None)


def find_config(
    model: str,
    *,
    offline: bool | None = None,
    endpoint: str | None = None,
    cache_dir: Path | None = None,
) -> Path:
    """The folder with the config.json of a hub id, perhaps nothing else. As `resolve_model` for the
    rest: what cannot be had is refused after one question, in the same words."""
    hub = _hub_of(model, endpoint, cache_dir)
    try:
        return _find_config(hub, offline=_is_offline(offline))
    except ConfigError as error:
        if not (near := suggestions(model)):
            raise
        raise ConfigError(f"{error}; the catalogue has {', '.join(near)}") from None


def _find_config(hub: _Hub, *, offline: bool) -> Path:
    cached = hub.snapshot()
    if cached is not None and (offline or COMMIT.fullmatch(hub.revision)):
        return cached
    if offline:
        hub.fail(f"offline, and its config.json is not in the cache at {hub.store}")
    try:
        return hub.download_config()
    except _Unreachable as why:
        if cached is None:
            hub.fail_without_answer(why)
        hub.say_cached(cached.name, why)
        return cached


def _hub_of(model: str, endpoint: str | None, cache_dir: Path | None) -> _Hub:
    """ConfigError for what is no hub id, and for a name of the catalogue or one that is near."""
    found = HUB_ID.fullmatch(model)
    if found is None or ".." in model:
        raise ConfigError(f"{model}: folder not found, and it is no hub id user/name[@revision]")
    if (entry := find_entry(model)) is not None:
        _refuse_shape(entry)
    if "/" not in model and (near := suggestions(model)):
        raise ConfigError(
            f"{model}: no folder here and no name of the catalogue; did you mean "
            f"{', '.join(near)}? (`ridgeline inspect --list` shows all; a hub id is user/name)"
        )
    return _Hub(
        found["name"],
        found["revision"] or DEFAULT_REVISION,
        endpoint or os.environ.get("HF_ENDPOINT") or HUB,
        cache_dir or _cache_dir(os.environ),
    )


def _refuse_shape(entry: Entry) -> NoReturn:
    needs = missing(read_spec(entry.config))
    way_out = f"name a folder with its weights, or the hub id {entry.hub_id}"
    if needs:
        way_out = f"this version does not serve such a model, which needs {', '.join(needs)}"
    raise ConfigError(
        f"{entry.name} is a shape of the catalogue, without weights, for plan, predict, simulate "
        f"and inspect; {way_out}"
    )


def _is_offline(asked: bool | None) -> bool:
    if asked is not None:
        return asked
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _resolve(hub: _Hub, *, offline: bool, progress: Progress | None) -> Pulled:
    cached = hub.cached()
    if cached is not None and (offline or COMMIT.fullmatch(hub.revision)):
        return _as_cached(cached)
    if offline:
        hub.fail(f"offline, and it is not complete in the cache at {hub.store}")
    try:
        return hub.download(progress)
    except _Unreachable as why:
        if cached is None:
            hub.fail_without_answer(why)
        hub.say_cached(cached.revision, why)
        return _as_cached(cached)


def _as_cached(model: ModelFolder) -> Pulled:
    return Pulled(model, {path.name: path.stat().st_size for path in sorted(model.path.iterdir())})


def _cache_dir(environment: Mapping[str, str]) -> Path:
    if named := environment.get("HF_HUB_CACHE"):
        return Path(named).expanduser()
    base = environment.get("XDG_CACHE_HOME") or "~/.cache"
    home = environment.get("HF_HOME") or f"{base}/huggingface"
    return Path(home).expanduser() / "hub"


class _Hub:
    """One model at one revision: what the hub has of it, and what the cache has."""

    def __init__(self, name: str, revision: str, endpoint: str, cache_dir: Path) -> None:
        self.name = name
        self.revision = revision
        self._endpoint = endpoint.rstrip("/")
        self._cache_dir = cache_dir
        self.store = cache_dir / ("models--" + name.replace("/", "--"))

    def fail(self, reason: str) -> NoReturn:
        where = "" if self.revision == DEFAULT_REVISION else f"@{self.revision}"
        raise ConfigError(f"model {self.name}{where}: {reason}")

    def fail_without_answer(self, why: _Unreachable) -> NoReturn:
        self.fail(
            f"the hub gave no answer ({why}), and the cache at {self.store} lacks it; mend the "
            "network or the proxy, or name a folder"
        )

    def say_cached(self, commit: str | None, why: _Unreachable) -> None:
        text = "the hub gave no answer, using the cached copy"
        say(logger, logging.WARNING, text, model=self.name, revision=commit, reason=why)

    def cached(self) -> ModelFolder | None:
        """The copy in the cache, when no file of it is missing."""
        folder = self.snapshot()
        if folder is None or not _is_complete(folder):
            return None
        return ModelFolder(folder, self.name, folder.name)

    def snapshot(self) -> Path | None:
        """The folder in the cache, when it has a config.json at least."""
        ref = self.store / "refs" / self.revision
        commit = self.revision
        if not COMMIT.fullmatch(commit):
            commit = ref.read_text().strip() if ref.is_file() else ""
        folder = self.store / "snapshots" / commit
        if not COMMIT.fullmatch(commit) or not (folder / "config.json").is_file():
            return None
        return folder

    def download_config(self) -> Path:
        """The folder of config.json alone. _Unreachable when the hub cannot be asked at all."""
        commit, files = self._ask()
        self._check_config(files)
        path = self.fetch("config.json", commit, _bar(lambda _: None))
        if self.cached() is None:  # a whole model of an older commit stays what is used offline
            self._remember(commit)
        return path.parent

    def download(self, progress: Progress | None) -> Pulled:
        """Fetch what is missing. _Unreachable when the hub cannot be asked at all."""
        commit, files = self._ask()
        self._check_config(files)
        self._check_weights(files)
        wanted = [name for name in SMALL_FILES if name in files]
        if SINGLE_FILE in files:
            wanted.append(SINGLE_FILE)
        else:
            index = self.store / "snapshots" / commit / INDEX_FILE
            if not index.is_file():
                self._fetch_verified(files[INDEX_FILE], commit, _bar(lambda _: None))
            wanted += [INDEX_FILE, *shard_names(index)]
        for name in wanted:
            if name not in files:
                self.fail(f"the hub lacks {name}, which {INDEX_FILE} names")
        folder, blobs = self.store / "snapshots" / commit, Blobs(self.store)
        missing = [files[name] for name in wanted if not (folder / name).is_file()]
        try:
            check_room(self.store, missing, blobs)
        except ConfigError as problem:
            self.fail(str(problem))
        num_resumed = sum(map(blobs.num_bytes, missing))
        transfer = _Transfer(sum(files[name].size for name in wanted), progress)
        for name in wanted:
            if files[name] in missing:
                self._fetch_verified(files[name], commit, _bar(transfer.advance))
            transfer.complete(files[name].size)
        self._remember(commit)
        say(logger, logging.INFO, "model is complete", model=self.name, revision=commit)
        return Pulled(
            ModelFolder(folder, self.name, commit),
            {name: files[name].size for name in wanted},
            {name: file.size for name, file in files.items() if name not in wanted},
            sum(file.size for file in missing) - num_resumed,
            num_resumed,
        )

    def _fetch_verified(self, file: HubFile, commit: str, bar: type) -> None:
        from huggingface_hub import hf_hub_url

        if file.sha256 is not None and file.size <= MAX_RESUMED_BYTES:
            url = hf_hub_url(self.name, file.name, revision=commit, endpoint=self._endpoint)
            try:
                Blobs(self.store).fetch(file, url, bar)
            except Exception as error:
                self._fail_transfer(file.name, error)
            bar = _bar(lambda _: None)
        path = self.fetch(file.name, commit, bar)
        if file.sha256 is None and (why := file.why_wrong(path)):
            path.resolve().unlink()
            path.unlink(missing_ok=True)
            self.fail(f"{file.name}: {why}; it was removed, start again")

    def _ask(self) -> tuple[str, dict[str, HubFile]]:
        """The commit that the revision stands for, and its files by name."""
        from huggingface_hub import HfApi

        try:
            info = HfApi(endpoint=self._endpoint).model_info(
                self.name, revision=self.revision, files_metadata=True, timeout=TIMEOUT_S
            )
        except Exception as error:  # whatever HTTP library the hub's client uses today
            self._explain(error)
        if info.sha is None or not COMMIT.fullmatch(info.sha):
            self.fail("the hub did not say which commit this is")
        return info.sha, {
            file.rfilename: HubFile(
                file.rfilename,
                file.size or 0,
                None if file.lfs is None else file.lfs.sha256,
                file.blob_id,
            )
            for file in info.siblings or ()
        }

    def _check_config(self, names: Iterable[str]) -> None:
        if "config.json" not in names:
            self.fail("it has no config.json on the hub, so it is no model that can be served")

    def _check_weights(self, names: Iterable[str]) -> None:
        if not {SINGLE_FILE, INDEX_FILE} & set(names):
            pickles = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth")))
            what = f"only pickled weights ({pickles[0]})" if pickles else f"no {SINGLE_FILE}"
            self.fail(f"it has {what} on the hub; only safetensors are served")

    def _explain(self, error: Exception) -> NoReturn:
        """ConfigError when the hub said no, _Unreachable when it said nothing."""
        from huggingface_hub import errors

        if isinstance(error, errors.GatedRepoError):
            self.fail(
                "access is restricted; accept its terms on the hub and log in (hf auth login)"
            )
        if isinstance(error, errors.RepositoryNotFoundError):
            self.fail("neither a folder here nor a model on the hub (a private one needs a login)")
        if isinstance(error, errors.RevisionNotFoundError):
            self.fail(f"the hub knows no revision {self.revision!r} of it")
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(status, int) and 400 <= status < 500 and status not in (408, 429):
            self.fail(f"the hub refused the request (HTTP {status})")
        reason = f"HTTP {status}" if status else type(error).__name__
        raise _Unreachable(reason) from error

    def fetch(self, file: str, commit: str, bar: type) -> Path:
        """One file into the cache. ConfigError names the file when its transfer fails."""
        from huggingface_hub import hf_hub_download

        options: dict[str, Any] = {}
        if "tqdm_class" in inspect.signature(hf_hub_download).parameters:
            options["tqdm_class"] = bar
        try:
            return Path(
                hf_hub_download(
                    self.name,
                    file,
                    revision=commit,
                    endpoint=self._endpoint,
                    cache_dir=self._cache_dir,
                    **options,
                )
            )
        except Exception as error:
            self._fail_transfer(file, error)

    def _fail_transfer(self, file: str, error: Exception) -> NoReturn:
        if isinstance(error, ConfigError):
            self.fail(str(error))
        reason = str(error).splitlines()[0][:200] if str(error) else ""
        self.fail(
            f"the transfer of {file} failed ({type(error).__name__}: {reason}); "
            "start again: what has come is kept"
        )

    def _remember(self, commit: str) -> None:
        """Note the commit of a branch or tag once what was wanted of it is here, for offline
        starts."""
        if COMMIT.fullmatch(self.revision):
            return
        ref = self.store / "refs" / self.revision
        try:
            ref.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=ref.parent, delete=False) as file:
                file.write(commit)
            os.replace(file.name, ref)
        except OSError as error:
            say(logger, logging.WARNING, "cannot note the commit", reason=error.strerror)


class _Transfer:
    """How far the transfer of all files has got, in bytes."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total = total
        self._progress = progress
        self._complete = 0  # of files that are here
        self._current = 0  # of the file under way

    def advance(self, num_bytes: int) -> None:
        self._current += num_bytes
        self._report()

    def complete(self, num_bytes: int) -> None:
        self._complete += num_bytes
        self._current = 0
        self._report()

    def _report(self) -> None:
        if self._progress is not None:
            self._progress("download", self._complete + self._current, self._total)


def _bar(advance: Callable[[int], None]) -> type:
    """A progress bar for the hub's client to report to, which draws nothing itself."""
    base: Any = importlib.import_module("huggingface_hub.utils").tqdm

    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **{**kwargs, "disable": True})
        advance(int(kwargs.get("initial") or 0))

    def update(self: Any, n: float | None = 1) -> None:
        advance(int(n or 0))

    return type("Bar", (base,), {"__init__": start, "update": update})


def _is_complete(folder: Path) -> bool:
    """Whether it has all weights; a snapshot has its config.json."""
    if (folder / SINGLE_FILE).is_file():
        return True
    index = folder / INDEX_FILE
    return index.is_file() and all((folder / shard).is_file() for shard in shard_names(index))
