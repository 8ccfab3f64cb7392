"""Artifacts: what a stage makes, under a key that says what it was made from.

An artifact is a folder `{root}/{stage}/{key}/` whose `manifest.json` is written last and is the only proof that it
exists. `Store.find` looks one up, `Store.construct` holds the lease while one is made, `Workspace.commit` makes it
real. `{artifact}/checkpoints/` outlives attempts and is outside the manifest's file list.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from dschat_core import storage
from dschat_core.config import Section, Stage, result_section
from dschat_core.errors import ConfigError, IntegrityError, TransientError
from dschat_core.leases import Lease, Owner, local_lock

MANIFEST = "manifest.json"
LEASE = "lease.json"
PIECES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
CHECKPOINTS = "checkpoints"
LEASE_S = 120.0
RENEW_S = 20.0
VERSIONED_PACKAGES = ("dschat", "torch", "deepspeed", "transformers", "tokenizers", "datasets", "numpy")


@dataclass(frozen=True)
class Product:
    """What a stage function made: `parts` maps a part's name to its files, relative to the output folder."""

    parts: dict[str, list[str]]
    facts: dict[str, Any] = field(default_factory=dict)


class FileEntry(BaseModel):
    """One file of an artifact."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    size_bytes: int
    sha256: str


class PartEntry(BaseModel):
    """A named group of an artifact's files; the digest is what consumers' keys are made of."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    digest: str
    files: list[str]


