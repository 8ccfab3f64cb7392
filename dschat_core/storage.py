"""The only module that talks to disks and object stores: folders and `s3://` addresses through fsspec.

Local writes go to a temporary name, are synced and renamed; S3 writes are one conditional put. Both are therefore
whole or absent, and `write_new` is an atomic "create unless it exists" on both.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

import fsspec

from dschat_core.errors import ConfigError, DschatError, StorageFullError, TransientError

CHUNK_BYTES = 4 * 2**20


def is_remote(uri: str) -> bool:
    """Whether `uri` names an object store rather than a local path."""
    return "://" in uri and not uri.startswith("file://")


def local_path(uri: str) -> Path:
    """The path of a local address."""
    return Path(uri.removeprefix("file://"))


def join(root: str, *parts: str) -> str:
    """`root` and `parts` as one address."""
    return "/".join([root.rstrip("/"), *parts]) if root != "/" else "/" + "/".join(parts)


def filesystem(uri: str) -> Any:
    """The fsspec file system of an address; credentials and endpoint come from the usual AWS variables."""
    try:
        return fsspec.core.url_to_fs(uri, **({"use_listings_cache": False} if is_remote(uri) else {}))[0]
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"cannot use the address {uri}", why=str(error), fix="name a folder or an s3:// address"
        ) from error


@contextmanager
def explained(action: str, uri: str) -> Iterator[None]:
    """Turn an OS or S3 error into ours: full storage → 12, what no retry can mend → 20, anything else → 11."""
    try:
        yield
    except DschatError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = _free_bytes(uri)
            raise StorageFullError(
                f"no space left to {action} {uri}",
                why=f"{reason}; {free / 2**30:.2f} GiB free" if free is not None else reason,
                fix="free space there, then run the same command again: nothing committed was lost",
            ) from error
        if isinstance(error, PermissionError | FileNotFoundError | NotADirectoryError | IsADirectoryError) or (
            error.errno in (errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG)
        ):
            raise ConfigError(
                f"cannot {action} {uri}", why=reason, fix="choose another path (`store:` or `runs:`) or mend its rights"
            ) from error
        raise TransientError(f"cannot {action} {uri}", why=reason, fix="run the same command again") from error


def _free_bytes(uri: str) -> int | None:
    """Bytes free where `uri` lies; None where that is unknown."""
    if is_remote(uri):
        return None
    path = Path(uri).absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def size(uri: str) -> int:
    """Bytes of a file or of all files of a folder; 0 for what is no file of ours (`hf:name`)."""
    if not is_remote(uri):
        path = local_path(uri)
        if not path.exists():
            # A split of a saved data set: `folder:split`.
            path = local_path(uri.rpartition(":")[0])
        files = path.rglob("*") if path.is_dir() else [path]
        return sum(file.stat().st_size for file in files if file.is_file())
    with explained("look for", uri):
        return int(filesystem(uri).du(uri))


def read_bytes(uri: str) -> bytes:
    """The whole object. Raises FileNotFoundError if there is none."""
    with explained_unless_missing("read", uri):
        if not is_remote(uri):
            return local_path(uri).read_bytes()
        return cast(bytes, filesystem(uri).cat_file(uri))


@contextmanager
def explained_unless_missing(action: str, uri: str) -> Iterator[None]:
    """`explained`, but a missing object stays an OSError for the caller to judge: FileNotFound or NotADirectory."""
    try:
        with explained(action, uri):
            yield
    except ConfigError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            raise error.__cause__ from None
        raise


def exists(uri: str) -> bool:
    """Whether a file or object exists."""
    if not is_remote(uri):
        return Path(uri).exists()
    with explained("look up", uri):
        return bool(filesystem(uri).exists(uri))


def write(uri: str, data: bytes) -> None:
    """Write or replace the whole object atomically."""
    with explained("write", uri):
        if is_remote(uri):
            filesystem(uri).pipe_file(uri, data)
        else:
            temporary = _temporary(Path(uri), data)
            os.replace(temporary, uri)
            _sync_folder(Path(uri).parent)


def write_new(uri: str, data: bytes) -> bool:
    """Create the object; False (and nothing written) if it exists already. Atomic against other writers."""
    with explained("write", uri):
        if is_remote(uri):
            try:
                filesystem(uri).pipe_file(uri, data, mode="create")
            except FileExistsError:
                return False
            return True
        temporary = _temporary(Path(uri), data)
        try:
            os.link(temporary, uri)
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        _sync_folder(Path(uri).parent)
        return True


def _temporary(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete(uri: str) -> None:
    """Delete one file or object; nothing happens if there is none."""
    with suppress(FileNotFoundError):
        if is_remote(uri):
            filesystem(uri).rm_file(uri)
        else:
            Path(uri).unlink()


def sizes(uri: str) -> dict[str, int]:
    """{relative path: size in bytes} of all files below a folder or prefix."""
    if not is_remote(uri):
        root = Path(uri)
        return {
            str(path.relative_to(root)): path.stat().st_size
            for path in sorted(root.rglob("*"))
            if path.is_file() and not path.is_symlink()
        }
    with explained("list", uri):
        prefix = filesystem(uri)._strip_protocol(uri).rstrip("/") + "/"
        found = filesystem(uri).find(uri, detail=True)
        return {name.removeprefix(prefix): int(info["size"]) for name, info in sorted(found.items())}


def upload(local: Path, uri: str) -> None:
    """Copy a local file to an address."""
    with explained("write", uri):
        filesystem(uri).put_file(str(local), uri)


def download(uri: str, local: Path) -> None:
    """Copy an object to a local file, atomically."""
    local.parent.mkdir(parents=True, exist_ok=True)
    temporary = local.with_name(f".{local.name}.{uuid.uuid4().hex[:8]}.tmp")
    with explained("read", uri):
        try:
            filesystem(uri).get_file(uri, str(temporary))
            os.replace(temporary, local)
        finally:
            temporary.unlink(missing_ok=True)


def open_input(uri: str) -> IO[bytes]:
    """An input file as a byte stream."""
    with explained("read", uri):
        return cast("IO[bytes]", filesystem(uri).open(uri, "rb"))


def sync_tree(folder: Path) -> None:
    """Force every file and folder below `folder` to disk, so that a manifest never outlives its data."""
    for path in [*folder.rglob("*"), folder]:
        if path.is_symlink():
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def ensure_writable(root: str) -> None:
    """Create the folder if need be and prove that it can be written. Raises ConfigError naming it."""
    if is_remote(root):
        address = join(root, f".probe-{uuid.uuid4().hex[:8]}")
        write(address, b"")
        delete(address)
        return
    probe = Path(root) / f".probe-{uuid.uuid4().hex[:8]}"
    with explained("write to", root):
        Path(root).mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()


def sha256_stream(chunks: Iterable[bytes]) -> str:
    """Hex SHA-256 of the concatenated chunks."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def sha256_file(uri: str | Path) -> str:
    """Hex SHA-256 of a file or object, read in bounded memory."""
    with open_input(str(uri)) as file:
        return sha256_stream(iter(lambda: file.read(CHUNK_BYTES), b""))