class InputEntry(BaseModel):
    """One part that an artifact was made from."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    digest: str
    stage: str = ""
    key: str = ""
    part: str = ""
    uri: str = ""


class Manifest(BaseModel):
    """The record that makes a folder an artifact."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    schema_version: Literal[1] = 1
    stage: Stage
    stage_version: int
    key: str
    run: str
    created_at: str
    wall_s: float
    config: dict[str, Any]
    runtime: dict[str, Any]
    inputs: dict[str, InputEntry]
    parts: dict[str, PartEntry]
    files: dict[str, FileEntry]
    facts: dict[str, Any]
    versions: dict[str, str]
    git_revision: str | None
    seal: str = ""

    @field_validator("files")
    @classmethod
    def _inside_the_artifact(cls, files: dict[str, FileEntry]) -> dict[str, FileEntry]:
        for name in files:
            if name.startswith("/") or ".." in name.split("/"):
                raise ValueError(f"the file name {name!r} points outside the artifact")
        return files

    @model_validator(mode="after")
    def _parts_are_listed(self) -> Manifest:
        for part, entry in self.parts.items():
            if unlisted := sorted(set(entry.files) - set(self.files)):
                raise ValueError(f"part {part!r} names {unlisted[0]!r}, which is not among the files")
        return self

    def content_digest(self) -> str:
        """SHA-256 of everything but the seal."""
        return storage.sha256_json(self.model_dump(mode="json", exclude={"seal"}))

    def to_bytes(self) -> bytes:
        """The manifest as written: indented JSON, one trailing newline."""
        return (json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n").encode()


@dataclass(frozen=True)
class Part:
    """A part of a committed artifact, as another stage reads it."""

    artifact: Artifact
    name: str

    @property
    def digest(self) -> str:
        """Digest over the part's files; equal digests mean equal contents."""
        return self.artifact.manifest.parts[self.name].digest

    def entry(self) -> InputEntry:
        """This part as a line of a consumer's lineage."""
        manifest = self.artifact.manifest
        return InputEntry(
            digest=self.digest, stage=manifest.stage, key=manifest.key, part=self.name, uri=self.artifact.uri
        )

    def folder(self) -> Path:
        """The local folder that holds the part's files, each checked against its hash.

        Raises:
            IntegrityError: a file is missing or is not what the manifest says.
        """
        return self.artifact.fetch(self.name)


class Artifact:
    """A committed artifact.

    A plain class on purpose: Prefect looks for a task's inputs inside dataclasses and models, and would draw an edge to
    every ancestor that the manifest names.
    """

    def __init__(self, uri: str, manifest: Manifest, local_root: Path) -> None:
        self.uri = uri
        self.manifest = manifest
        self.local_root = local_root

    def part(self, name: str) -> Part:
        """One of its parts. Raises ConfigError naming those there are."""
        if name not in self.manifest.parts:
            raise ConfigError(
                f"{self.uri} has no part {name!r}",
                why=f"its parts are {', '.join(self.manifest.parts)}",
                fix="add the data set to `data:` in the config",
            )
        return Part(self, name)

    def fetch(self, part: str) -> Path:
        """Make a part's files local and check their hashes; returns the part's folder."""
        files = self.manifest.parts[part].files
        for name in files:
            self._fetch_file(name)
        folders = {name.split("/")[0] for name in files if "/" in name}
        top = folders.pop() if len(folders) == 1 and all("/" in name for name in files) else ""
        return self.local_root / top

    def _fetch_file(self, name: str) -> None:
        entry, path = self.manifest.files[name], self.local_root / name
        problem = _file_problem(path, entry)
        if problem and storage.is_remote(self.uri):
            storage.download(storage.join(self.uri, name), path)
            problem = _file_problem(path, entry)
        if problem:
            if storage.is_remote(self.uri):
                path.unlink(missing_ok=True)
            raise IntegrityError(
                f"{path}: {problem}",
                where=f"part {part_of(self.manifest, name)} of {self.uri}",
                why="the file was changed or damaged after the artifact was committed",
                fix=f"dschat verify {self.uri} --repair, then run again",
            )

    def local(self) -> Path:
        """The artifact's local folder (for S3, the cache; only fetched parts are in it)."""
        return self.local_root


def part_of(manifest: Manifest, name: str) -> str:
    """The part a file belongs to, or an empty string."""
    return next((part for part, entry in manifest.parts.items() if name in entry.files), "")


def _file_problem(path: Path, entry: FileEntry) -> str | None:
    if not os.path.isfile(path):
        return "missing"
    size = path.stat().st_size
    if size != entry.size_bytes:
        return f"{size} bytes, the manifest says {entry.size_bytes}"
    digest = storage.sha256_file(path)
    if digest != entry.sha256:
        return f"SHA-256 {digest[:12]}…, the manifest says {entry.sha256[:12]}…"
    return None


def artifact_key(stage: Stage, section: Section, inputs: Mapping[str, InputEntry]) -> str:
    """SHA-256 of (stage, stage version, the section without `runtime`, the digests of the parts read)."""
    return storage.sha256_json(
        {
            "stage": stage,
            "version": getattr(type(section), "version", 1),
            "config": result_section(section),
            "inputs": {name: entry.digest for name, entry in inputs.items()},
        }
    )


def folder_digest(folder: Path, files: list[str]) -> str:
    """Digest of files by their names below `folder` and their contents."""
    return storage.sha256_json({name: storage.sha256_file(folder / name) for name in files})


# ── the store ───────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Workspace:
    """An artifact under construction, held by a lease.

    `output` takes the product; `state` (checkpoints, metrics, attempts) is kept between attempts.
    """

    store: Store
    stage: Stage
    key: str
    uri: str
    local_root: Path
    token: str
    owner: Owner
    started: float = field(default_factory=time.time)

    @property
    def output(self) -> Path:
        return self.local_root / f".work-{self.token}"

    @property
    def state(self) -> Path:
        return self.local_root / CHECKPOINTS

    def commit(self, product: Product, *, section: Section, inputs: Mapping[str, InputEntry]) -> Artifact:
        """Move the product into place, write the manifest last and return the artifact.

        Raises:
            TransientError: another owner took the lease meanwhile; nothing was committed.
        """
        files = storage.sizes(str(self.output))
        entries = {
            name: FileEntry(size_bytes=size, sha256=storage.sha256_file(self.output / name))
            for name, size in files.items()
        }
        parts = {
            part: PartEntry(
                digest=storage.sha256_json({n: entries[n].sha256 for n in sorted(names)}), files=sorted(names)
            )
            for part, names in product.parts.items()
        }
        manifest = Manifest(
            stage=self.stage,
            stage_version=getattr(type(section), "version", 1),
            key=self.key,
            run=self.owner.run,
            created_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            wall_s=round(time.time() - self.started, 3),
            config=result_section(section),
            runtime=section.model_dump(mode="json").get("runtime", {}),
            inputs=dict(inputs),
            parts=parts,
            files=entries,
            facts=product.facts,
            versions=_versions(),
            git_revision=_git_revision(),
        )
        manifest = manifest.model_copy(update={"seal": manifest.content_digest()})
        storage.sync_tree(self.output)
        self.store.check_lease(self.uri, self.token)
        for child in sorted(self.output.iterdir()):
            os.replace(child, self.local_root / child.name)
        self.output.rmdir()
        if storage.is_remote(self.uri):
            for name in entries:
                storage.upload(self.local_root / name, storage.join(self.uri, name))
            self.store.check_lease(self.uri, self.token)
        if not storage.write_new(storage.join(self.uri, MANIFEST), manifest.to_bytes()):
            raise TransientError(
                f"{self.uri} was committed by another owner meanwhile", fix="run the same command again"
            )
        return Artifact(self.uri, manifest, self.local_root)


class Store:
    """All artifacts below one root, a folder or an `s3://` address.

    Args:
        root: created if need be. Raises ConfigError (exit 20) if it can't be written.
    """

    def __init__(self, root: str) -> None:
        self.root = root if storage.is_remote(root) else str(storage.local_path(root).absolute())
        storage.ensure_writable(self.root)

    def uri(self, stage: str, key: str) -> str:
        """The address of an artifact."""
        return storage.join(self.root, stage, key[:24])

    def find(self, stage: Stage, key: str) -> Artifact | None:
        """The committed artifact of that key, its file sizes checked; None if there is none.

        Raises:
            IntegrityError: it is committed, but a file is missing or has another size.
        """
        uri = self.uri(stage, key)
        try:
            data = storage.read_bytes(storage.join(uri, MANIFEST))
        except (FileNotFoundError, NotADirectoryError):
            return None
        manifest = _parse_manifest(data, uri)
        if manifest.key != key:
            raise IntegrityError(
                f"{uri} holds key {manifest.key[:24]}…, expected {key[:24]}…", fix=f"remove {uri} and run again"
            )
        present = storage.sizes(uri)
        for name, entry in manifest.files.items():
            if present.get(name) != entry.size_bytes:
                raise IntegrityError(
                    f"{storage.join(uri, name)}: {present.get(name, 'no')} bytes, the manifest says {entry.size_bytes}",
                    why="the file was changed or removed after the artifact was committed",
                    fix=f"dschat verify {uri} --repair, then run again",
                )
        return Artifact(uri, manifest, local_folder(uri))

    @contextmanager
    def construct(
        self, stage: Stage, key: str, owner: Owner, *, on_wait: Callable[[str], None] = lambda _: None
    ) -> Iterator[Workspace | Artifact]:
        """Hold the lease on an artifact while it is made; waits for a living owner and then yields what it made."""
        uri = self.uri(stage, key)
        root = local_folder(uri)
        with storage.explained("write to", str(root)):
            root.mkdir(parents=True, exist_ok=True)
        token = uuid.uuid4().hex[:12]
        told = False
        while (holder := self._try_take(uri, owner, token)) is not None:
            if not told:
                on_wait(f"waiting for {holder.owner}, which is making {uri}")
                told = True
            time.sleep(2.0)
            if artifact := self.find(stage, key):
                yield artifact
                return
        stop = threading.Event()
        renewal = threading.Thread(target=self._renew, args=(uri, owner, token, stop), daemon=True)
        try:
            # Committed between the caller's `find` and our lease?
            if artifact := self.find(stage, key):
                yield artifact
                return
            workspace = Workspace(self, stage, key, uri, root, token, owner)
            _clear_leftovers(root)
            workspace.output.mkdir()
            workspace.state.mkdir(exist_ok=True)
            renewal.start()
            with storage.explained("write to", str(root)):
                yield workspace
        finally:
            stop.set()
            # A renewal under way would write the lease again after its removal.
            if renewal.is_alive():
                renewal.join()
            shutil.rmtree(root / f".work-{token}", ignore_errors=True)
            with local_lock(root):
                if self._holder_token(uri) == token:
                    storage.delete(storage.join(uri, LEASE))

    def check_lease(self, uri: str, token: str) -> None:
        """Raises TransientError if the lease is no longer ours."""
        if self._holder_token(uri) != token:
            raise TransientError(
                f"the lease on {uri} was lost", why="another run took it over", fix="run the same command again"
            )

    def _try_take(self, uri: str, owner: Owner, token: str) -> Lease | None:
        """Take the lease; None when it is ours, else the lease that stands."""
        with local_lock(local_folder(uri)):
            address = storage.join(uri, LEASE)
            lease = Lease(owner=owner, token=token, expires_at=time.time() + LEASE_S)
            if storage.write_new(address, lease.model_dump_json().encode()):
                return None
            held = self._read_lease(uri)
            if held is not None and not held.free_for(owner):
                return held
            storage.write(address, lease.model_dump_json().encode())
            return None

    def _renew(self, uri: str, owner: Owner, token: str, stop: threading.Event) -> None:
        while not stop.wait(RENEW_S):
            # A missed renewal is judged at commit, not here.
            with suppress(Exception), local_lock(local_folder(uri)):
                if self._holder_token(uri) == token:
                    lease = Lease(owner=owner, token=token, expires_at=time.time() + LEASE_S)
                    storage.write(storage.join(uri, LEASE), lease.model_dump_json().encode())

    def _read_lease(self, uri: str) -> Lease | None:
        try:
            return Lease.model_validate_json(storage.read_bytes(storage.join(uri, LEASE)))
        except (FileNotFoundError, ValidationError):
            return None

    def _holder_token(self, uri: str) -> str | None:
        lease = self._read_lease(uri)
        return lease.token if lease else None


def local_folder(uri: str) -> Path:
    """Where an artifact's files lie on this machine: itself, or for S3 a cache (`DSCHAT_CACHE`).

    Raises:
        IntegrityError: an S3 address climbs out of the cache.
    """
    if not storage.is_remote(uri):
        return storage.local_path(uri).absolute()
    if ".." in uri.split("/"):
        raise IntegrityError(f"{uri} points outside its bucket", fix="name the artifact without `..`")
    cache = Path(os.environ.get("DSCHAT_CACHE", Path.home() / ".cache" / "dschat"))
    return cache / uri.replace("://", "/")


def _clear_leftovers(root: Path) -> None:
    """Remove what an interrupted attempt or commit left; only state survives. Called by the lease's holder."""
    for child in root.iterdir():
        if child.name in (CHECKPOINTS, LEASE, ".lock"):
            continue
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()


def _parse_manifest(data: bytes, uri: str) -> Manifest:
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        raise IntegrityError(
            f"{storage.join(uri, MANIFEST)} is damaged",
            why=error.errors()[0]["msg"],
            fix=f"remove {uri} and run again",
        ) from None
    return manifest


def load_artifact(uri: str) -> Artifact:
    """The artifact at an address. Raises ConfigError if there is no manifest there."""
    with storage.explained("look for", uri):
        uri = uri if storage.is_remote(uri) else str(storage.local_path(uri).resolve())
    try:
        data = storage.read_bytes(storage.join(uri, MANIFEST))
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"{uri} is not an artifact", why=f"it has no {MANIFEST}", fix="dschat status RUN lists a run's artifacts"
        ) from None
    return Artifact(uri, _parse_manifest(data, uri), local_folder(uri))