def sha256_json(value: Any) -> str:
    """Hex SHA-256 of a JSON value in canonical form."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys and no spaces: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


class DigestMemory:
    """Hashes of files, remembered by identity: (size, mtime, inode) locally, ETag or version on S3."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, list[str]] = {}
        with suppress(OSError, ValueError, AttributeError):
            known = json.loads(path.read_text(encoding="utf-8"))
            self._known = {uri: pair for uri, pair in known.items() if isinstance(pair, list) and len(pair) == 2}

    def sha256(self, uri: str) -> str:
        """SHA-256 of the file, from memory when its identity has not changed."""
        identity = self._identity(uri)
        known = self._known.get(uri)
        if known and known[0] == identity:
            return known[1]
        digest = sha256_file(uri)
        if self._identity(uri) != identity:
            raise TransientError(f"{uri} changed while it was read", fix="run again once its writer has finished")
        self._known[uri] = [identity, digest]
        write(str(self._path), canonical_json(self._known))
        return digest

    @staticmethod
    def _identity(uri: str) -> str:
        with explained("read", uri):
            if is_remote(uri):
                info = filesystem(uri).info(uri)
                return f"{info['size']} {info.get('ETag')} {info.get('VersionId')}"
            stat = local_path(uri).stat()
            return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"