def verify(uri: str) -> list[str]:
    """Hash everything an artifact's manifest lists; returns a line per problem, each naming its file."""
    artifact = load_artifact(uri)
    manifest = artifact.manifest
    problems = []
    data = storage.read_bytes(storage.join(artifact.uri, MANIFEST))
    sealed = data == manifest.to_bytes() and manifest.seal == manifest.content_digest()
    if not sealed or manifest.key != _recomputed_key(manifest):
        problems.append(f"{MANIFEST}: changed after it was written")
    for name, entry in manifest.files.items():
        if storage.is_remote(artifact.uri):
            with suppress(FileNotFoundError, ConfigError):
                storage.download(storage.join(artifact.uri, name), artifact.local_root / name)
        if problem := _file_problem(artifact.local_root / name, entry):
            problems.append(f"{name}: {problem}")
    for part, described in manifest.parts.items():
        digest = storage.sha256_json({name: manifest.files[name].sha256 for name in described.files})
        if digest != described.digest:
            problems.append(f"{MANIFEST}: the digest of part {part} does not fit its files")
    return problems


def take_back(uri: str) -> int:
    """Undo the commit of a damaged artifact, so that the next run makes it again.

    A stage that works piece by piece names in its facts (`pieces`) the folder below `checkpoints/` where it looks for
    finished ones: files that are what the manifest says go there, and only the others are made again.

    Returns:
        How many files are kept.
    """
    artifact = load_artifact(uri)
    pieces = artifact.manifest.facts.get("pieces")
    root, kept = artifact.local_root, 0
    with local_lock(root):
        storage.delete(storage.join(artifact.uri, MANIFEST))
        (root / MANIFEST).unlink(missing_ok=True)
        for name, entry in artifact.manifest.files.items():
            path = root / name
            if isinstance(pieces, str) and PIECES.fullmatch(pieces) and _file_problem(path, entry) is None:
                target = root / CHECKPOINTS / pieces / name
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)
                kept += 1
            else:
                path.unlink(missing_ok=True)
    return kept


def _recomputed_key(manifest: Manifest) -> str:
    return storage.sha256_json(
        {
            "stage": manifest.stage,
            "version": manifest.stage_version,
            "config": manifest.config,
            "inputs": {name: entry.digest for name, entry in manifest.inputs.items()},
        }
    )


def _versions() -> dict[str, str]:
    found = {}
    for package in VERSIONED_PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _git_revision() -> str | None:
    """The commit of the code that runs; None outside a checkout."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
        return done.stdout.strip() or None
    return None
